"""Makes the model runner of each rank, in the rank's own process."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cargohold.engine.executor.frames import RankPlace
from cargohold.engine.model.info import ModelInfo
from cargohold.protocol import KVCacheLayout

if TYPE_CHECKING:
    from cargohold.engine.model.hf_runner import HFModelRunner


@dataclass(frozen=True, slots=True)
class HFRunners:
    """Makes runners of Hugging Face models. Satisfies ``cargohold.engine.executor.frames.RunnerFactory``.

    Attributes:
        info: the model.
        layout: the paged KV cache; it says over how many ranks the model is split.
        device: ``cpu`` or a CUDA device. Of several ranks each takes a CUDA device of its own.
    """

    info: ModelInfo
    layout: KVCacheLayout
    device: str

    def make_runner(self, place: RankPlace) -> HFModelRunner:
        """Load the rank's part of the model.

        Raises:
            ModelError: the weights cannot be read or split, or the model does something that paged attention does not do.
            ConfigError: there is no device for the rank.
        """
        from cargohold.engine.model.hf_runner import HFModelRunner  # noqa: PLC0415  # imports torch
        from cargohold.engine.model.weights import join_ranks  # noqa: PLC0415  # imports torch

        device = join_ranks(place, self.device)
        if place.world_size > 1 or sys.stderr is None or not sys.stderr.isatty():
            _quiet_transformers()  # the loading bars of several processes would write over each other, and fill a log
        return HFModelRunner(self.info, self.layout, device, place.rank)


def _quiet_transformers() -> None:
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415  # slow to import

    transformers_logging.disable_progress_bar()
