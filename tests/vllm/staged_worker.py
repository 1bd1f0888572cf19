"""Code of tests that runs inside the processes of vLLM's workers: vLLM mixes ``StagedWorker`` into its own class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group

import cargohold.transfer.cpu
from cargohold.protocol import Clock, TransferOutcome
from cargohold.tiers import HostMemory
from cargohold.transfer import CopyJob, Direction, TransferWorker
from tests.vllm.faults import Faults


class _Place(Faults):
    """Faults of this process, and the size of the host memory that its transfers were given."""

    host_bytes = 0

    def make_transfers(
        self,
        regions: Sequence[torch.Tensor],
        memory: HostMemory,
        clock: Clock,
        further: Sequence[Sequence[torch.Tensor]] = (),
    ) -> TransferWorker:
        self.host_bytes = memory.rows.nbytes
        return super().make_transfers(regions, memory, clock, further)


_here = _Place()
# Only workers import this module, before they make their connectors. The module of faults has kept the original function.
cargohold.transfer.cpu.make_transfer_worker = _here.make_transfers


class StagedWorker:
    """Methods for tests, which are called with ``collective_rpc``."""

    rank: int
    model_runner: Any

    def get_ready(self) -> None:
        """Allocate the tensors that stages pass on to each other.

        Normally vLLM does so when it measures the model, but on CPUs it does not measure if nothing is compiled.
        """
        runner = self.model_runner
        if get_pp_group().is_first_rank:
            return
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )

    def host_bytes(self) -> int:
        """Bytes of this worker's shard of host memory."""
        return _here.host_bytes

    def go_wrong(
        self, rank: int, failing: str | None = None, *, scramble_loads: bool = False, hold_polls: int = 0
    ) -> None:
        """Set the faults of the worker of ``rank`` from now on; other workers have none."""
        is_here = self.rank == rank
        direction = None if failing is None or not is_here else Direction(failing)
        _here.outcome = lambda job: _outcome(job, direction)
        _here.scramble_loads = scramble_loads and is_here
        _here.hold_polls = hold_polls if is_here else 0

    def num_failed(self) -> int:
        """Number of transfers that failed on this worker."""
        return sum(count for (_, outcome), count in _here.counts.items() if outcome is TransferOutcome.FAILED)


def _outcome(job: CopyJob, failing: Direction | None) -> TransferOutcome:
    return TransferOutcome.FAILED if job.direction is failing else TransferOutcome.DONE
