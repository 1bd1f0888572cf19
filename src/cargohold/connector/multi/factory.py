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
    """Satisfies ``cargohold.protocol.KVConnectorFactory``.

    Attributes:
        children: factories of the connectors, most preferred first.
    """

    children: tuple[KVConnectorFactory, ...]

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> MultiConnectorScheduler:
        """The scheduler side. Raises what a child raises that cannot work in this environment; none is left open."""
        with _all_or_none(child.make_scheduler_side(environment) for child in self.children) as sides:
            return MultiConnectorScheduler(sides, environment)

    def make_worker_side(self, environment: WorkerEnvironment) -> MultiConnectorWorker:
        """The worker side. Raises what a child raises that cannot be opened; none is left open."""
        with _all_or_none(child.make_worker_side(environment) for child in self.children) as sides:
            return MultiConnectorWorker(sides)


@contextmanager
def _all_or_none(children: Iterable[Side]) -> Iterator[list[Side]]:
    """The sides, as they are made; whatever is raised until the end of the block shuts them down."""
    with ExitStack() as on_failure:
        sides: list[Side] = []
        for side in children:
            on_failure.callback(side.shutdown)
            sides.append(side)
        yield sides
        on_failure.pop_all()
