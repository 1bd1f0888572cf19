"""A transfer worker in ten lines: the one that suits the device, with a count of what it copies each way."""

from collections import Counter
from collections.abc import Sequence

import torch

from cargohold.protocol import Clock
from cargohold.tiers import HostMemory
from cargohold.transfer import CopyJob, ForwardingTransfers, TransferWorker
from cargohold.transfer.cpu import make_transfer_worker

copied_bytes = Counter[str]()


class Counting(ForwardingTransfers):
    """Passes every call on, and counts the bytes of each job."""

    def __init__(self, inner: TransferWorker, block_bytes: int) -> None:
        super().__init__(inner)
        self._block_bytes = block_bytes

    def submit(self, job: CopyJob) -> None:
        copied_bytes[job.direction.value] += len(job.block_ids) * self._block_bytes
        super().submit(job)


def make(regions: Sequence[torch.Tensor], memory: HostMemory, clock: Clock) -> TransferWorker:
    """The factory that options name; called on every worker."""
    return Counting(make_transfer_worker(regions, memory, clock), memory.rows.shape[1])
