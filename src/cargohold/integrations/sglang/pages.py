"""Pages of SGLang's host memory as plain bytes.

::

    ranges   a host pool tells where the bytes of its pages are, and they are read and written in place
    flat     it makes a page into one tensor, and takes one back: a copy more, where it cannot tell
    marker   it has no bytes of its own, but its pages must have been stored: one byte

What a page's bytes are in one form says nothing of another, so the form is part of the identity of what is stored.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import torch

from cargohold.errors import ConfigError
from cargohold.tiers.memory import Buffer, Pieces

_UNSUPPORTED: Final = (ValueError, NotImplementedError, AttributeError, AssertionError)
"""What host pools raise for a layout that they have no such view of."""


class Pages(ABC):
    """The pages of one host pool.

    Args:
        pool: SGLang's ``HostKVCache``, or whatever stands in its place.

    Attributes:
        num_bytes: bytes of one page.
        num_tokens: tokens, or slots, of one page.
    """

    form: ClassVar[str]

    def __init__(self, pool: Any, num_bytes: int) -> None:
        self.pool = pool
        self.num_bytes = num_bytes
        self.num_tokens = int(getattr(pool, "page_size", 1) or 1)

    @property
    def pool_bytes(self) -> int:
        return max(1, int(self.pool.size) // self.num_tokens) * self.num_bytes

    @property
    def number_type(self) -> str:
        """Type of all numbers in a page; empty if there are several."""
        types = {str(of) for name in _TYPES if (of := getattr(self.pool, name, None)) is not None}
        return types.pop().removeprefix("torch.") if len(types) == 1 else ""

    def describe(self) -> str:
        """How a page's bytes are arranged."""
        pool = self.pool
        said = [f"{name} {value}" for name in _GEOMETRY if (value := _plain(getattr(pool, name, None))) is not None]
        return f"{type(pool).__name__} as {self.form}, {self.num_bytes} bytes; {', '.join(said)}"

    @abstractmethod
    def sources(self, indices: torch.Tensor) -> list[Buffer]:
        """Return the bytes of pages to read from; ``indices`` has all of their slots."""

    def targets(self, indices: torch.Tensor) -> list[Buffer]:
        """Return memory for pages to write to."""
        return self.sources(indices)

    def settle(self, indices: torch.Tensor, targets: Sequence[Buffer], is_loaded: Sequence[bool]) -> None:
        """Bring pages that were loaded to their place, if ``targets`` are elsewhere."""
        del indices, targets, is_loaded


_TYPES: Final = ("dtype", "conv_dtype", "temporal_dtype")
_GEOMETRY: Final = (
    "layout", "dtype", "page_size", "start_layer", "end_layer", "layer_num", "head_num", "head_dim", "v_head_dim",
    "kv_cache_dim", "num_mamba_layers", "conv_state_shapes", "temporal_state_shape", "conv_dtype", "temporal_dtype",
)  # fmt: skip


def _plain(value: object) -> str | None:
    """A value's text, if that is the same in every process."""
    return str(value) if isinstance(value, int | str | tuple | list | torch.dtype | torch.Size) else None


class RangePages(Pages):
    """Pages whose host pool tells where their bytes are."""

    form = "ranges"

    def __init__(self, pool: Any, sizes: Sequence[int]) -> None:
        super().__init__(pool, sum(sizes))
        self._num_ranges = len(sizes)
        self._sizes = tuple(sizes)

    def describe(self) -> str:
        """How a page's bytes are arranged, with the ranges."""
        return f"{super().describe()}; ranges of {' '.join(map(str, self._sizes))}"

    def sources(self, indices: torch.Tensor) -> list[Buffer]:
        """Return the bytes of pages where they are."""
        addresses, sizes = self.pool.get_page_buffer_meta(indices)
        views = [_view(address, size) for address, size in zip(addresses, sizes, strict=True)]
        of_pages = (views[at : at + self._num_ranges] for at in range(0, len(views), self._num_ranges))
        return [page[0] if len(page) == 1 else Pieces(page) for page in of_pages]


class FlatPages(Pages):
    """Pages that are made into tensors of their own."""

    form = "flat"

    def __init__(self, pool: Any, example: torch.Tensor) -> None:
        super().__init__(pool, example.nbytes)
        self._numel = example.numel()
        self._dtype = example.dtype

    def sources(self, indices: torch.Tensor) -> list[Buffer]:
        """Return copies of pages."""
        return [_bytes_of(self.pool.get_data_page(index, flat=True)) for index in self._firsts(indices)]

    def targets(self, indices: torch.Tensor) -> list[Buffer]:
        """Return new memory for pages."""
        return [_bytes_of(torch.empty(self._numel, dtype=self._dtype)) for _ in self._firsts(indices)]

    def settle(self, indices: torch.Tensor, targets: Sequence[Buffer], is_loaded: Sequence[bool]) -> None:
        """Copy pages that were loaded to the pool."""
        for index, target, is_there in zip(self._firsts(indices), targets, is_loaded, strict=True):
            if is_there:
                self.pool.set_from_flat_data_page(index, torch.frombuffer(target, dtype=self._dtype))

    def _firsts(self, indices: torch.Tensor) -> list[int]:
        first: list[int] = indices[:: self.num_tokens].tolist()
        return first


class MarkerPages(Pages):
    """Pages without bytes: of an anchor that only counts. That one was stored says that what belongs to it was offered."""

    form = "marker"

    def __init__(self, pool: Any) -> None:
        super().__init__(pool, 1)

    def sources(self, indices: torch.Tensor) -> list[Buffer]:
        """Return a byte for each page."""
        return [memoryview(bytearray(1)) for _ in range(len(indices) // self.num_tokens)]


def pages_of(name: str, pool: Any) -> Pages:
    """Return the pages of a host pool in the best form that it offers. Raises ``ConfigError`` if it offers none."""
    example = _attempt(pool.get_dummy_flat_data_page)
    if example is not None and example.numel() == 0:
        return MarkerPages(pool)
    sizes = _range_sizes(pool)
    # Ranges that leave something out would be half a page: a flat page has all of it.
    if sizes and (example is None or sum(sizes) == example.nbytes):
        return RangePages(pool, sizes)
    if example is not None and _attempt(lambda: pool.get_data_page(0, flat=True)) is not None:
        return FlatPages(pool, example)
    expected = (
        f"SGLang's pool {name} ({type(pool).__name__}, {getattr(pool, 'layout', '?')}) offers no bytes of its pages"
    )
    raise ConfigError("--hicache-mem-layout", getattr(pool, "layout", None), f"{expected}; try page_first_direct")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory."""
    return memoryview(tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data)


def _range_sizes(pool: Any) -> list[int] | None:
    """Return the sizes of the ranges of one page, in order; ``None`` if the pool does not tell."""
    meta = _attempt(lambda: pool.get_page_buffer_meta(torch.arange(int(getattr(pool, "page_size", 1)))))
    return None if meta is None else [int(size) for size in meta[1]]


def _attempt(ask: Any) -> Any:
    try:
        return ask()
    except _UNSUPPORTED:
        return None


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
