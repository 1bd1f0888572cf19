"""Managers under one interface, so that the same batches can be given to ours and to vLLM's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from cargohold.blocks import READY
from cargohold.cache import StoreOffer, make_manager
from cargohold.cache.policies import DEFAULT_POLICY

Keys = Sequence[bytes]


class Contender(Protocol):
    """A manager of one tier, driven with batches of keys that are consecutive chunks of one prefix."""

    def lookup(self, keys: Keys) -> int:
        """How many of ``keys`` are there."""
        ...

    def touch(self, keys: Keys) -> None:
        """Note that a request uses these chunks."""
        ...

    def load(self, keys: Keys) -> None:
        """Pin chunks and release them: a load from beginning to end."""
        ...

    def store(self, keys: Keys) -> None:
        """Reserve slots for chunks and make them ready: a store from beginning to end."""
        ...

    def store_each(self, keys: Keys) -> None:
        """Store chunks of different prefixes, which as many requests complete in one step."""
        ...


class Cargohold:
    """Our manager.

    Args:
        policy: a name in ``cargohold.cache.policies.POLICIES``.
        capacity: slots.
    """

    def __init__(self, policy: str, capacity: int) -> None:
        self._manager = make_manager(policy, capacity)

    def lookup(self, keys: Keys) -> int:
        return self._manager.lookup(keys).count(READY)

    def touch(self, keys: Keys) -> None:
        self._manager.touch(keys)

    def load(self, keys: Keys) -> None:
        self._manager.prepare_load(keys).release()

    def store(self, keys: Keys) -> None:
        handle = self._manager.prepare_store(keys)
        handle.commit()

    def store_each(self, keys: Keys) -> None:
        self._manager.prepare_stores([StoreOffer((key,)) for key in keys]).commit()


class VLLM:
    """vLLM's manager of host memory. Each batch is a request of its own, as in its connector.

    Args:
        policy: ``lru`` or ``arc``.
        capacity: slots.

    Raises:
        ImportError: vLLM is not installed here, or is built differently.
    """

    def __init__(self, policy: str, capacity: int) -> None:
        # Imported by name, because vLLM is only installed in an environment of its own.
        manager: Any = importlib.import_module("vllm.v1.kv_offload.cpu.manager")
        base: Any = importlib.import_module("vllm.v1.kv_offload.base")
        self._manager = manager.CPUOffloadingManager(capacity, cache_policy=policy)
        self._hit = base.LookupResult.HIT
        self._new_request = base.ReqContext

    def lookup(self, keys: Keys) -> int:
        request, hit, lookup = self._new_request("r"), self._hit, self._manager.lookup
        return sum([lookup(key, request) is hit for key in keys])

    def touch(self, keys: Keys) -> None:
        self._manager.touch(keys, self._new_request("r"))

    def load(self, keys: Keys) -> None:
        request = self._new_request("r")
        self._manager.prepare_load(keys, request)
        self._manager.complete_load(keys, request)

    def store(self, keys: Keys) -> None:
        request = self._new_request("r")
        output = self._manager.prepare_store(keys, request)
        assert output is not None
        self._manager.complete_store(output.keys_to_store, request)

    def store_each(self, keys: Keys) -> None:
        for key in keys:
            self.store([key])


MakeContender = Callable[[int], Contender]


def contenders() -> dict[str, MakeContender]:
    """Functions that make each contender for a capacity, by name; vLLM's only if vLLM is installed."""
    found: dict[str, MakeContender] = {
        f"cargohold {policy}": partial(Cargohold, policy) for policy in ("lru", "arc", DEFAULT_POLICY)
    }
    try:
        VLLM("lru", 1)
    except ImportError:
        return found
    return {**found, **{f"vllm {policy}": partial(VLLM, policy) for policy in ("lru", "arc")}}
