"""A model's weights, loaded and set up for paged attention; or written again with more heads.

Tensor parallelism: every rank has its part of each layer's heads and weights, split by transformers' own plans.

The split follows Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): projections into the heads are cut by column, those out
of them by row, so that a layer needs two sums over the ranks, and KV stays where its heads are.
"""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from cargohold.engine.executor import RankPlace
from cargohold.engine.model.attention import PAGED_ATTENTION, register_paged_attention
from cargohold.engine.model.files import ONE_AT_A_TIME
from cargohold.engine.model.info import ModelInfo
from cargohold.errors import ConfigError, ModelNotFoundError, UnsupportedModelError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_MEETING_TIME = timedelta(minutes=10)
_LOOPBACK = "lo"
_KEPT_WHOLE = ("k_proj", "v_proj", "k_norm", "v_norm")
"""Modules that make keys and values."""


def join_ranks(place: RankPlace, device: str) -> str:
    """Form a group with the other ranks; returns the device that this one computes on. To be called in its own process.

    Changes torch's settings for the whole process.

    Raises:
        ConfigError: there is no device for this rank.
    """
    if place.world_size == 1:
        return device
    if torch.device(device).type == "cpu":
        _check_cpu_is_chosen(device)
        # The ranks share the cores; more threads than cores wait for each other.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.world_size))
        backend, own_device = "gloo", device
        if place.rendezvous.startswith("file:") and _LOOPBACK in (name for _, name in socket.if_nameindex()):
            # Otherwise gloo listens on the address of the machine's name, mostly on the network, and lets anyone connect.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    else:
        own_index = _device_index(place)
        os.environ["LOCAL_RANK"] = str(own_index)  # where transformers looks for it
        backend, own_device = "nccl", f"cuda:{own_index}"
        torch.cuda.set_device(own_index)
    distributed.init_process_group(
        backend, init_method=place.rendezvous, rank=place.rank, world_size=place.world_size, timeout=_MEETING_TIME
    )
    return own_device


def exchange_with_ranks(message: bytes) -> list[bytes]:
    """The messages of all ranks of the group; see ``cargohold.protocol.Exchange``."""
    messages: list[bytes] = [b""] * distributed.get_world_size()
    distributed.all_gather_object(messages, message)
    return messages


def parallel_options(info: ModelInfo, world_size: int) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that load one rank's part."""
    if world_size == 1:
        return {}
    from transformers.distributed import DistributedConfig  # noqa: PLC0415  # slow to import

    plan = _plan_that_keeps_kv_whole(info) if info.geometry.num_kv_heads == 1 else "auto"
    return {"distributed_config": DistributedConfig(tp_plan=plan, tp_size=world_size)}


def share_heads(model: PreTrainedModel, info: ModelInfo, world_size: int) -> None:
    """Tell each attention layer how many of its rank's query heads share a KV head. Mutates ``model``."""
    geometry = info.geometry
    queries_per_kv = geometry.num_query_heads // world_size // geometry.heads_per_shard(world_size)
    for module in model.modules():
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = queries_per_kv


def _plan_that_keeps_kv_whole(info: ModelInfo) -> dict[str, str]:
    """Changes to the model's plan for a single KV head: every rank needs it, and it cannot be split."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  # slow to import

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(info.path, trust_remote_code=False))
    plan: dict[str, str] = skeleton.tp_plan
    kept = {name: "replicate" for name in plan if name.endswith(_KEPT_WHOLE)}
    if not kept:
        raise UnsupportedModelError(info.name, "its single KV head cannot be kept whole; use tensor_parallel_size=1")
    return kept


def _device_index(place: RankPlace) -> int:
    """Index of the rank's CUDA device. Ray shows a worker only its own device; otherwise all ranks see all devices."""
    count = torch.cuda.device_count()
    if count == 1 and place.sees_own_device_only:
        return 0
    if place.rank >= count:
        raise ConfigError("tensor_parallel_size", place.world_size, f"this machine has {count} CUDA device(s)")
    return place.rank


def _check_cpu_is_chosen(device: str) -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        reason = f"with tensor_parallel_size above 1, transformers computes on {accelerator.type} where there is one"
        raise ConfigError("device", device, f"{reason}; use device={accelerator.type!r}, or hide the accelerator")


# --- loads a model's weights ------------------------------------------------------------------------------------------


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
