"""Tries a model out before any request is served.

A forward pass of a few tokens shows what a configuration does not tell. Two things are checked, and a model that fails is
refused, because its answers would be wrong:

* Every layer calls attention once, with keys, values and options as paged attention expects them. That finds attention sinks,
  soft caps, masks that the model makes itself, and layers that skip attention or share another's KV.
* The logits are those of transformers' own attention. That finds what is not seen at a single layer: attention that looks
  ahead, positions that are not counted from 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from cargohold.engine.core.step import SampleSpec, ScheduledTokens, SchedulerStep
from cargohold.engine.model.attention import PagedForward
from cargohold.engine.model.info import ModelInfo
from cargohold.errors import UnsupportedModelError
from cargohold.protocol import NULL_BLOCK_ID, KVCacheLayout

MAX_PROBE_TOKENS = 12

_HONOURED = frozenset({"dropout", "sliding_window", "position_ids", "use_cache", "is_causal", "cache_position"})
"""Options of transformers' attention interface that paged attention honours, or that change nothing in a causal decoder."""

_MAX_LOGIT_ERROR = {torch.float32: 0.01, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Largest distance of logits that passes, relative to their spread. In half precision, sums in another order differ much."""


def probe_step(layout: KVCacheLayout, info: ModelInfo) -> SchedulerStep:
    """A step with a few tokens of one request, in the first blocks that are not null: as many as fit."""
    block_tokens = layout.groups[0].block_tokens
    blocks_per_group = min((layout.num_blocks - 1) // len(layout.groups), -(-MAX_PROBE_TOKENS // block_tokens))
    num_tokens = min(MAX_PROBE_TOKENS, blocks_per_group * block_tokens, info.max_positions)
    first_ids = (NULL_BLOCK_ID + 1 + group.index * blocks_per_group for group in layout.groups)
    share = ScheduledTokens(
        request_id="probe",
        token_ids=tuple(at * info.vocab_size // num_tokens for at in range(num_tokens)),
        num_computed_tokens=0,
        write_from=0,
        block_ids=tuple(list(range(first, first + blocks_per_group)) for first in first_ids),
        sample=SampleSpec(),
    )
    return SchedulerStep(scheduled=(share,))


class ProbeForward(PagedForward):
    """A forward pass that checks what each layer asks of attention, and counts the calls."""

    def watch(self, info: ModelInfo, layout: KVCacheLayout) -> None:
        """Start to count calls. Calls are checked against ``info`` and ``layout``."""
        self._info = info
        self._layout = layout
        self._calls: Counter[int] = Counter()

    def attend(
        self,
        layer: int,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scale: float | None,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """Check the call, then attend."""
        self._calls[layer] += 1
        if layer >= len(self._info.geometry.layer_kinds):
            self._refuse(f"it has an attention layer {layer} that its configuration does not mention")
        _, key, value = qkv
        expected = (self._kv.num_heads, self._kv.head_dim)
        for what, numbers in (("keys", key), ("values", value)):
            found = (numbers.shape[1], numbers.shape[3])
            if found != expected:
                self._refuse(f"layer {layer} has {what} of heads x dim {found}, its configuration says {expected}")
        self._check_options(layer, options)
        return super().attend(layer, qkv, scale, options)

    def verify(self) -> None:
        """Raise ``UnsupportedModelError`` unless every layer called attention once."""
        expected = Counter(range(len(self._info.geometry.layer_kinds)))
        if self._calls != expected:
            odd = sorted((self._calls - expected) | (expected - self._calls))
            self._refuse(f"layers {odd} do not call attention exactly once per forward pass")

    def _check_options(self, layer: int, options: Mapping[str, Any]) -> None:
        group, _ = self._layer_places[layer]
        expected = self._layout.groups[group].window_tokens
        if (options.get("sliding_window") or None) != expected:
            self._refuse(f"layer {layer} has window {options.get('sliding_window')}, its configuration says {expected}")
        for name, value in options.items():
            if name not in _HONOURED and value is not None and value is not False:
                self._refuse(f"layer {layer} asks attention for {name}, which paged attention does not do")

    def _refuse(self, reason: str) -> None:
        raise UnsupportedModelError(self._info.name, reason)


def verify_logits(info: ModelInfo, ours: torch.Tensor, reference: torch.Tensor) -> None:
    """Raise ``UnsupportedModelError`` if our logits are not those of transformers' own attention, up to rounding.

    Args:
        info: the model.
        ours: logits of the probe's tokens; shape ``(tokens, vocabulary)``.
        reference: the same as transformers computes them.
    """
    expected = _centred(reference)
    spread = expected.norm(dim=-1)
    comparable = spread > 0  # not so where the model's own logits are all alike, or no numbers
    if not comparable.any():
        return
    errors = ((_centred(ours) - expected).norm(dim=-1) / spread)[comparable].nan_to_num(nan=math.inf)
    # Rounding may send a token to another expert, which moves a row or two; a model that is run wrongly has most rows wrong.
    error = float(errors.median())
    if error > _MAX_LOGIT_ERROR[ours.dtype]:
        found = f"{error:.0%} off from" if error < math.inf else "no numbers, unlike"
        reason = f"with paged attention its logits are {found} those of transformers' own attention"
        raise UnsupportedModelError(info.name, reason)


def _centred(logits: torch.Tensor) -> torch.Tensor:
    return logits.double() - logits.double().mean(dim=-1, keepdim=True)
