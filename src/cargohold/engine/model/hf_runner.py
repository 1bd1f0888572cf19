"""Runs a Hugging Face model on paged KV."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from cargohold.engine.core.step import SchedulerStep
from cargohold.engine.executor.runner import LayerHooks
from cargohold.engine.model.attention import PAGED_ATTENTION, PagedForward, Workspace
from cargohold.engine.model.batch import Batch, build_batch
from cargohold.engine.model.finite import requests_not_finite
from cargohold.engine.model.info import ModelInfo
from cargohold.engine.model.kv_layout import layer_name
from cargohold.engine.model.loading import ONE_AT_A_TIME
from cargohold.engine.model.paged_kv import PagedKV
from cargohold.engine.model.probe import ProbeForward, probe_step, verify_logits
from cargohold.engine.model.sampler import sample_tokens
from cargohold.engine.model.weights import checked_device, load_model
from cargohold.errors import CargoholdError, UnsupportedModelError, one_line
from cargohold.protocol import KVCacheLayout


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
        """One region, the same for all groups: the whole storage."""
        return [[self._kv.storage] for _ in self._layout.groups]

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
