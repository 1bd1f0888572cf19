"""Adapters that are loaded, replaced and dropped in any order: what is kept under some weights was computed with these.

A naive engine without tokens: what a block holds is the list of the weights with which it and all before it were computed.
Steps overlap and workers are several. An adapter whose files have changed is unloaded and loaded again, or loaded in place. If
the prefix cache is not reset then, requests may find KV of the old weights, as they do on the device.
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

from cargohold.integrations.vllm.adapters import Adapters, AdapterWeights, HeldAdapters, Look
from cargohold.integrations.vllm.records import RequestRecord

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
        self.in_flight: deque[tuple[list[dict[Look, str]], dict[bytes, tuple[int, ...]]]] = deque()
        self.outlived: set[str] = (
            set()
        )  # adapters of requests that went on after the last reset: no worker looks for these
        self.weights_of: dict[bytes, bytes] = {}
        self.num_loads = 0

    def play(self) -> None:
        actions: list[Callable[[], None]] = [self.ask, self.replace, self.replace_in_place, self.reset]
        for _ in range(150):
            if self.random.random() < 0.4:
                self.random.choices(actions, [8, 3, 1, 1])[0]()
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
        """Unload an adapter that no request has, and load what may be another one, for which vLLM has another number."""
        path = self.random.choice(["one", "two"])
        if path not in self.outlived | self.in_use:
            self.files[path] = self.random.randrange(1, 4)
            self.numbers[path] = max(self.numbers.values()) + 1

    def replace_in_place(self) -> None:
        path = self.random.choice(["one", "two"])
        self.files[path] = self.random.randrange(1, 4)
        for worker in self.workers:
            worker.add_lora(LoRARequest(path, self.numbers[path], path, load_inplace=True))
        if path in self.outlived or self.random.random() < 0.5:
            self.reset()

    def reset(self) -> None:
        """Reset the prefix cache. Requests that run start over."""
        self.outlived = self.in_use
        self.device.clear()
        self.pool.cached_block_hash_to_block = object()
        for one in self.waiting:
            one.blocks.clear()

    @property
    def in_use(self) -> set[str]:
        return {one.seen.own.lora_request.lora_path for one in self.waiting}

    def step(self) -> None:
        records = {key: RequestRecord(one.seen) for key, one in self.requests.items()}
        running = self.adapters.offloaded(records)
        started = [one for one in self.waiting if one.blocks or self.is_admitted(one)]
        looks = self.adapters.take_looks()
        for worker in self.workers:
            worker.held.look(looks)
        stores: dict[bytes, tuple[int, ...]] = {}
        for one in started:
            self.load(one)
            self.compute(one)
            if one.seen.request_id in running:
                stores |= dict(zip(one.seen.block_hashes, one.blocks, strict=False))
                self.weights_of |= dict.fromkeys(one.seen.block_hashes, one.seen.weights.mask)
        for worker in self.workers:
            worker.held.check()
        self.in_flight.append(([dict(worker.held.take()) for worker in self.workers], stores))
        if len(self.in_flight) > 1 or self.random.random() < 0.5:
            self.account()
        for one in [one for one in self.waiting if len(one.blocks) == 4]:
            self.waiting.remove(one)
            self.requests.pop(one.seen.request_id, None)

    def is_admitted(self, one: Running) -> bool:
        """Whether a request has been told what it can load, and begins."""
        seen = one.seen
        if seen.request_id not in self.requests or self.adapters.why_not(seen):
            return True
        return not self.adapters.is_unsure(seen)

    def load(self, one: Running) -> None:
        """Give a request that begins what the device has, or else the tier."""
        if one.blocks:
            return
        for block_hash in one.seen.own.block_hashes[:3]:
            if block_hash not in self.device:
                break
            one.blocks.append(self.device[block_hash])
        if one.blocks or self.adapters.why_not(one.seen) or one.seen.request_id not in self.requests:
            return
        for key in one.seen.block_hashes[:3]:
            if key not in self.tier:
                break
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
            stores = {}
            self.in_flight = deque((reports, {}) for reports, _ in self.in_flight)
        for key, block in stores.items():
            assert {mask_of(weights) for weights in block} == {self.weights_of[key]}, "KV of other weights is kept"
        self.tier |= stores


def mask_of(weights: int) -> bytes:
    return sha256(f"w{weights}".encode() * NUM_RANKS).digest()[:16]


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cargohold.integrations.vllm.adapters.fingerprint_of", lambda loaded: f"w{loaded.weights}")


def play(num_seeds: int) -> int:
    engines = [NaiveEngine(seed) for seed in range(num_seeds)]
    for engine in engines:
        engine.play()
    return sum(engine.num_loads for engine in engines)


def test_what_is_kept_was_computed_with_its_weights() -> None:
    assert play(NUM_SEEDS) > 10 * NUM_SEEDS, "hardly anything is loaded: this proves little"


def keys_by_name_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdapterWeights, "key_of", lambda self, block_hash: block_hash)


def does_not_look_after_a_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HeldAdapters, "check", lambda self: None)


def goes_on_with_requests_that_outlive_a_reset(patch: pytest.MonkeyPatch) -> None:
    offloaded = Adapters.offloaded
    patch.setattr(Adapters, "offloaded", lambda self, records: offloaded(self, records) and records)


def trusts_a_name_after_weights_have_changed(patch: pytest.MonkeyPatch) -> None:
    find = Adapters._of

    def find_anew(self: Adapters, adapter: Any) -> AdapterWeights:
        known = self._weights.get((adapter.lora_name, adapter.lora_path))
        if known is not None and known.why_not:
            del self._weights[adapter.lora_name, adapter.lora_path]
        return find(self, adapter)

    patch.setattr(Adapters, "_of", find_anew)


def takes_a_new_number_for_the_same_weights(patch: pytest.MonkeyPatch) -> None:
    is_unsure = Adapters.is_unsure

    def take(self: Adapters, seen: Any) -> bool:
        seen.is_sure = bool(seen.weights.mask)
        return is_unsure(self, seen)

    patch.setattr(Adapters, "is_unsure", take)


MUTANTS = [
    keys_by_name_only,
    does_not_look_after_a_step,
    goes_on_with_requests_that_outlive_a_reset,
    trusts_a_name_after_weights_have_changed,
    takes_a_new_number_for_the_same_weights,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutants_are_caught(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="KV of other weights is kept"):
        play(NUM_SEEDS)
