"""A spec for vLLM's own offloading connector whose worker copies on a CPU, which vLLM's specs do not.

Everything that decides is vLLM's: the connector, its scheduler side and its manager. Our own transfer worker carries out the
copies, so that connectors are compared and not copying.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from cargohold.offload.transfer import CopyJob, Direction
from cargohold.offload.transfer.cpu import CpuTransferWorker
from cargohold.protocol import TransferOutcome

TIMEOUT_S = 600.0


class CopyingSpec(CPUOffloadingSpec):  # type: ignore[misc]  # vLLM ships no types
    """vLLM's host memory tier, on vLLM's CPU build."""

    def get_worker(self, kv_caches: Any) -> CopyingWorker:
        """The worker for paged KV in CPU memory."""
        assert self.blocks_per_chunk == 1, "a chunk is a block here"
        return CopyingWorker(kv_caches, self.num_chunks)


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM ships no types
    """Copies blocks between the paged KV and chunks of the same size.

    Args:
        kv_caches: the paged KV, as vLLM shows it to its offloading workers.
        num_chunks: chunks of the tier.
    """

    def __init__(self, kv_caches: Any, num_chunks: int) -> None:
        regions = [entry.tensor.numpy().view(np.uint8) for entry in kv_caches.tensors]
        self._block_bytes = sum(region.shape[1] for region in regions)
        rows = np.zeros((num_chunks, self._block_bytes), dtype=np.uint8)
        self._copies = CpuTransferWorker(regions, rows, time.monotonic)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Start a copy from the device to host memory."""
        self._submit(job_id, Direction.STORE, blocks=src_spec, chunks=dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Start a copy from host memory to the device."""
        self._submit(job_id, Direction.LOAD, blocks=dst_spec, chunks=src_spec)
        return True

    def get_finished(self) -> list[Any]:
        """Copies that ended."""
        return [
            TransferResult(
                result.job.job_id,
                result.outcome is TransferOutcome.DONE,
                len(result.job.block_ids) * self._block_bytes,
                result.duration_s,
            )
            for result in self._copies.poll()
        ]

    def wait(self, job_ids: set[int]) -> None:
        """Return when these jobs are done. vLLM only waits for stores."""
        self._copies.finish_stores()

    def shutdown(self) -> None:
        """Stop copying."""
        self._copies.shutdown()

    def _submit(self, job_id: int, direction: Direction, blocks: Any, chunks: Any) -> None:
        block_ids, rows = blocks.block_ids.tolist(), chunks.block_ids.tolist()
        assert len(block_ids) == len(rows), "a chunk is a block here"
        self._copies.submit(CopyJob(job_id, direction, tuple(block_ids), tuple(rows), TIMEOUT_S))
