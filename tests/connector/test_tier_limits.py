"""Between the scheduler side and the queues of workers: no job is refused, and health is reported."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from cargohold.cache import make_manager
from cargohold.connector.offloading import OffloadConfig
from cargohold.connector.offloading.factory import tier_options
from cargohold.lab.simulation import VirtualClock, simulated_layout
from cargohold.protocol import ServedModel, TransferOutcome, metrics
from cargohold.tiers import BreakerState, DiskTierConfig, JobKind, QueueConfig, TierHealth, TierQueue
from cargohold.tiers.messages import TierCommand, TierReport
from cargohold.tiers.scheduler_side import LowerTiers, TieringConfig
from cargohold.tiers.worker import TierWorker
from tests.tiers.scheduler_side.tiering_manager import TieringManager
from tests.wrapped_tiers import FaultyTier, MemoryTier

WAIT_S = 30.0  # a bound on hangs, not a measure
NUM_SLOTS = 8192


def key(number: int) -> bytes:
    return number.to_bytes(36, "little")


class Tiered:
    """Host memory of many small chunks, and a disk that carries out nothing until it is told to."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        layout = replace(simulated_layout(10), model=ServedModel("name", "path", "float32"))
        host = make_manager("lru", NUM_SLOTS)
        disk = DiskTierConfig(directory=str(Path("unused")), max_bytes="1GiB")
        options = tier_options(OffloadConfig(host_bytes="1MiB", tiers=[disk]), layout)
        self.lower = LowerTiers(host, options, self.clock, TieringConfig())
        self.manager = TieringManager(host, self.lower)
        self.opened = threading.Event()
        medium = FaultyTier(MemoryTier(8), self._wait)
        self.queue = TierQueue(medium, self.clock, QueueConfig(num_threads=2))
        self.worker = TierWorker({"disk": self.queue}, np.zeros((NUM_SLOTS, 8), np.uint8), 1, self.clock)
        self._ids = itertools.count(1)

    def _wait(self, _: str) -> None:
        assert self.opened.wait(WAIT_S)

    def step(self) -> None:
        """Hand out what is to be done, and take in what was done."""
        for command in self.lower.take_commands(lambda: next(self._ids)):
            self.worker.start(command)
        outcomes = self.worker.poll()
        report = self.worker.take_report()
        for job_id, outcome in outcomes.items():
            assert outcome is TransferOutcome.DONE, "it was refused"
            assert report is not None
            self.lower.note_report({job_id: report.answers[job_id]}, {})
            assert self.lower.end(job_id, outcome)

    def finish(self) -> None:
        self.opened.set()
        for _ in range(1000):
            self.step()
            assert self.queue.drain(WAIT_S)


@contextmanager
def tiered() -> Iterator[Tiered]:
    setup = Tiered()
    try:
        yield setup
    finally:
        setup.opened.set()
        setup.queue.shutdown()


def test_many_small_chunks_are_written_without_one_being_refused() -> None:
    """Found by reading: a queue takes 1024, of which 256 MiB can be many more; after three refusals the disk was left alone."""
    with tiered() as setup:
        for first in range(0, 4096, 512):
            keys = [key(first + at) for at in range(512)]
            handle = setup.manager.prepare_store(keys, key(first - 1) if first else None)
            handle.commit()
        setup.step()
        setup.finish()
        assert setup.queue.health() == TierHealth()
        assert setup.lower.take_stats()[metrics.STORED.of("disk")] == 4096


def test_many_waiting_prompts_are_asked_for_without_one_being_refused() -> None:
    """Found by reading: with 70 long prompts waiting, the tier was left alone, and what it had was taken for absent."""
    with tiered() as setup:
        prompts = [[key(1000 * number + at) for at in range(1000)] for number in range(70)]
        probes = [probe for prompt in prompts for probe in setup.lower.probe(prompt)]
        assert len(probes) == 70
        setup.step()
        setup.finish()
        assert all(probe.has_ended for probe in probes)
        assert setup.queue.health() == TierHealth()


def test_a_worker_reports_the_health_of_a_tier_when_it_changes_and_only_then() -> None:
    clock = VirtualClock()
    trouble: list[str | None] = ["cable unplugged"]
    queue = TierQueue(FaultyTier(MemoryTier(8), lambda _: trouble[0]), clock, QueueConfig(num_threads=1))
    worker = TierWorker({"disk": queue}, np.zeros((NUM_SLOTS, 8), np.uint8), 1, clock, rank=3)
    healths = []

    def probe(job_id: int) -> None:
        worker.start(TierCommand(job_id, 0, JobKind.PROBE, (key(job_id),), (), (), 10.0))
        assert queue.drain(WAIT_S)
        assert set(worker.poll()) == {job_id}
        report = worker.take_report()
        assert report is not None
        healths.append(report.health)

    for job_id in range(3):
        probe(job_id)
    suspended = {(3, 0): TierHealth(look_up=BreakerState.OPEN, reason="cable unplugged", retry_s=1.0)}
    assert healths == [{}, {}, suspended]
    assert worker.take_report() is None
    clock.advance(1.0)
    report = worker.take_report()
    assert report is not None and report.health[3, 0].look_up is BreakerState.HALF_OPEN
    trouble[0] = None
    probe(3)
    assert healths[-1] == {(3, 0): TierHealth()}
    stats = worker.take_stats()
    assert (stats[metrics.TIER_FAILURES.of("disk")], stats[metrics.SUSPENSIONS.of("disk")]) == (3, 1)
    worker.shutdown()


def test_reports_of_workers_are_merged_so_that_none_is_lost() -> None:
    open_writes = TierHealth(write=BreakerState.OPEN, reason="full")
    first = TierReport({1: (bytes([1, 1, 0]), 1), 2: (bytes([1]), 1)}, {(0, 0): open_writes})
    second = TierReport({1: (bytes([1, 0, 1]), 2)}, {(1, 0): TierHealth()})
    for merged in (first.aggregate(second), second.aggregate(first)):
        assert merged.answers == {1: (bytes([1, 0, 0]), 3), 2: (bytes([1]), 1)}
        assert merged.health == {(0, 0): open_writes, (1, 0): TierHealth()}
