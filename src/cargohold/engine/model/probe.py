"""Watches how a model's layers call attention, before any request is served.

What a configuration does not tell (attention sinks, soft caps, layers that skip attention or share another's KV) shows in a
forward pass of one token. A model that does what paged attention does not do is refused, rather than answered wrongly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from cargohold.engine.core.step import SampleSpec, ScheduledTokens, SchedulerStep
from cargohold.engine.model.attention import PagedForward
from cargohold.engine.model.info import ModelInfo
from cargohold.engine.sampling_params import SamplingParams
from cargohold.errors import UnsupportedModelError
from cargohold.protocol import KVCacheLayout

PROBE_BLOCK_ID = 1

_HONOURED = frozenset({"dropout", "sliding_window", "position_ids", "use_cache", "is_causal", "cache_position"})
"""Options of transformers' attention interface that paged attention honours, or that change nothing in a causal decoder."""


def probe_step(layout: KVCacheLayout) -> SchedulerStep:
    """A step with one token, in the first block that is not null."""
    share = ScheduledTokens(
        request_id="probe",
        token_ids=(0,),
        num_computed_tokens=0,
        write_from=0,
        block_ids=tuple([PROBE_BLOCK_ID] for _ in layout.groups),
        sample=SampleSpec(SamplingParams(), 0, 0),
    )
    return SchedulerStep(scheduled=(share,))


class ProbeForward(PagedForward):
    """A forward pass that remembers which layers asked for what."""

    def watch(self, info: ModelInfo, layout: KVCacheLayout) -> None:
        """Start remembering; ``verify`` compares with ``info`` and ``layout``."""
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
        shape = (self._kv.num_heads, self._kv.head_dim)
        for what, numbers in (("keys", key), ("values", value)):
            if (numbers.shape[1], numbers.shape[3]) != shape:
                self._refuse(f"layer {layer} has {what} of shape {tuple(numbers.shape)}, expected heads x dim {shape}")
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
