"""Adapters that are loaded, replaced, dropped and read again in any order: no load brings KV of other weights.

A naive engine without tokens: what a block holds is the list of the weights with which it and all before it were computed.
Steps overlap, workers are several, and files change at any time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from vllm.lora.request import LoRARequest

from cargohold.integrations.vllm.adapters import Adapters, AdapterWeights, HeldAdapters

NUM_RANKS = 2
NUM_SEEDS = 60


class Loaded:
    """An adapter in a worker's memory."""

    def __init__(self, weights: int) -> None:
        self.weights = weights


class Worker:
    """Holds as many adapters as it has room for, and reads files when it needs one that it has not."""

    def __init__(self, files: dict[str, int]) -> None:
        self._files = files
        self._loaded: OrderedDict[int, Loaded] = OrderedDict()
        manager = SimpleNamespace(list_adapters=lambda: dict(self._loaded))
        self.model_runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
        self.held = HeldAdapters(None)
        self.held._worker = self

    def add_lora(self, adapter: LoRARequest) -> int:
        number = adapter.lora_int_id
        if number not in self._loaded or adapter.load_inplace:
            self._loaded[number] = Loaded(self._files[adapter.lora_path])
        self._loaded.move_to_end(number)
        if len(self._loaded) > 2:
            self._loaded.popitem(last=False)
        return self._loaded[number].weights


@dataclass
class Running:
    """A request that computes a block in every step.

    Attributes:
        seen: the view of it.
        blocks: what its blocks hold; ``None`` until they are computed.
    """

    seen: Any
    blocks: list[tuple[int, ...]] = field(default_factory=list)


class NaiveEngine:
    """vLLM's prefix cache, a tier, and workers that lag a step behind."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.files = {"one": 1, "two": 2}
        self.numbers = {"one": 1, "two": 2}
        self.workers = [Worker(self.files) for _ in range(NUM_RANKS)]
        self.device: dict[bytes, tuple[int, ...]] = {}
        self.tier: dict[bytes, tuple[int, ...]] = {}
        self.pool = SimpleNamespace(cached_block_hash_to_block=object(), blocks=range(20))
        self.adapters = Adapters(self.pool, NUM_RANKS, 1)
        self.requests: dict[str, Running] = {}
        self.waiting: list[Running] = []
        self.in_flight: deque[tuple[list[dict[int, str]], dict[bytes, tuple[int, ...]]]] = deque()
        self.num_loads = 0

    def play(self) -> None:
        actions: list[Callable[[], None]] = [self.ask, self.replace, self.load_again, self.renumber, self.reset]
        for _ in range(150):
            if self.random.random() < 0.4:
                self.random.choices(actions, [8, 2, 2, 1, 2])[0]()
            self.step()

    def ask(self) -> None:
        path = self.random.choice(["one", "two"])
        hashes = [sha256(f"{path} {self.random.randrange(2)} {at}".encode()).digest() for at in range(4)]
        adapter = LoRARequest(path, self.numbers[path], path)
        own = SimpleNamespace(request_id=str(self.random.random()), lora_request=adapter, block_hashes=hashes)
        running = Running(self.adapters.seen(own))
        if not self.adapters.why_not(running.seen):
            self.requests[own.request_id] = running
        self.waiting.append(running)

    def replace(self) -> None:
        self.files[self.random.choice(["one", "two"])] = self.random.randrange(1, 4)

    def load_again(self) -> None:
        path = self.random.choice(["one", "two"])
        for worker in self.workers:
            worker.add_lora(LoRARequest(path, self.numbers[path], path, load_inplace=True))

    def renumber(self) -> None:
        path = self.random.choice(["one", "two"])
        self.numbers[path] = max(self.numbers.values()) + 1

    def reset(self) -> None:
        if not self.waiting:
            self.device.clear()
            self.pool.cached_block_hash_to_block = object()

    def step(self) -> None:
        started = [one for one in self.waiting if one.blocks or self.is_admitted(one)]
        running = self.adapters.without_given_up({key: one.seen for key, one in self.requests.items()})
        looks = self.adapters.take_looks()
        refused = set().union(*(worker.held.look(looks, rank) for rank, worker in enumerate(self.workers)))
        stores: dict[bytes, tuple[int, ...]] = {}
        for one in started:
            self.load(one, is_refused=one.seen.request_id in refused)
            self.compute(one)
            if one.seen.request_id in running:
                stores |= dict(zip(one.seen.block_hashes, one.blocks, strict=False))
        for worker in self.workers:
            worker.held.check()
        self.in_flight.append(([dict(worker.held.take()) for worker in self.workers], stores))
        if len(self.in_flight) > 1 or self.random.random() < 0.5:
            self.account()
        for one in [one for one in self.waiting if len(one.blocks) == 4]:
            self.waiting.remove(one)
            self.requests.pop(one.seen.request_id, None)
            self.adapters.was_given_up(one.seen.request_id)

    def is_admitted(self, one: Running) -> bool:
        """Whether a request has been told what it can load, and begins."""
        seen = one.seen
        if seen.request_id not in self.requests or self.adapters.why_not(seen):
            return True
        if self.adapters.is_unsure(seen):
            return False
        if any(key in self.tier for key in seen.block_hashes[:1]):
            self.adapters.note_load(seen)
        return True

    def load(self, one: Running, *, is_refused: bool) -> None:
        """Give a request that begins what the device has, or else what was noted to be loaded."""
        if one.blocks:
            return
        for block_hash in one.seen.own.block_hashes[:3]:
            if block_hash not in self.device:
                break
            one.blocks.append(self.device[block_hash])
        if one.blocks or is_refused or self.adapters.why_not(one.seen) or one.seen.request_id not in self.requests:
            return
        held = {worker.add_lora(one.seen.own.lora_request) for worker in self.workers}
        for key in one.seen.block_hashes[:3]:
            if key not in self.tier:
                break
            assert set(self.tier[key]) == held, "KV of other weights is loaded"
            self.num_loads += 1
            one.blocks.append(self.tier[key])

    def compute(self, one: Running) -> None:
        weights = {worker.add_lora(one.seen.own.lora_request) for worker in self.workers}
        one.blocks.append((*(one.blocks[-1] if one.blocks else ()), *weights))
        for block_hash, block in zip(one.seen.own.block_hashes, one.blocks, strict=False):
            self.device.setdefault(block_hash, block)

    def account(self) -> None:
        reports, stores = self.in_flight.popleft()
        changes = [self.adapters.note(rank, held) for rank, held in enumerate(reports)]
        if any(changes):
            self.adapters.give_up([one.seen for one in self.requests.values()])
            stores = {}
            self.in_flight = deque((reports, {}) for reports, _ in self.in_flight)
        self.tier |= stores


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cargohold.integrations.vllm.adapters.fingerprint_of", lambda loaded: f"w{loaded.weights}")


def play(num_seeds: int) -> int:
    engines = [NaiveEngine(seed) for seed in range(num_seeds)]
    for engine in engines:
        engine.play()
    return sum(engine.num_loads for engine in engines)


def test_no_load_brings_kv_of_other_weights() -> None:
    assert play(NUM_SEEDS) > 10 * NUM_SEEDS, "hardly anything is loaded: this proves little"


def keys_by_name_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdapterWeights, "key_of", lambda self, block_hash: block_hash)


def loads_whatever_workers_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HeldAdapters, "_has", lambda *_: True)


def does_not_look_after_a_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HeldAdapters, "check", lambda self: None)


def goes_on_with_requests_whose_adapter_has_changed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Adapters, "give_up", lambda self, requests: None)


def trusts_a_name_after_weights_have_changed(patch: pytest.MonkeyPatch) -> None:
    find = Adapters._of

    def find_anew(self: Adapters, adapter: Any) -> AdapterWeights:
        known = self._weights.get((adapter.lora_name, adapter.lora_path))
        if known is not None and known.why_not:
            del self._weights[adapter.lora_name, adapter.lora_path]
        return find(self, adapter)

    patch.setattr(Adapters, "_of", find_anew)


def takes_a_new_number_for_the_same_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Adapters, "_is_known", lambda self, seen: bool(seen.weights.mask) and not seen.weights.why_not)
    patch.setattr(HeldAdapters, "_has", lambda *_: True)


MUTANTS = [
    keys_by_name_only,
    loads_whatever_workers_hold,
    does_not_look_after_a_step,
    goes_on_with_requests_whose_adapter_has_changed,
    trusts_a_name_after_weights_have_changed,
    takes_a_new_number_for_the_same_weights,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutants_are_caught(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="KV of other weights is loaded"):
        play(NUM_SEEDS)
