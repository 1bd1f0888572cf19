"""Makes the transfer worker for the device that the paged KV is on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cargohold.offload.tier.host import HostMemory
from cargohold.offload.transfer.base import TransferWorker
from cargohold.offload.transfer.cpu import CpuTransferWorker
from cargohold.protocol import Clock


def make_transfer_worker(regions: Sequence[torch.Tensor], memory: HostMemory, clock: Clock) -> TransferWorker:
    """Make a transfer worker between paged KV and host memory.

    Args:
        regions: the paged KV; see ``KVConnectorWorker.register_kv_caches``.
        memory: this worker's shard of host memory.
        clock: monotonic time in seconds.
    """
    if regions[0].is_cuda:
        from cargohold.offload.transfer.cuda import CudaTransferWorker  # noqa: PLC0415  # needs a CUDA runtime

        return CudaTransferWorker(regions, memory, clock)
    return CpuTransferWorker([region.numpy() for region in regions], memory.rows, clock)
