"""What a worker's model holds: a fingerprint of every byte of it, taken on the device that has them.

vLLM may be given other weights while it runs, and tells no connector. See ``resets`` for when workers look.

In the host's memory, bytes are hashed (XXH3, 128 bits). On a device they are not moved: words of 32 bits are multiplied by
random odd numbers of 64 bits and added up, modulo 2**64; twice, with other numbers, for each stretch of 16 MiB of a tensor.
Contents that differ, in signs alone or in a single place, have the same two sums with a probability of about 2**-64. A stretch
is read twice, and needs 32 MiB besides: of 16 GB on a device with 2 TB/s, about 0.1 s. This tells apart what differs by
accident or training, not what an attacker has crafted.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Final

import numpy as np
import torch
import xxhash

logger = logging.getLogger(__name__)

_NUM_WORDS: Final = 4 * 1024**2
"""Number of words in a stretch."""


class UnreadableWeightsError(Exception):
    """Some of the model's weights cannot be read; says which and why."""


class HeldWeights:
    """What the model of this process holds.

    Args:
        vllm_config: the configuration of vLLM's worker.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._vllm_config = vllm_config
        self._worker: Any = None
        self._why_not = ""

    def look(self) -> str:
        """Return a fingerprint, empty if it cannot be taken; the log then says why, once."""
        self._worker = self._worker or worker_of(self._vllm_config)
        try:
            return fingerprint(models_of(self._worker))
        except Exception as error:  # noqa: BLE001  # whatever a model's tensors are: not to know is an answer
            if str(error) != self._why_not:
                self._why_not = str(error)
                logger.info("which weights the model holds is unknown: %s; so a reset drops what is kept", error)
            return ""


def worker_of(vllm_config: Any) -> Any | None:
    """Return vLLM's worker in this process; ``None`` if there is none, or more than one with this configuration.

    vLLM gives the worker's side of a connector no model, and hooks of its own to none: so it is looked for, once, among all
    objects. A class of ours in vLLM's place (``--worker-extension-cls``) would have to be asked for by every user.
    """
    worker_class = getattr(sys.modules.get("vllm.v1.worker.worker_base"), "WorkerBase", None)
    if worker_class is None:
        return None
    found = [one for one in gc.get_objects() if issubclass(type(one), worker_class) and one.vllm_config is vllm_config]
    return found[0] if len(found) == 1 else None


def models_of(worker: Any) -> list[torch.nn.Module]:
    """Return the models that fill a worker's KV cache: its own, and the one that drafts for it if there is one.

    Raises:
        UnreadableWeightsError: there is no worker, or threads of it may be writing weights.
    """
    drafter = getattr(getattr(worker, "model_runner", None), "drafter", None)
    if worker is None:
        raise UnreadableWeightsError("vLLM's worker was not found")
    if getattr(worker, "_weight_update_active", False):
        raise UnreadableWeightsError("they are being updated (start_weight_update)")
    found = [worker.get_model(), getattr(drafter, "model", None)]
    return [model for model in found if isinstance(model, torch.nn.Module)]


def fingerprint(models: Iterable[torch.nn.Module]) -> str:
    """Return a fingerprint of all parameters and persistent buffers, 64 hexadecimal digits.

    Raises:
        UnreadableWeightsError: some weights are not where the model says, or something else computes with it.
    """
    digest = hashlib.sha256()
    for number, model in enumerate(models):
        if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):  # noqa: SLF001
            raise UnreadableWeightsError("a hook changes what a layer computes, as to steer it")
        tensors = {name: one for name, one in model.state_dict(keep_vars=True).items() if isinstance(one, torch.Tensor)}
        for name, tensor in tensors.items():
            if tensor.is_meta or not tensor.numel():
                raise UnreadableWeightsError(
                    f"{name} is empty: this build of vLLM keeps the matrix where it cannot be read again"
                )
        contents = [(name, contents_of(tensor.detach())) for name, tensor in sorted(tensors.items())]
        for name, content in contents:  # only now: until here nothing has waited for the device
            tensor = tensors[name]
            about = (number, name, str(tensor.dtype), tuple(tensor.shape), tensor.stride())
            digest.update(repr(about).encode())
            digest.update(content if isinstance(content, bytes) else content.cpu().numpy().tobytes())
    return digest.hexdigest()


def contents_of(tensor: torch.Tensor) -> bytes | torch.Tensor:
    """Return what stands for a tensor's contents: a digest, or sums on its device."""
    if tensor.device.type != "cpu":
        return sums_of(tensor)
    hashed = xxhash.xxh3_128()
    for flat in _in_memory_order(tensor):
        hashed.update(flat.view(torch.uint8).numpy().data)
    return hashed.digest()


def sums_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return two sums for each stretch of a tensor, on its device."""
    factors = _factors(tensor.device)
    return torch.stack([(words * row[: len(words)]).sum() for words in _words(tensor) for row in factors])


def _words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's bytes in stretches of words of 32 bits, in the order of memory."""
    for flat in _in_memory_order(tensor):
        data = flat.view(torch.uint8)
        num_whole = len(data) // 4 * 4
        if data.storage_offset() % 4 == 0:
            yield from torch.split(data[:num_whole].view(torch.int32), _NUM_WORDS)
            data = data[num_whole:]
        yield from (part.to(torch.int32) for part in torch.split(data, _NUM_WORDS))


def _in_memory_order(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements without a copy of all of it: as one stretch of memory, or else part by part."""
    order = sorted(range(tensor.ndim), key=lambda at: (-tensor.stride()[at], at))
    if tensor.permute(order).is_contiguous():
        yield tensor.permute(order).reshape(-1)
    else:
        for part in tensor:
            yield part.contiguous().reshape(-1)


@cache
def _factors(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two rows of random odd numbers on a device, the same in every process."""
    rows = np.random.default_rng(0).integers(-(2**62), 2**62, (2, _NUM_WORDS), dtype=np.int64) * 2 + 1
    first, second = torch.from_numpy(rows).to(device)
    return first, second
