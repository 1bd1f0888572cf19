"""What SGLang imports and a machine without a GPU lacks. To be installed before SGLang is imported.

* ``sgl_kernel``, ``torchvision``, ``orjson`` and ``IPython`` are empty. The cache modules import them and use none.
* The copies between device and host, which SGLang has kernels for, are made with indices here.
* Page hashes are made in Python, so that nothing is compiled. SGLang's tree makes its own, in Rust; if these differed, nothing
  would be found.
* Host memory is not pinned.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from transformers.utils import import_utils

import_utils.is_torchvision_available()  # transformers looks once, and must not take the stand-in for it


class _Empty(MetaPathFinder, Loader):
    NAMES = frozenset({"sgl_kernel", "torchvision", "orjson", "IPython"})

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        del path, target
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".", maxsplit=1)[0] in self.NAMES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = MagicMock(name=spec.name)
        module.__spec__, module.__name__, module.__path__ = spec, spec.name, []
        return module

    def exec_module(self, module: ModuleType) -> None:
        del module


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    del page_size
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    num_layers = len(src_ptrs) // len(dst_ptrs)
    for at, source in enumerate(src_ptrs):
        pages = source[src_indices].reshape(-1, page_size, *source.shape[1:])
        dst_ptrs[at // num_layers][dst_indices[::page_size] // page_size, at % num_layers] = pages


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        pages = source[src_indices[::page_size] // page_size, layer_id]
        target[dst_indices] = pages.reshape(-1, *target.shape[1:])


def page_hashes(token_ids: Any, prior_digest: bytes | None, page_size: int | None = None) -> str | list[str]:
    """As SGLang's extension in C++: SHA-256 over the page before and the page's tokens."""
    tokens = getattr(token_ids, "raw_token_ids", lambda: token_ids)()[: len(token_ids)]
    hashes = []
    for at in range(0, len(tokens), page_size or max(1, len(tokens))):
        page = array("I", tokens[at : at + page_size] if page_size else tokens)
        prior_digest = hashlib.sha256((prior_digest or b"") + page.tobytes()).digest()
        hashes.append(prior_digest.hex())
    return hashes if page_size else hashes[-1]


def install() -> None:
    """Put the stand-ins in their places, once."""
    if any(isinstance(finder, _Empty) for finder in sys.meta_path):
        return
    sys.meta_path.append(_Empty())
    import sglang.srt.mem_cache.utils  # noqa: PLC0415  # only now it can be imported
    from sglang.srt.mem_cache.pool_host import mamba, mha, mla  # noqa: PLC0415
    from sglang.srt.mem_cache.pool_host.base import HostKVCache  # noqa: PLC0415

    sglang.srt.mem_cache.utils.get_native_hash = page_hashes
    for copy in (transfer_kv_direct, transfer_kv_all_layer_direct_lf_pf, transfer_kv_per_layer_direct_pf_lf):
        for module in (mha, mla, mamba):
            setattr(module, copy.__name__, copy)
    pinned = HostKVCache.__init__

    def unpinned(self: Any, **options: Any) -> None:
        pinned(self, **{**options, "pin_memory": False})

    HostKVCache.__init__ = unpinned
    in_mamba = mamba.MambaPoolHost.__init__

    def unpinned_states(self: Any, *args: Any, **options: Any) -> None:
        in_mamba(self, *args, **{**options, "pin_memory": False})

    mamba.MambaPoolHost.__init__ = unpinned_states
