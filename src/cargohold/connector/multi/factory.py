"""Makes both sides of a composed connector."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from cargohold.connector.multi.scheduler import MultiConnectorScheduler
from cargohold.connector.multi.worker import MultiConnectorWorker
from cargohold.protocol import KVConnectorFactory, SchedulerEnvironment, WorkerEnvironment


@dataclass(frozen=True, slots=True)
class MultiConnectorFactory:
    """Satisfies ``cargohold.protocol.KVConnectorFactory``.

    Attributes:
        children: factories of the connectors, most preferred first.
    """

    children: tuple[KVConnectorFactory, ...]

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> MultiConnectorScheduler:
        """The scheduler side. Raises what a child raises that cannot work in this environment; none is left open."""
        with ExitStack() as on_failure:
            sides = []
            for child in self.children:
                sides.append(child.make_scheduler_side(environment))
                on_failure.callback(sides[-1].shutdown)
            composed = MultiConnectorScheduler(sides, environment)
            on_failure.pop_all()
        return composed

    def make_worker_side(self, environment: WorkerEnvironment) -> MultiConnectorWorker:
        """The worker side. Raises what a child raises that cannot be opened; none is left open."""
        with ExitStack() as on_failure:
            sides = []
            for child in self.children:
                sides.append(child.make_worker_side(environment))
                on_failure.callback(sides[-1].shutdown)
            composed = MultiConnectorWorker(sides)
            on_failure.pop_all()
        return composed
