"""A spec for vLLM's own offloading connector whose worker copies on a CPU, which vLLM's specs do not.

Everything that decides is vLLM's: the connector, its scheduler side and its manager. The copies are made at once, with numpy,
in the step that asks for them: on a CPU that is the quickest way for the request that waits.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


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
        ends = np.cumsum([0] + [region.shape[1] for region in regions]).tolist()
        rows = np.zeros((num_chunks, ends[-1]), dtype=np.uint8)
        self._block_bytes = ends[-1]
        self._pairs = [(region, rows[:, ends[at] : ends[at + 1]]) for at, region in enumerate(regions)]
        self._finished: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy from the device to host memory."""
        started = time.monotonic()
        for block, chunk in _pairs(src_spec, dst_spec):
            for device, host in self._pairs:
                np.copyto(host[chunk], device[block])
        return self._finish(job_id, src_spec, started)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy from host memory to the device."""
        started = time.monotonic()
        for chunk, block in _pairs(src_spec, dst_spec):
            for device, host in self._pairs:
                np.copyto(device[block], host[chunk])
        return self._finish(job_id, src_spec, started)

    def get_finished(self) -> list[Any]:
        """Copies that ended."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing: copies end when they are asked for."""

    def shutdown(self) -> None:
        """Do nothing: there is nothing to stop."""

    def _finish(self, job_id: int, blocks: Any, started: float) -> bool:
        num_bytes = len(blocks.block_ids) * self._block_bytes
        self._finished.append(TransferResult(job_id, True, num_bytes, time.monotonic() - started))
        return True


def _pairs(source: Any, target: Any) -> list[tuple[int, int]]:
    """Block and chunk, or chunk and block, of each copy."""
    return list(zip(source.block_ids.tolist(), target.block_ids.tolist(), strict=True))
