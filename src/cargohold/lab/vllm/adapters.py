"""Adapters in the simulation: files that change under old names, and what each worker has loaded of them.

Requests whose salt is the name of an adapter are computed with it. Files change where weights otherwise do: at resets.
"""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, Final
from weakref import WeakSet

from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest

from cargohold.integrations.vllm.adapters import HeldAdapters
from cargohold.lab.simulation.workloads import ADAPTERS

_ROOM: Final = 2
"""Adapters that a worker holds at the same time."""
_SPREAD: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1


def lora_config() -> Any:
    """Configuration of vLLM for adapters."""
    return LoRAConfig(max_lora_rank=8, max_loras=_ROOM)


class AdapterFiles:
    """The files of all adapters, which outlive the process: their contents follow from a version.

    The first changes with each version, the second with every other one, and so on.
    """

    def __init__(self) -> None:
        self._version = 0
        self.workers: WeakSet[AdapterWorker] = WeakSet()

    def replace(self, version: int) -> None:
        """Let the files have this version's contents; workers drop what they hold, and find the same names."""
        self._version = version
        for worker in self.workers:
            worker.loaded.clear()

    def content_of(self, name: str | None) -> int:
        """A number that stands for what an adapter's files hold; 0 for no adapter."""
        if name not in ADAPTERS:
            return 0
        at = ADAPTERS.index(name)
        return 1 + at + len(ADAPTERS) * (self._version // (at + 1))

    def code_of(self, name: str | None) -> int:
        """What KV computed with an adapter differs by from that without one."""
        return self.content_of(name) * _SPREAD & _MASK

    def request(self, name: str | None) -> Any:
        """VLLM's description of an adapter, which gets another number with every other version; ``None`` for no adapter."""
        if name not in ADAPTERS:
            return None
        number = 1 + ADAPTERS.index(name) + len(ADAPTERS) * (self._version // 2 % 2)
        return LoRARequest(lora_name=name, lora_int_id=number, lora_path=f"/adapters/{name}")


class _Loaded:
    """An adapter in a worker's memory, with this rank's part of its weights."""

    def __init__(self, weights: int) -> None:
        self.weights = weights


class AdapterWorker:
    """Stands for vLLM's worker of one rank, as far as ``HeldAdapters`` looks at it.

    Args:
        files: the files that it loads.
        rank: which worker this is. What an adapter's files hold differs on one rank alone, another one for the next adapter.
        num_ranks: number of workers.
    """

    def __init__(self, files: AdapterFiles, rank: int, num_ranks: int) -> None:
        self._files = files
        self.rank, self._num_ranks = rank, num_ranks
        self.loaded: OrderedDict[int, _Loaded] = OrderedDict()
        manager = SimpleNamespace(list_adapters=lambda: dict(self.loaded))
        self.model_runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
        files.workers.add(self)

    def add_lora(self, adapter: Any) -> None:
        """Load an adapter, unless it is there; of others, drop the one used longest ago if there is no room."""
        number = adapter.lora_int_id
        if number not in self.loaded:
            is_here = ADAPTERS.index(adapter.lora_name) % self._num_ranks == self.rank
            self.loaded[number] = _Loaded(self._files.content_of(adapter.lora_name) if is_here else 0)
        self.loaded.move_to_end(number)
        if len(self.loaded) > _ROOM:
            self.loaded.popitem(last=False)


class SimulatedHeld(HeldAdapters):
    """What a simulated worker holds."""

    def __init__(self) -> None:
        super().__init__(None)

    def hold(self, worker: AdapterWorker) -> None:
        """Say what this worker holds."""
        self._worker = worker

    def find_worker(self) -> None:
        """Do nothing: it is known."""
