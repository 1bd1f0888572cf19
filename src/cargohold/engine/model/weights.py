"""Loads a model's weights, set up for paged attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cargohold.engine.model.attention import PAGED_ATTENTION, register_paged_attention
from cargohold.engine.model.info import ModelInfo
from cargohold.engine.model.loading import ONE_AT_A_TIME
from cargohold.engine.model.parallel import parallel_options, share_heads
from cargohold.errors import ConfigError, ModelNotFoundError, UnsupportedModelError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def checked_device(device: str) -> torch.device:
    """The torch device of that name. Raises ``ConfigError`` if this machine does not have it."""
    found = torch.device(device)
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError("device", device, f"this machine has {torch.cuda.device_count()} CUDA device(s); use cpu")
    return found


def load_model(info: ModelInfo, device: torch.device, world_size: int = 1) -> PreTrainedModel:
    """Load the weights onto ``device``, for inference: all of them, or this rank's part of ``world_size``.

    Waits while another thread loads a model.

    Raises:
        ModelNotFoundError: the weights are missing, damaged or incomplete.
        UnsupportedModelError: the model does not use transformers' attention interface.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  # slow to import

    register_paged_attention()
    try:
        with ONE_AT_A_TIME:
            model, loading = AutoModelForCausalLM.from_pretrained(
                info.path,
                dtype=getattr(torch, info.dtype),
                attn_implementation=PAGED_ATTENTION,
                output_loading_info=True,
                trust_remote_code=False,
                **parallel_options(info, world_size),
            )
    except (ValueError, KeyError) as error:
        reason = f"transformers cannot run it with paged attention: {one_line(error)}"
        raise UnsupportedModelError(info.name, reason) from error
    except Exception as error:  # a damaged file shows in as many ways as there are formats
        raise ModelNotFoundError(info.name, f"its weights cannot be read: {one_line(error)}") from error
    if loading["missing_keys"]:
        # transformers makes up missing weights, with no more than a warning.
        missing = sorted(loading["missing_keys"])
        raise ModelNotFoundError(info.name, f"its files lack {len(missing)} of its weights, such as {missing[0]}")
    if world_size == 1:
        return model.to(device).eval()
    share_heads(model, info, world_size)
    return model.eval()  # its parts were loaded onto their devices
