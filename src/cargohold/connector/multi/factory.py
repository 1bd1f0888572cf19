"""Makes both sides of a composed connector."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from cargohold.connector.multi.scheduler import MultiConnectorScheduler
from cargohold.connector.multi.worker import MultiConnectorWorker
from cargohold.protocol import (
    KVConnectorFactory,
    KVConnectorScheduler,
    KVConnectorWorker,
    SchedulerEnvironment,
    WorkerEnvironment,
)

Side = TypeVar("Side", KVConnectorScheduler, KVConnectorWorker)


@dataclass(frozen=True, slots=True)
class MultiConnectorFactory:
    """Makes a composed connector. Satisfies ``cargohold.protocol.KVConnectorFactory``.

    Attributes:
        children: factories of the connectors, most preferred first.
    """

    children: tuple[KVConnectorFactory, ...]

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> MultiConnectorScheduler:
        """Make the scheduler side. Raises the error of a child that cannot work in this environment; no child is left open."""
        with _all_or_none(child.make_scheduler_side(environment) for child in self.children) as sides:
            return MultiConnectorScheduler(sides, environment)

    def make_worker_side(self, environment: WorkerEnvironment) -> MultiConnectorWorker:
        """Make the worker side. Raises the error of a child that cannot be opened; no child is left open."""
        with _all_or_none(child.make_worker_side(environment) for child in self.children) as sides:
            return MultiConnectorWorker(sides)


@contextmanager
def _all_or_none(children: Iterable[Side]) -> Iterator[list[Side]]:
    """Make the sides and yield them; if anything raises, then or inside the ``with``, shut down those that were made."""
    with ExitStack() as on_failure:
        sides: list[Side] = []
        for side in children:
            on_failure.callback(side.shutdown)
            sides.append(side)
        yield sides
        on_failure.pop_all()
