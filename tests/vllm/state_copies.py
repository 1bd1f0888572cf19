"""Copies of recurrent state around drafts, in Python: vLLM 0.32 has kernels for them only on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_int32, memmove
from typing import Any

import pytest
from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext as Context


def write_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM copy states in Python."""
    monkeypatch.setattr(Context, "run_fused_precopy", _copy_before)
    monkeypatch.setattr(Context, "run_fused_postprocess", _copy_behind)


def _copy_before(
    self: Any, num_reqs: int, state_idx_gpu: Any, src_col_gpu: Any, token_bias_gpu: Any, idx_mapping: None
) -> None:
    """Like ``precopy_mamba_align_fused_kernel``: copies the state of a request that goes on in another block."""
    for request in _requests(self, num_reqs):
        source, to = int(src_col_gpu[request]), int(state_idx_gpu[request])
        if 0 <= source != to:
            _copy(self, request, source, to, int(token_bias_gpu[request]))


def _copy_behind(self: Any, num_reqs: int, num_accepted_tokens_gpu: Any, mamba_state_idx_gpu: Any, **of: Any) -> None:
    """Like ``postprocess_mamba_fused_kernel``: copies the state at the end of a block that accepted tokens have passed."""
    self.num_accepted_tokens_out[:num_reqs].copy_(num_accepted_tokens_gpu[:num_reqs])
    begun = of["num_computed_tokens_gpu"] + of["num_scheduled_tokens_gpu"] - of["num_draft_tokens_gpu"]
    for request in _requests(self, num_reqs):
        running, source = int(begun[request]), int(mamba_state_idx_gpu[request])
        end = (running + int(num_accepted_tokens_gpu[request]) - 1) // self.block_size * self.block_size
        if end >= running:
            to = end // self.block_size - 1
            if source == to:
                self.num_accepted_tokens_out[request] = 1
            _copy(self, request, source, to, end - running)


def _requests(context: Any, num_reqs: int) -> Iterator[int]:
    return iter(range(num_reqs if context.is_initialized else 0))


def _copy(context: Any, request: int, source: int, to: int, bias: int) -> None:
    """Copy all states of a request between columns of its block table, ``bias`` accepted drafts further."""
    for state in range(context.num_states):

        def of(field: str, state: int = state) -> int:
            return int(getattr(context, f"state_{field}")[state])

        def address(column: int, state: int = state) -> int:
            table = int(context.block_table_ptrs[of("group_indices", state)])
            block_id = c_int32.from_address(table + 4 * (request * context.block_table_stride_req + column)).value
            return of("base_addrs", state) + block_id * of("block_strides", state)

        width, item_bytes = of("conv_widths"), of("inner_sizes") * of("elem_sizes")
        if not width:  # there is a state behind each draft, in a block of its own
            memmove(address(to), address(source + bias), item_bytes)
        for row in range((of("dim_row_count") or 1) if width else 0):  # a convolution's last inputs
            offset = row * of("dim_row_stride")
            memmove(address(to) + offset, address(source) + offset + bias * item_bytes, (width - bias) * item_bytes)
