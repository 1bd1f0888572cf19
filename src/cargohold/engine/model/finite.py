"""Finds the requests for which a step has written keys or values that are not finite: overflows, and what follows from them.

Such numbers must not be kept. Masks hide tokens from each other by adding numbers to their scores, and what is added to a NaN
is a NaN: in attention, one such token spoils also those before it. So all that the step wrote for its request is garbage.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from cargohold.engine.core.step import SchedulerStep
from cargohold.engine.model.batch import Batch, GroupBatch
from cargohold.engine.model.paged_kv import PagedKV

_ROWS_PER_PASS = 1 << 14
"""Most rows that are copied to be looked at together."""


def requests_not_finite(step: SchedulerStep, batch: Batch, kv: PagedKV) -> list[str]:
    """Ids of the requests for which the step wrote numbers that are not finite; to be called after its forward pass.

    Waits for the device once: a sum over all that was written tells whether to look closer.
    """
    total = torch.zeros((), device=kv.storage.device)
    for group in batch.groups:
        for rows in _rows_by_pass(group, kv):
            total += kv.token_rows[rows.reshape(-1)].sum(dtype=torch.float32)
    if total.isfinite():
        return []
    ends = np.cumsum([share.num_scheduled_tokens for share in step.scheduled])
    spoiled = {int(at) for group in batch.groups for at in np.searchsorted(ends, _bad_tokens(group, kv), side="right")}
    return [step.scheduled[at].request_id for at in sorted(spoiled)]


def _rows_by_pass(group: GroupBatch, kv: PagedKV) -> Iterator[torch.Tensor]:
    """Rows of ``PagedKV.token_rows`` that the step wrote; shape ``(halves, tokens)``, a half being one layer's K or V."""
    # Slots behind the group's last layer are never written, and may hold anything.
    halves = torch.arange(2 * group.num_layers, device=kv.storage.device).unsqueeze(1) * kv.block_tokens
    num_tokens = group.write_rows.shape[0]
    for some in torch.split(halves, max(1, _ROWS_PER_PASS // max(1, num_tokens))):
        yield group.write_rows + some


def _bad_tokens(group: GroupBatch, kv: PagedKV) -> np.ndarray:
    """Rows of the batch for which the group's layers wrote something that is not finite."""
    is_bad = torch.zeros(group.write_rows.shape, dtype=torch.bool, device=kv.storage.device)
    for rows in _rows_by_pass(group, kv):
        is_bad |= ~kv.token_rows[rows].isfinite().all(dim=-1).all(dim=0)
    found = is_bad.nonzero().squeeze(1)
    return (found if group.written is None else group.written[found]).cpu().numpy()
