"""A fake CUDA device in CPU memory: its streams do their work when the test says so, and host copies behave as CUDA's.

Tensors on it are CPU tensors that were announced with ``put``. Operations that change tensors are put at the end of the current
stream, and take place when the test runs that stream; all others (views, new tensors) take place at once. A copy between device
and host that CUDA could not make in the background, because the host's pages are not locked or its side is not one piece, waits
for its stream and is counted: it holds up its caller.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from cargohold.transfer import links
from cargohold.transfer.links import Addresses

_aten = torch.ops.aten
_DEFERRED = (_aten.copy_.default, _aten.index_copy_.default, _aten.index_select.out)


class Stream:
    """A queue of work, done in order. An entry is a function that returns whether its work could be done."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.work: deque[Callable[[], bool]] = deque()
        cuda.streams.append(self)

    @property
    def cuda_stream(self) -> Stream:
        """The handle, which drivers take."""
        return self

    def add(self, act: Callable[[], object]) -> None:
        def work() -> bool:
            act()
            return True

        self.work.append(work)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self._cuda)
        event.record(other)
        self.work.append(event.is_done)

    def advance(self) -> bool:
        """Do the next piece of work, unless it has to wait. Returns whether something was done."""
        with _disable_current_modes():
            is_done = bool(self.work) and self.work[0]()
        if is_done:
            self._cuda.num_done += 1
            self.work.popleft()
        return is_done

    def synchronize(self) -> None:
        if self._cuda.is_broken:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        while self.work:
            advanced = [stream.advance() for stream in self._cuda.streams]
            assert any(advanced), "streams wait for each other"


class Event:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._is_done = False
        self._at = 0

    def record(self, stream: Stream) -> None:
        stream.add(self._happen)

    def is_done(self) -> bool:
        return self._is_done

    def query(self) -> bool:
        if self._cuda.is_broken:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        return self._is_done

    def elapsed_time(self, later: Event) -> float:
        """In milliseconds: one for each piece of work that streams have done in between."""
        assert self._is_done
        assert later._is_done
        return float(later._at - self._at)

    def _happen(self) -> None:
        self._at = self._cuda.num_done
        self._is_done = True


class FakeCuda(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own is not annotated
    """One device. Use as a context manager, after ``install``.

    Attributes:
        streams: all, in the order in which they were made; the first is the model's.
        num_waits: how often a copy held its caller up.
        num_done: pieces of work that streams have done.
        refuses_locks: whether locking of pages fails.
        fails_in: number of further changes of tensors that are accepted before one cannot be enqueued; ``None`` for no limit.
        is_broken: whether every query of the device fails.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        self.streams: list[Stream] = []
        self.compute = Stream(self)
        self.num_waits = 0
        self.num_done = 0
        self.refuses_locks = False
        self.fails_in: int | None = None
        self.is_broken = False
        self._current = self.compute
        self._on_device: list[range] = []
        self._locked: dict[int, int] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(links, "driver_batch_copy", lambda: self._batch_copy)
        for name, value in {
            "Stream": lambda _device, priority=0: Stream(self),  # the test chooses the order
            "synchronize": self._synchronize,
            "Event": lambda enable_timing=False: Event(self),
            "current_stream": lambda _device: self._current,
            "stream": self._use,
            "device": _nothing,
            "cudart": lambda: SimpleNamespace(cudaHostRegister=self._lock, cudaHostUnregister=self._locked.pop),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def put(self, *tensors: torch.Tensor) -> None:
        """Announce tensors that are on the device."""
        self._on_device += [_addresses(tensor) for tensor in tensors]

    def run(self, choices: Sequence[int]) -> None:
        """Let the chosen streams go on in this order, each by one piece of work."""
        for choice in choices:
            self.streams[choice % len(self.streams)].advance()

    @property
    def num_locked_bytes(self) -> int:
        return sum(self._locked.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _DEFERRED:
            return func(*args, **kwargs)
        self._accept()
        self._current.add(lambda: func(*args, **kwargs))
        if func is _aten.copy_.default and self._holds_up(*args, **kwargs):
            self.num_waits += 1
            self._current.synchronize()
        return kwargs.get("out", args[0])

    def _synchronize(self, _device: object) -> None:
        for stream in self.streams:
            stream.synchronize()

    def _batch_copy(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: Stream) -> None:
        """Copy like the driver, which takes locked pages alone."""
        assert stream is self._current
        copies = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        for target, source, size in copies:
            ends = [range(start, start + size) for start in (target, source)]
            assert sorted(map(self._where, ends)) == ["device", "locked"], (
                "a copy crosses between locked pages and device"
            )
            self._accept()
            self._current.add(partial(ctypes.memmove, target, source, size))

    def _where(self, addresses: range) -> str:
        if any(addresses.start in known and addresses[-1] in known for known in self._on_device):
            return "device"
        return "locked" if self._are_locked(addresses) else "elsewhere"

    def _accept(self) -> None:
        """Accept a change, or raise if it cannot be enqueued."""
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in < 0:
                raise RuntimeError("CUDA error: out of memory")

    def _holds_up(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> bool:
        places = [self._is_on_device(tensor) for tensor in (target, source)]
        assert any(places), "a copy within host memory has no business on a stream"
        if all(places):
            return False
        host = source if places[0] else target
        return not (non_blocking and host.is_contiguous() and self._is_locked(host))

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        return any(_addresses(tensor).start in addresses for addresses in self._on_device)

    def _is_locked(self, tensor: torch.Tensor) -> bool:
        return self._are_locked(_addresses(tensor))

    def _are_locked(self, wanted: range) -> bool:
        return any(
            start <= wanted.start and wanted.stop <= start + num_bytes for start, num_bytes in self._locked.items()
        )

    def _lock(self, address: int, num_bytes: int, _flags: int) -> int:
        if self.refuses_locks:
            return 2
        self._locked[address] = num_bytes
        return 0

    @contextmanager
    def _use(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before


@contextmanager
def _nothing(_device: object) -> Iterator[None]:
    yield


def _addresses(tensor: torch.Tensor) -> range:
    """Addresses of a tensor, from its first byte to behind its last, gaps included."""
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(start, start + (last + 1) * tensor.element_size())
