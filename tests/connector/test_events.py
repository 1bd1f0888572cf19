"""An index that is built from the events equals what the engine holds: on the device, in host memory, in lower tiers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.blocks import READY, extend_hashes, root_hash
from cargohold.cache import ChunksStored, OffloadKey
from cargohold.cache.manager import ChunkKeys, SlotReservation, chunk_keys, offload_key, split_key
from cargohold.connector.guests import events as events_module
from cargohold.connector.guests.events import Contents, Medium, TierEvents
from cargohold.connector.kernel.jobs import Store
from cargohold.connector.kernel.requests import Offer, RequestState
from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, simulated_layout
from cargohold.protocol import (
    MEDIUM_DEVICE,
    MEDIUM_HOST,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    AttentionKind,
    BlockRemoved,
    BlockStored,
    KVCacheGroup,
    KVEvent,
    TransferOutcome,
)
from cargohold.tiers.chunk_format import TOKEN_TYPE
from cargohold.tiers.port import Found
from cargohold.tiers.scheduler_side import ChunksFound
from tests.connector.common import evict_everything, finish, prompt
from tests.connector.tiering import make_engine
from tests.effort import examples
from tests.held_tiers import SimulatedTiering

BLOCK_TOKENS = 4
SALTS = (None, None, "mine")


class RouterIndex:
    """What a router knows: per medium, the hash and group of each block. Refuses events that do not describe themselves."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[tuple[bytes, int]]] = {
            medium: set() for medium in (MEDIUM_DEVICE, MEDIUM_HOST, MEDIUM_STORAGE)
        }

    def follow(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            assert not isinstance(event, AllBlocksCleared)
            held = self.blocks[event.medium]
            blocks = {(block_hash, event.group) for block_hash in event.block_hashes}
            if isinstance(event, BlockRemoved):
                assert blocks <= held, "nothing is removed that was not announced"
                held -= blocks
                continue
            assert not blocks & held, "nothing is announced twice"
            held |= blocks
            assert event.block_tokens == BLOCK_TOKENS, "the engine's own blocks"
            assert hashes_in(event) == event.block_hashes


def hashes_in(event: BlockStored) -> tuple[bytes, ...]:
    """The hashes that a router computes from what the event says besides."""
    salts = [keys[0] for keys in event.extra_keys[:1] if keys]
    root = root_hash(salt=str(salts[0]) if salts else None)
    hashes: list[bytes] = []
    extend_hashes(hashes, event.token_ids, BLOCK_TOKENS, event.parent_block_hash or root)
    return tuple(hashes)


def blocks_of(keys: Iterable[OffloadKey], engine: SimulatedEngine, blocks_per_chunk: int) -> set[tuple[bytes, int]]:
    """The blocks in chunks, by what the engine's requests say of their hashes. Prefixes may part within a chunk."""
    chunk_of = {}
    for request in engine.requests.values():
        hashes = request.block_hashes
        for end in range(blocks_per_chunk, len(hashes) + 1, blocks_per_chunk):
            chunk_of[hashes[end - 1]] = hashes[end - blocks_per_chunk : end]
    return {(block_hash, group) for last, group in map(split_key, keys) for block_hash in chunk_of[last]}


def salted_hashes(engine: SimulatedEngine) -> set[bytes]:
    return {h for request in engine.requests.values() if request.salt is not None for h in request.block_hashes}


def on_device(engine: SimulatedEngine) -> set[tuple[bytes, int]]:
    return engine.cached_prefixes()


def published(blocks: set[Any], engine: SimulatedEngine, *, salted: bool) -> set[Any]:
    hidden = set() if salted else salted_hashes(engine)
    return {block for block in blocks if block[0] not in hidden}


@pytest.mark.parametrize("salted", [False, True])
@pytest.mark.parametrize(("lazy", "blocks_per_chunk"), [(False, 1), (False, 2), (False, 3), (True, 1)])
@examples(8)
@given(data=st.data())
def test_an_index_built_from_the_events_equals_device_and_host(
    lazy: bool, salted: bool, blocks_per_chunk: int, data: st.DataObject
) -> None:
    lookahead = 8 if lazy else None
    offloading = SimulatedOffloading(
        data.draw(st.integers(1, 12)), lookahead=lookahead, blocks_per_chunk=blocks_per_chunk
    )
    layout = simulated_layout(30, windows=(None, 9))
    engine = SimulatedEngine(layout, offloading, emit_events=True, emit_salted_events=salted)
    index = RouterIndex()
    for at in range(data.draw(st.integers(1, 8))):
        tokens = prompt(data.draw(st.integers(0, 3)), data.draw(st.integers(1, 40)))
        engine.add(f"r{at}", tokens, 3, salt=data.draw(st.sampled_from(SALTS)))
        for _ in range(data.draw(st.integers(0, 8))):
            if engine.scheduler.has_work():
                engine.step()
            for job in list(offloading.transfers[0].pending):
                offloading.transfers[0].complete(job, data.draw(st.sampled_from(TransferOutcome)))
        if data.draw(st.booleans()):
            finish(engine, offloading)
            engine.scheduler.reset_cache()
        index.follow(engine.scheduler.take_events())
    finish(engine, offloading)
    index.follow(engine.scheduler.take_events())
    assert index.blocks[MEDIUM_DEVICE] == published(on_device(engine), engine, salted=salted)
    keys = [
        offload_key(h, group) for request in engine.requests.values() for h in request.block_hashes for group in (0, 1)
    ]
    ready = {key for key, state in zip(keys, offloading.manager.lookup(keys), strict=True) if state == READY}
    assert len(ready) == offloading.manager.num_ready
    held = blocks_of(ready, engine, blocks_per_chunk)
    assert index.blocks[MEDIUM_HOST] == published(held, engine, salted=salted)


@pytest.mark.parametrize("salted", [False, True])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 9)])
@examples(5)
@given(data=st.data())
def test_an_index_built_from_the_events_equals_what_is_on_disk(
    windows: tuple[int | None, ...], blocks_per_chunk: int, salted: bool, data: st.DataObject
) -> None:
    """Chunks are written down, evicted from host memory and fetched again; requests are aborted at any time."""
    tiering = SimulatedTiering(data.draw(st.integers(8, 24)), blocks_per_chunk=blocks_per_chunk)
    engine = make_engine(tiering, windows=windows, emit_events=True, emit_salted_events=salted)
    index, was_reset = RouterIndex(), False
    for at in range(data.draw(st.integers(1, 10))):
        tokens = prompt(data.draw(st.integers(0, 4)), data.draw(st.integers(1, 44)))
        engine.add(f"r{at}", tokens, 3, salt=data.draw(st.sampled_from(SALTS)))
        for _ in range(data.draw(st.integers(0, 6))):
            if engine.scheduler.has_work():
                engine.step()
        match data.draw(st.integers(0, 5)):
            case 0:
                engine.abort(f"r{at}")
            case 1:
                finish_all(engine, tiering)
                evict_everything(engine)
            case 2:
                finish_all(engine, tiering)
                assert engine.scheduler.reset_cache()
                was_reset = True
        index.follow(engine.scheduler.take_events())
    finish_all(engine, tiering)
    index.follow(engine.scheduler.take_events())
    if not was_reset:  # after a reset, chunks have other names there
        on_disk = blocks_of(tiering.media[0][0].chunks, engine, blocks_per_chunk)
        assert index.blocks[MEDIUM_STORAGE] == published(on_disk, engine, salted=salted)


def finish_all(engine: SimulatedEngine, tiering: SimulatedTiering) -> None:
    engine.run()
    tiering.manager.check()


def test_chunks_of_a_disk_are_announced_with_their_tokens_when_a_request_asks_for_them_after_a_restart() -> None:
    tiering = SimulatedTiering(60, blocks_per_chunk=2)
    first = make_engine(tiering)
    first.add("first", prompt(0, 45), 3)
    finish_all(first, tiering)
    engine = make_engine(tiering, emit_events=True)
    index = RouterIndex()
    engine.add("other", prompt(1, 16), 1)
    finish_all(engine, tiering)
    index.follow(engine.scheduler.take_events())
    before = set(index.blocks[MEDIUM_STORAGE])
    engine.add("second", prompt(0, 45), 1)
    finish_all(engine, tiering)
    index.follow(engine.scheduler.take_events())
    assert len(index.blocks[MEDIUM_STORAGE] - before) == 10
    assert index.blocks[MEDIUM_STORAGE] - before <= index.blocks[MEDIUM_HOST], "they were brought up"


class Source:
    """Says what a test wants of a tier."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def take_events(self) -> list[Any]:
        events, self.events = self.events, []
        return events


class AskedBy:
    """A request, its keys, and the events of one tier that it asks."""

    def __init__(self, num_chunks: int, max_announced: int | None = None) -> None:
        self.source = Source()
        layout = simulated_layout(8)
        self.asked: set[OffloadKey] = set()
        medium = Medium(self.source, MEDIUM_STORAGE, max_announced=max_announced)
        self.events = TierEvents(layout, [medium], self.asked.__contains__, salted=False)
        self.engine = SimulatedEngine(layout)
        self.request = self.engine.add("r", prompt(0, num_chunks * BLOCK_TOKENS), 1)
        self.keys = ChunkKeys(KVCacheGroup(0, AttentionKind.FULL, BLOCK_TOKENS, ("layer",)), 1, BLOCK_TOKENS)
        self.keys.extend(self.request.block_hashes)


def test_no_more_chunks_are_announced_than_a_tier_can_hold() -> None:
    """Found in a long run: of a disk for a dozen chunks, thousands were announced at the same time."""
    world = AskedBy(12, max_announced=5)
    world.events.note_wanted(world.request, [world.keys])
    keys = world.keys.keys
    index = RouterIndex()
    for first in range(0, 12, 3):
        world.source.events.append(ChunksStored(tuple(keys[first : first + 3])))
    world.source.events.append(ChunksStored((keys[7],)))  # heard of again, so it is not the next to be given up
    world.source.events.append(ChunksStored(tuple(keys[:3])))
    index.follow(world.events.take())
    held = {offload_key(*block) for block in index.blocks[MEDIUM_STORAGE]}
    assert held == {keys[0], keys[1], keys[2], keys[7], keys[11]}
    world.source.events.append(ChunksStored(tuple(keys)))
    index.follow(world.events.take())
    assert {offload_key(*block) for block in index.blocks[MEDIUM_STORAGE]} == set(keys[-5:])


def test_contents_that_nobody_needs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "_NUM_SPARE", 4)
    world = AskedBy(4)
    keys = world.keys.keys
    world.asked.update(keys[:2])
    world.events.note_wanted(world.request, [world.keys])
    world.source.events.append(ChunksStored((keys[3],)))
    world.events.take()
    for at in range(1, 40):
        other = world.engine.add(f"r{at}", prompt(at, 4 * BLOCK_TOKENS), 1)
        other_keys = ChunkKeys(world.keys.group, 1, BLOCK_TOKENS)
        other_keys.extend(other.block_hashes)
        world.events.note_wanted(other, [other_keys])
    assert set(keys) - set(world.events.known) == {keys[2]}, "it is neither announced nor asked for"
    assert len(world.events.known) <= 20


def test_what_is_being_stored_is_announced_however_much_else_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "_NUM_SPARE", 0)
    world = AskedBy(40)
    engine = SimulatedEngine(simulated_layout(8))
    state = RequestState.create(engine.add("other", prompt(1, 9), 1), chunk_keys(simulated_layout(8), 1))
    state.extend_keys()
    offer = Offer(state, 0, (1, 2), 0, 2)
    offer.take(0, 2, range(2), (1, 2))
    stored = offer.keys
    store = Store(1, frozenset({"other"}), SlotReservation(stored, (0, 1), lambda *_: None), (1, 2))
    world.events.store_begins(store, [offer])
    world.events.note_wanted(world.request, [world.keys])
    world.source.events.append(ChunksStored(tuple(stored)))
    assert len(world.events.take()) == 2


@pytest.mark.parametrize("salted", [False, True])
def test_of_what_an_earlier_engine_has_left_salted_chunks_are_announced_only_if_wanted(salted: bool) -> None:
    source = Source()
    events = TierEvents(simulated_layout(8), [Medium(source, MEDIUM_STORAGE)], lambda _: False, salted=salted)
    tokens = array(TOKEN_TYPE, range(BLOCK_TOKENS))
    found = [
        Found(offload_key(bytes([number]) * 32, 0), Contents(None, tokens, is_salted=is_salted).details())
        for number, is_salted in enumerate((False, True))
    ]
    source.events.append(ChunksFound(tuple(found)))
    assert len(events.take()) == 1 + salted


def test_what_a_tier_has_under_a_group_that_the_model_lacks_is_no_business_of_a_router() -> None:
    source = Source()
    events = TierEvents(simulated_layout(8), [Medium(source, MEDIUM_STORAGE)], lambda _: False, salted=False)
    details = Contents(None, array(TOKEN_TYPE, range(BLOCK_TOKENS))).details()
    source.events.append(ChunksFound((Found(offload_key(bytes(32), 7), details),)))
    assert events.take() == []
