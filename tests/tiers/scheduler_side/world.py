"""A manager with lower tiers, for tests: workers answer what they are told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cargohold.cache import ChunksRemoved, ChunksStored, OffloadManager, make_manager
from cargohold.lab.simulation import VirtualClock
from cargohold.protocol import TransferOutcome
from cargohold.tiers import Answer, BreakerConfig, BreakerState, JobKind, JobStatus, LoadOutcome, StoreOutcome, TierJob
from cargohold.tiers.health import MediumHealth
from cargohold.tiers.messages import TierCommand
from cargohold.tiers.scheduler_side import (
    UNKNOWN,
    Admission,
    AllChunksRemoved,
    Chain,
    LowerTiers,
    TieringConfig,
    TierOptions,
    WriteMode,
)
from tests.tiers.scheduler_side.tiering_manager import TieringManager

NUM_CHUNKS = 12
STATUSES = {
    TransferOutcome.DONE: JobStatus.DONE,
    TransferOutcome.FAILED: JobStatus.FAILED,
    TransferOutcome.ABANDONED: JobStatus.EXPIRED,
}
ANSWERS: dict[JobKind, tuple[Answer, Answer]] = {
    JobKind.PROBE: (False, True),
    JobKind.TOUCH: (False, True),
    JobKind.LOAD: (LoadOutcome.ABSENT, LoadOutcome.LOADED),
    JobKind.STORE: (StoreOutcome.REFUSED, StoreOutcome.STORED),
}


def key_of(prefix: int, at: int) -> bytes:
    return bytes([prefix, at]) * 16 + bytes(4)


class World:
    """A manager, and workers that are told what to answer."""

    def __init__(
        self,
        capacity: int = 8,
        num_tiers: int = 1,
        num_workers: int = 1,
        *,
        max_inflight_chunks: int = 64,
        max_chunks: int | None = None,
        max_daily_chunks: int | None = None,
        chunk_parts: Sequence[float] = (),
        admission: Admission = Admission.ALL,
        write_mode: WriteMode = WriteMode.THROUGH,
        has_index: bool = True,
        max_asked_chunks: int = 65536,
        num_asked_at_once: int | None = None,
        host: OffloadManager | None = None,
        local_hashes: bytes = b"",
    ) -> None:
        self.clock = VirtualClock()
        self.epochs: Iterator[bytes] = (bytes([at]) * 16 for at in range(1, 256))
        self.host = make_manager("lru", capacity) if host is None else host
        self.lower = LowerTiers(
            self.host,
            [
                TierOptions(
                    name=f"tier{at}",
                    admission=admission,
                    write_mode=write_mode,
                    max_inflight_chunks=max_inflight_chunks,
                    max_chunks=max_chunks,
                    max_daily_chunks=max_daily_chunks,
                    chunk_parts=chunk_parts,
                    has_index=has_index,
                    max_asked_chunks=max_asked_chunks,
                    num_asked_at_once=num_asked_at_once,
                )
                for at in range(num_tiers)
            ],
            self.clock,
            TieringConfig(
                num_workers=num_workers,
                restore_timeout_s=2.0,
                store_timeout_s=5.0,
                record_events=True,
                local_hashes=local_hashes,
            ),
            new_epoch=lambda: next(self.epochs),
        )
        self.lower.clock.begin_step()  # so that time passes
        self.manager = TieringManager(self.host, self.lower)
        self.ids: Iterator[int] = iter(range(1, 10**9))
        self.running: dict[int, TierCommand] = {}
        self.jobs: dict[int, TierJob] = {}
        self.media = [
            MediumHealth(tier.name, self.clock, BreakerConfig(), has_index=has_index) for tier in self.lower.tiers
        ]

    def step(self) -> list[TierCommand]:
        self.report()
        commands = self.lower.take_commands(lambda: next(self.ids))
        self.running |= {command.job_id: command for command in commands}
        for command in commands:
            assert self.media[command.tier].admit(command.kind), "a job that workers would refuse"
            job = self.jobs[command.job_id] = TierJob(command.job_id, command.kind, command.keys, 0.0)
            job.queued_at = self.clock()
        return list(commands)

    def cancelled(self) -> list[int]:
        """Return the jobs that workers are to cancel now."""
        return [command.job_id for command in self.lower.tasks.take_cancelled()]

    def wait(self, seconds: float) -> None:
        """Let time pass in which workers report."""
        self.clock.advance(seconds)
        self.report()

    def report(self) -> None:
        """Let a worker report the health of the tiers, as it does with every step."""
        for at, medium in enumerate(self.media):
            if not self.lower.tiers[at].is_off and medium.report() != self.lower.tiers[at].health:
                self.lower.note_report({}, {(0, at): medium.report()})

    def end(
        self, command: TierCommand, answers: Sequence[bool | Answer], outcome: TransferOutcome = TransferOutcome.DONE
    ) -> None:
        """Let all workers answer for each chunk of a job; of one that is not done, ``False`` says that it was not tried."""
        assert len(answers) == len(command.keys)
        del self.running[command.job_id]
        verdicts = self._judge(command, answers, outcome)
        self.report()
        self.lower.note_report({command.job_id: (verdicts, self.lower.config.num_workers)}, {})
        assert self.lower.end(command.job_id, outcome)

    def _judge(self, command: TierCommand, answers: Sequence[bool | Answer], outcome: TransferOutcome) -> bytes:
        job, medium = self.jobs.pop(command.job_id), self.media[command.tier]
        task = self.lower.tasks.get(command.job_id)
        job.status = STATUSES[outcome] if task is not None and not task.is_cancelled else JobStatus.CANCELLED
        for at, is_good in enumerate(answers):
            if is_good or job.status is JobStatus.DONE:
                answer = ANSWERS[command.kind][is_good] if isinstance(is_good, bool) else is_good
                job.answers[at] = answer
                medium.note_answers(job, [answer])
        medium.note_end(job)
        return job.verdicts

    def verdict(self, command: TierCommand, answer: StoreOutcome) -> bytes:
        """What one worker says whose tier answers the same for all chunks of a store."""
        job = TierJob(command.job_id, command.kind, command.keys, 0.0)
        job.answers = [answer] * len(command.keys)
        return job.verdicts

    def keep(self, keys: list[bytes], parent: bytes | None = None) -> None:
        handle = self.manager.prepare_store(keys, parent)
        handle.commit()

    def learn(self, keys: list[bytes], tier: int = 0) -> None:
        """Let a tier say that it has these chunks."""
        self.lower.probe(keys)
        for _ in range(tier + 1):
            for command in self.step():
                if command.kind is JobKind.PROBE:
                    self.end(command, [command.tier == tier] * len(command.keys))
            self.lower.probe([key for key in keys if self.lower.lookup([key])[0] == UNKNOWN])


KEYS = [key_of(0, at) for at in range(NUM_CHUNKS)]


def follow(world: World, known: set[bytes]) -> set[bytes]:
    """An index that was built from events, with what became of it since."""
    for event in world.lower.tiers[0].take_events():
        match event:
            case ChunksStored():
                known = known.union(event.keys)
            case ChunksRemoved():
                known = known.difference(event.keys)
            case AllChunksRemoved():
                known = set()
    return known


def written(world: World, keys: list[bytes]) -> None:
    """The tier has these chunks, and so has host memory."""
    world.keep(keys)
    (store,) = world.step()
    world.end(store, [True] * len(keys))


def breaker_state(world: World) -> BreakerState:
    world.report()
    return world.lower.tiers[0].health.worst


def fail_loads(world: World) -> None:
    """Let three loads fail."""
    for _ in range(3):
        world.learn(KEYS[:1])
        fail_load(world, KEYS[0])
    assert breaker_state(world) is BreakerState.OPEN


def fail_load(world: World, key: bytes) -> None:
    """Let a load of one chunk fail."""
    fetch = world.lower.fetches.begin([Chain(0, [key], None)], ())
    assert fetch is not None
    (load,) = world.step()
    world.end(load, [False], TransferOutcome.FAILED)
    fetch.release()
