"""Makes both sides of a composed connector."""

from __future__ import annotations

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
        """The scheduler side. Raises what a child raises that cannot work in this environment."""
        return MultiConnectorScheduler([child.make_scheduler_side(environment) for child in self.children], environment)

    def make_worker_side(self, environment: WorkerEnvironment) -> MultiConnectorWorker:
        """The worker side."""
        return MultiConnectorWorker([child.make_worker_side(environment) for child in self.children])
