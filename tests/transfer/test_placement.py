"""Host memory lies next to the device: on the NUMA node that the driver names, asked for before the first page is committed."""

from __future__ import annotations

import ctypes
import platform
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cargohold.tiers import HostMemory
from cargohold.transfer import Direction, cuda
from cargohold.transfer.host_pages import lock_pages, nearest_node, place_near
from tests.transfer.test_cuda import bench_of, job

_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_OF_ADDRESS = 2
PREFERRED = 1


def policy_of(memory: HostMemory) -> tuple[int, int]:
    """Memory policy of the page where host memory begins, and its nodes as bits."""
    mode, nodes = ctypes.c_int(), ctypes.c_ulong()
    error = ctypes.CDLL(None).syscall(
        ctypes.c_long(_GET_MEMPOLICY[platform.machine()]),
        ctypes.byref(mode),
        ctypes.byref(nodes),
        ctypes.c_ulong(64),
        ctypes.c_void_p(memory.rows.ctypes.data),
        _OF_ADDRESS,
    )
    assert not error
    return mode.value, nodes.value


def test_pages_are_asked_for_on_the_node() -> None:
    memory = HostMemory(64, 4096)
    if not place_near(memory.rows, 0):
        pytest.skip("this system takes no wishes where memory lies")
    assert policy_of(memory) == (PREFERRED, 1)
    memory.rows[:] = 7
    assert (memory.rows == 7).all()


@pytest.mark.parametrize("node", [None, 63, 64, 1000])
def test_a_node_that_is_not_there_leaves_memory_as_it_is(node: int | None) -> None:
    memory = HostMemory(4, 4096)
    assert not place_near(memory.rows, node)
    memory.rows[:] = 7
    assert (memory.rows == 7).all()


class Driver(SimpleNamespace):
    """A driver whose devices are 100 + their index, and that knows their nodes."""

    nodes: dict[int, int]

    def cuDeviceGet(self, handle: Any, index: int) -> int:  # noqa: N802  # the driver's name
        handle._obj.value = 100 + index
        return 0

    def cuDeviceGetAttribute(self, node: Any, attribute: int, handle: ctypes.c_int) -> int:  # noqa: N802  # the same
        assert attribute == 134
        if handle.value not in self.nodes:
            return 1
        node._obj.value = self.nodes[handle.value]
        return 0


@pytest.mark.parametrize(("index", "node"), [(0, 0), (3, 1), (4, None), (5, None)])
def test_the_driver_names_the_node_of_a_device(index: int, node: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(nodes={100: 0, 103: 1, 104: -1})
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    assert nearest_node(torch.device("cuda", index)) == node


def test_without_a_driver_or_with_an_old_one_there_is_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    assert nearest_node(torch.device("cuda", 0)) is None

    def missing(_: str) -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert nearest_node(torch.device("cuda", 0)) is None


def test_the_place_is_asked_for_before_pages_are_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locking commits pages, and committed pages stay where they are."""
    calls: list[str] = []
    really_lock = lock_pages

    def lock(device: torch.device, address: int, num_bytes: int) -> str | None:
        calls.append("lock")
        return really_lock(device, address, num_bytes)

    monkeypatch.setattr(cuda, "nearest_node", lambda _: 1)
    monkeypatch.setattr(cuda, "place_near", lambda _, node: calls.append(f"place on {node}"))
    monkeypatch.setattr(cuda, "lock_pages", lock)
    with bench_of((96,)) as bench:
        bench.worker.submit(job(1, Direction.STORE, [3], [8]))
        bench.finish()
    assert calls[0] == "place on 1" and set(calls[1:]) == {"lock"}
