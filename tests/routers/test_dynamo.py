"""What Dynamo's indexer makes of our events equals what the engine can find, at every quiet moment."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count, product, takewhile

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cargohold.blocks import READY, extend_hashes, root_hash
from cargohold.cache.manager import offload_key
from cargohold.engine.events import ZmqEventPublisher
from cargohold.lab.simulation import SimulatedEngine
from cargohold.protocol import MEDIUM_DEVICE, MEDIUM_HOST, MEDIUM_STORAGE, BlockRemoved, BlockStored, Locality
from cargohold.tiers import JobKind, JobStatus
from cargohold.tiers.scheduler_side import TierOptions
from tests.connector.common import evict_everything, prompt
from tests.connector.tiering import lose_host_memory, make_engine
from tests.held_tiers import HeldMedium, HeldQueue, SimulatedTiering
from tests.routers.dynamo import Found, Indexer, end_of_run, needs_dynamo, running_indexer

pytestmark = needs_dynamo
zmq = pytest.importorskip("zmq", reason="publishing events needs the extra cargohold[events]")

BLOCK_TOKENS = 4
NUM_PROMPTS = 5
LONGEST = 44
PATIENCE_S = 60.0
PAUSE_S = 0.01
_MARKS = count(1_000_000)
_MEDIA: tuple[tuple[str, Locality | None], ...] = (
    (MEDIUM_DEVICE, None),
    (MEDIUM_HOST, None),
    (MEDIUM_STORAGE, "LOCAL"),
)
_WORKERS = count(1)


@pytest.fixture(scope="module")
def indexer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Indexer]:
    with running_indexer(tmp_path_factory.mktemp("dynamo") / "log") as indexer:
        yield indexer


class Replica:
    """A simulated engine on tiers that outlive it, whose events the indexer follows, also over a restart.

    Args:
        indexer: the indexer.
        blocks_per_chunk: blocks that are offloaded together.
        wire: how events are written.
        salted: whether salted blocks are published, too.
    """

    def __init__(self, indexer: Indexer, blocks_per_chunk: int, wire: str, *, salted: bool = False) -> None:
        disk = TierOptions(name="disk", locality="LOCAL", is_listed=True)
        self.tiering = SimulatedTiering(24, [disk], blocks_per_chunk=blocks_per_chunk)
        self.worker = next(_WORKERS)
        self.indexer = indexer
        self._wire = wire
        self._salted = salted
        self.blocks_per_chunk = blocks_per_chunk
        self.endpoints = ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
        self.start()
        self.endpoints = (self.publisher.endpoint, self.publisher.replay_endpoint or "")
        indexer.register(self.worker, *self.endpoints, BLOCK_TOKENS)

    def start(self) -> None:
        """Start the engine."""
        self.engine: SimulatedEngine = make_engine(
            self.tiering, num_blocks=40, emit_events=True, emit_salted_events=self._salted
        )
        self.publisher = ZmqEventPublisher(
            self.endpoints[0], self.engine.layout.groups, replay_endpoint=self.endpoints[1], wire=self._wire
        )

    def restart(self) -> None:
        """Lose device and host memory."""
        self.publisher.close()
        self.start()

    def stop(self) -> None:
        """End the engine for good."""
        self.indexer.forget(self.worker)
        self.publisher.close()

    def settle(self) -> None:
        """Let all work end."""
        self.engine.run()
        self.tiering.manager.check()

    def tell(self) -> None:
        """Publish what has happened, until the indexer knows it: marks in the same stream show how far it is.

        It takes in each medium by itself, so each has its mark.
        """
        self.publisher.publish(self.engine.scheduler.take_events())
        deadline = time.monotonic() + PATIENCE_S  # after a restart, it takes the indexer a moment to connect again
        while time.monotonic() < deadline:
            marks = [(*medium, next(_MARKS)) for medium in _MEDIA]
            self.publisher.publish(
                [
                    BlockStored(
                        (_hash_of(mark),), None, (mark,) * BLOCK_TOKENS, BLOCK_TOKENS, 0, medium, locality=locality
                    )
                    for medium, locality, mark in marks
                ]
            )
            are_heard = [max(self.indexer.find((mark,) * BLOCK_TOKENS, self.worker)) > 0 for _, _, mark in marks]
            self.publisher.publish(
                [BlockRemoved((_hash_of(mark),), 0, medium, locality) for medium, locality, mark in marks]
            )
            if all(are_heard):
                return
            time.sleep(PAUSE_S)
        pytest.fail("the indexer hears nothing")

    def can_find(self, token_ids: list[int], salt: str | None = None) -> Found:
        """How many leading tokens the engine itself can find: on the device, then in host memory, then on disk."""
        hashes: list[bytes] = []
        extend_hashes(hashes, token_ids, BLOCK_TOKENS, root_hash(salt=salt))
        pool, per_chunk = self.engine.scheduler.kv.pool, self.blocks_per_chunk
        on_device = {held[0] for held in pool.contents(range(1, pool.num_blocks)) if held is not None}
        num_device = len(list(takewhile(on_device.__contains__, hashes)))
        keys = [offload_key(hashes[end - 1], 0) for end in range(per_chunk, len(hashes) + 1, per_chunk)]
        in_host = [state == READY for state in self.tiering.manager.lookup(keys)]
        (disk,), ((medium,),) = self.tiering.lower.tiers, self.tiering.media
        on_disk = [disk.is_readable and name in medium.chunks for name in self.tiering.lower.tasks.names(keys)]
        num_host = end_of_run(in_host, num_device, per_chunk)
        num_disk = end_of_run(on_disk, num_host, per_chunk)
        return Found(num_device * BLOCK_TOKENS, num_host * BLOCK_TOKENS, num_disk * BLOCK_TOKENS)


def _hash_of(mark: int) -> bytes:
    return mark.to_bytes(32, "big")


def compare(replica: Replica, indexer: Indexer) -> None:
    """Ask for every prompt. Of chunks of several blocks, it may find a part that cannot be loaded alone."""
    replica.settle()
    replica.tell()
    for seed in range(NUM_PROMPTS):
        tokens = prompt(seed, LONGEST)
        found, expected = indexer.find(tokens, replica.worker), replica.can_find(tokens)
        too_many = [count - right for count, right in zip(found, expected, strict=True)]
        allowed = BLOCK_TOKENS * (replica.blocks_per_chunk - 1)
        assert too_many[0] == 0 and 0 <= min(too_many) <= max(too_many) <= allowed, (seed, found, expected)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@settings(max_examples=25, phases=(Phase.explicit, Phase.generate))  # each example takes a second: none is made smaller
@given(data=st.data())
def test_it_finds_what_the_engine_can_find(indexer: Indexer, blocks_per_chunk: int, data: st.DataObject) -> None:
    """Traffic with evictions, also from the disk, aborts, failures of the disk, restarts and resets."""
    replica = Replica(indexer, blocks_per_chunk, "map")
    try:
        for at in range(data.draw(st.integers(2, 8))):
            tokens = prompt(data.draw(st.integers(0, NUM_PROMPTS - 1)), data.draw(st.integers(1, LONGEST)))
            replica.engine.add(f"r{at}", tokens, 3, salt=data.draw(st.sampled_from((None, None, "mine"))))
            for _ in range(data.draw(st.integers(0, 4))):
                if replica.engine.scheduler.has_work():
                    replica.engine.step()
            what = data.draw(
                st.sampled_from(("nothing", "abort", "evict", "disk evicts", "reset", "restart", "fail", "lose disk"))
            )
            disturb(replica, what, f"r{at}")
            if data.draw(st.booleans()):
                compare(replica, indexer)
        compare(replica, indexer)
    finally:
        replica.stop()


def disturb(replica: Replica, what: str, request_id: str) -> None:
    """Let something happen to a replica."""
    (queue,), ((medium,),) = replica.tiering.all_queues(), replica.tiering.media
    match what:
        case "abort":
            replica.engine.abort(request_id)
        case "evict":
            replica.settle()
            evict_everything(replica.engine)
        case "reset":
            replica.settle()
            assert replica.engine.scheduler.reset_cache()
        case "restart":
            replica.settle()
            replica.restart()
        case "disk evicts":  # the ends of prefixes first
            for key in list(medium.chunks)[: -len(medium.chunks) // 2 : -1]:
                medium.lose(key)
            replica.engine.step()  # workers tell what was lost with the next step, which an idle engine does not make
        case "fail":
            fail_jobs(queue, medium)
        case "lose disk":  # it is suspended; until the next engine, nobody can load from it
            replica.settle()
            replica.tiering.media[0][0].is_gone = True
            for at, number, salt in product(
                range(4), range(NUM_PROMPTS), (None, "mine")
            ):  # who looks for chunks notices it
                lose_host_memory(replica.engine, replica.tiering)
                replica.engine.add(f"{request_id} {at} {number} {salt}", prompt(number, LONGEST), 1, salt=salt)
                replica.settle()
            compare(replica, replica.indexer)
            replica.tiering.media[0][0].is_gone = False
            replica.restart()


def fail_jobs(queue: HeldQueue, medium: HeldMedium) -> None:
    """Let loads and stores fail. What they have written all the same is gone: nobody would know of it."""
    for job in [job for job in queue.pending if job.kind in (JobKind.LOAD, JobKind.STORE)]:
        before = set(medium.chunks)
        queue.complete(job, JobStatus.FAILED)
        for key in medium.chunks.keys() - before:
            del medium.chunks[key]


def test_a_disk_is_found_when_the_device_has_lost_what_it_had(indexer: Indexer) -> None:
    """That host memory and disk are really compared: all three have something of a prompt."""
    replica = Replica(indexer, 1, "map")
    try:
        replica.engine.add("long", prompt(0, LONGEST), 1)
        replica.settle()
        evict_everything(replica.engine)
        for at in range(1, 4):
            replica.engine.add(f"r{at}", prompt(at, 36), 1)
            replica.settle()
        evict_everything(replica.engine)
        replica.engine.add("again", prompt(0, 12), 1)
        compare(replica, indexer)
        found = indexer.find(prompt(0, LONGEST), replica.worker)
        assert 0 < found.device < found.disk == LONGEST
        replica.restart()
        compare(replica, indexer)
        assert indexer.find(prompt(0, LONGEST), replica.worker) == Found(0, 0, LONGEST), "nobody has asked for it yet"
        replica.engine.add("after", prompt(0, LONGEST), 1)
        compare(replica, indexer)
        assert indexer.find(prompt(0, LONGEST), replica.worker).device == LONGEST
    finally:
        replica.stop()


def test_events_as_lists_of_values_are_read_as_well(indexer: Indexer) -> None:
    replica = Replica(indexer, 2, "array")
    try:
        replica.engine.add("r", prompt(0, LONGEST), 1)
        compare(replica, indexer)
        assert indexer.find(prompt(0, LONGEST), replica.worker).device == LONGEST
    finally:
        replica.stop()


@pytest.mark.parametrize("is_published", [False, True])
def test_salted_blocks_are_found_on_device_host_and_disk_only_if_they_are_to_be_published(
    indexer: Indexer, is_published: bool
) -> None:
    """The indexer knows of no salts: whoever asks for the same tokens finds them."""
    replica = Replica(indexer, 1, "map", salted=is_published)
    try:
        replica.engine.add("salted", prompt(0, LONGEST), 1, salt="mine")
        for expected in (Found(LONGEST, LONGEST, LONGEST), Found(0, LONGEST, LONGEST), Found(0, 0, LONGEST)):
            replica.settle()
            replica.tell()
            assert replica.can_find(prompt(0, LONGEST), "mine") == expected
            found = indexer.find(prompt(0, LONGEST), replica.worker)
            assert found == (expected if is_published else Found(0, 0, 0))
            if expected.device:
                evict_everything(replica.engine)
            else:
                replica.restart()
    finally:
        replica.stop()
