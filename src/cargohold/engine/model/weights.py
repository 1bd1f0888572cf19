"""Loads a model's weights, set up for paged attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cargohold.engine.model.attention import PAGED_ATTENTION, register_paged_attention
from cargohold.engine.model.info import ModelInfo
from cargohold.errors import ConfigError, ModelNotFoundError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def checked_device(device: str) -> torch.device:
    """The torch device of that name. Raises ``ConfigError`` if there is none."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError("device", device, "it must be a PyTorch device, such as cpu or cuda:0") from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError("device", device, f"this machine has {torch.cuda.device_count()} CUDA device(s); use cpu")
    if found.type not in ("cpu", "cuda"):
        raise ConfigError("device", device, "it must be cpu or a cuda device")
    return found


def load_model(info: ModelInfo, device: torch.device) -> PreTrainedModel:
    """Load the weights onto ``device``, for inference.

    Raises:
        ModelNotFoundError: the weights are missing or cannot be read.
        UnsupportedModelError: the model does not use transformers' attention interface.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  # slow to import

    register_paged_attention()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            info.path, dtype=getattr(torch, info.dtype), attn_implementation=PAGED_ATTENTION
        )
    except OSError as error:
        raise ModelNotFoundError(info.name, f"its weights cannot be read: {error}") from error
    except ValueError as error:
        raise UnsupportedModelError(info.name, f"transformers cannot run it with paged attention: {error}") from error
    return model.to(device).eval()
