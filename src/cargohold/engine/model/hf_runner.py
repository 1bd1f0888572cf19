"""Runs a Hugging Face model on paged KV.

Finds the requests for which a step has written keys or values that are not finite: overflows, and what follows from them.

Such numbers must not be kept. Masks hide tokens from each other by adding numbers to their scores, and what is added to a NaN
is a NaN: in attention, one such token spoils also those before it. So all that the step wrote for its request is garbage.

Tries a model out before any request is served.

A forward pass of a few tokens shows what a configuration does not say. Two things are checked, and a model that fails is
refused, because its answers would be wrong:

* Every layer calls attention once, with keys, values and options as paged attention expects them. That finds attention sinks,
  soft caps, masks that the model makes itself, and layers that skip attention or share another's KV.
* The logits are those of transformers' own attention. That finds what is not seen at a single layer: attention that looks
  ahead, positions that are not counted from 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cargohold.engine.core.request import SampleSpec, ScheduledTokens, SchedulerStep
from cargohold.engine.executor import LayerHooks
from cargohold.engine.model.attention import PAGED_ATTENTION, PagedForward, Workspace
from cargohold.engine.model.batch import Batch, GroupBatch, PagedKV, build_batch
from cargohold.engine.model.files import ONE_AT_A_TIME
from cargohold.engine.model.info import ModelInfo, layer_name
from cargohold.engine.model.weights import checked_device, load_model
from cargohold.errors import CargoholdError, UnsupportedModelError, one_line
from cargohold.protocol import NULL_BLOCK_ID, KVCacheLayout

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
    # Slots after the group's last layer are never written, and may hold anything.
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


# --- chooses tokens from logits ---------------------------------------------------------------------------------------


def sample_tokens(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int | None]:
    """Choose one token per row; ``None`` where the largest number is not finite, as where one of them is a NaN.

    Args:
        logits: shape ``(len(specs), vocabulary)``.
        specs: how to choose, row by row. The random draw depends on the spec alone: not on the batch, the device or what was
            drawn before.
    """
    largest, places = logits.max(dim=-1)  # a NaN counts as larger than all else
    greedy, is_finite = places.tolist(), largest.isfinite().tolist()
    return [
        None if not finite else likeliest if spec.temperature == 0 else _sample(row, spec)
        for finite, likeliest, row, spec in zip(is_finite, greedy, logits, specs, strict=True)
    ]


def _sample(logits: torch.Tensor, spec: SampleSpec) -> int:
    # The largest score is moved to 0: otherwise, division by a very small temperature could make two of them infinite.
    scores = (logits.double() - logits.max()) / spec.temperature
    if 0 < spec.top_k < scores.numel():
        scores = _keep_top_k(scores, spec.top_k)
    if spec.top_p < 1:
        scores = _keep_top_p(scores, spec.top_p)
    return int((scores.cpu() + _gumbel_noise(scores.numel(), spec)).argmax())


def _keep_top_k(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Keep the ``top_k`` likeliest tokens, no more even if several are equally likely."""
    top = scores.topk(top_k)
    return torch.full_like(scores, -torch.inf).scatter(0, top.indices, top.values)


def _keep_top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the likeliest tokens that together reach ``top_p`` (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751)."""
    ordered, order = scores.sort(descending=True)
    probabilities = ordered.softmax(dim=-1)
    # A token goes if those likelier than it reach top_p already; the likeliest always stays.
    reached_before = probabilities.cumsum(dim=-1) - probabilities >= top_p
    return scores.masked_fill(torch.zeros_like(reached_before).scatter(0, order, reached_before), -torch.inf)


def _gumbel_noise(size: int, spec: SampleSpec) -> torch.Tensor:
    """Noise to add to the scores, so that the largest sum is distributed like ``softmax(scores)`` (the Gumbel-max trick).

    Drawn on the CPU, so that every device draws the same, from a generator whose key is the seed and the token's number:
    neighbouring seeds and tokens have nothing in common.
    """
    generator = np.random.Generator(np.random.Philox(key=spec.seed | spec.index << 64))
    return -torch.from_numpy(generator.standard_exponential(size)).clamp_min(1e-300).log()


# --- tries a model out before any request is served -------------------------------------------------------------------

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


# --- runs a Hugging Face model on paged KV ----------------------------------------------------------------------------


class HFModelRunner:
    """A model, its weights on one device, and its paged KV. Satisfies ``ModelRunner``.

    Args:
        info: the model.
        layout: the paged KV cache.
        device: ``cpu``, ``cuda``, ``cuda:1``, ...
        rank: which part of the model this is, if ``layout.world_size`` says that it is split.

    Raises:
        ModelError: the weights cannot be read, or the model does something that paged attention does not do.
        ConfigError: there is no such device.
    """

    def __init__(self, info: ModelInfo, layout: KVCacheLayout, device: str = "cpu", rank: int = 0) -> None:
        self._info = info
        self._layout = layout
        self._device = checked_device(device)
        # Every rank computes the same logits: one is enough to choose tokens.
        self._samples = rank == 0
        self._model = load_model(info, self._device, layout.world_size)
        self._kv = PagedKV.allocate(
            layout,
            num_heads=info.geometry.heads_per_shard(layout.world_size),
            head_dim=info.geometry.head_dim,
            dtype=getattr(torch, info.dtype),
            device=self._device,
        )
        self._workspace = Workspace(self._kv)
        self._layer_places = _layer_places(layout, len(info.geometry.layer_kinds))
        self._probe()

    def kv_regions(self) -> Sequence[Sequence[torch.Tensor]]:
        """One region for each group: its layers' slots in all blocks."""
        return [[self._kv.storage[:, : group.block_bytes]] for group in self._layout.groups]

    def execute(self, step: SchedulerStep, hooks: LayerHooks | None) -> Mapping[str, int | None]:
        """Run the step's batch; see ``ModelRunner.execute``."""
        batch = build_batch(step, self._layout.groups, self._kv)
        forward = PagedForward(self._kv, batch, self._layer_places, self._workspace, hooks)
        with torch.inference_mode():
            logits = self._forward(forward, batch)
            sampled = self._sample(logits, batch) if self._samples else {}
            return {**sampled, **dict.fromkeys(requests_not_finite(step, batch, self._kv))}

    def _sample(self, logits: torch.Tensor, batch: Batch) -> dict[str, int | None]:
        specs = [share.sample for share in batch.sampled if share.sample is not None]
        tokens = sample_tokens(logits, specs)
        return {share.request_id: token for share, token in zip(batch.sampled, tokens, strict=True)}

    def _forward(self, forward: PagedForward, batch: Batch) -> torch.Tensor:
        """Logits of the batch's sample rows; shape ``(rows, vocabulary)``."""
        output = self._model(
            input_ids=batch.token_ids,
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=batch.sample_rows,
            paged_forward=forward,
        )
        logits = output.logits[0]
        assert isinstance(logits, torch.Tensor)
        return logits

    def _probe(self) -> None:
        """Raise ``UnsupportedModelError`` for a model that would give wrong answers; see ``probe``."""
        step = probe_step(self._layout, self._info)
        batch = build_batch(step, self._layout.groups, self._kv)
        batch = dataclasses.replace(batch, sample_rows=torch.arange(step.num_tokens, device=self._device))
        forward = ProbeForward(self._kv, batch, self._layer_places, self._workspace, None)
        forward.watch(self._info, self._layout)
        with ONE_AT_A_TIME, torch.inference_mode():
            try:
                logits = self._forward(forward, batch)
                forward.verify()
                verify_logits(self._info, logits, self._reference_logits(batch))
            except CargoholdError:
                raise
            except Exception as error:  # whatever a model of an unknown kind raises when it is driven in a new way
                reason = f"its forward pass cannot be driven: {one_line(error)}"
                raise UnsupportedModelError(self._info.name, reason) from error
        for block_ids in step.scheduled[0].block_ids:
            self._kv.storage[block_ids] = 0

    def _reference_logits(self, batch: Batch) -> torch.Tensor:
        """Logits of all of the batch's tokens, which are of one request, as transformers computes them by itself."""
        self._model.set_attn_implementation("eager")
        try:
            output = self._model(input_ids=batch.token_ids, use_cache=False)
        finally:
            self._model.set_attn_implementation(PAGED_ATTENTION)
        logits = output.logits[0]
        assert isinstance(logits, torch.Tensor)
        return logits


def _layer_places(layout: KVCacheLayout, num_layers: int) -> tuple[tuple[int, int], ...]:
    """Per layer, its group and its slot in the group's blocks."""
    places = {name: (group.index, slot) for group in layout.groups for slot, name in enumerate(group.layer_names)}
    return tuple(places[layer_name(layer)] for layer in range(num_layers))
