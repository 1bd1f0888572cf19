"""Messages between the two sides, which travel inside vLLM's own messages.

vLLM's worker metadata carries each rank's report as a whole, and vLLM merges them by calling ``aggregate``. Our own aggregator
on the scheduler side then counts which ranks have reported a job.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cargohold.integrations.vllm.compat import KVConnectorMetadata, KVConnectorWorkerMetadata
from cargohold.protocol import ConnectorMetadata, EmptyMetadata, KVConnectorOutput


@dataclass(frozen=True)
class StepMessage(KVConnectorMetadata):  # type: ignore[misc]  # vLLM's class, or an inert one
    """Scheduler side to workers, once a step.

    Attributes:
        inner: the connector's own message.
        new_loads: requests whose load starts in this step, with the blocks that it fills.
        new_sends: requests that ended, whose blocks the connector keeps.
        synchronous: those of the new loads that end within this step.
        stop: the connector was turned off: let its transfers end and do without it.
    """

    inner: ConnectorMetadata = field(default_factory=EmptyMetadata)
    new_loads: dict[str, tuple[int, ...]] = field(default_factory=dict)
    new_sends: tuple[str, ...] = ()
    synchronous: tuple[str, ...] = ()
    stop: bool = False


@dataclass(frozen=True)
class RankReport:
    """One rank's report after a step.

    Attributes:
        output: the connector's own report.
        failed_loads: requests whose load ended in failure on this rank.
        error: the rule that the connector's worker side broke; it has stopped.
        stopped: whether it stopped in this step as it was told to.
    """

    output: KVConnectorOutput = field(default_factory=KVConnectorOutput)
    failed_loads: frozenset[str] = frozenset()
    error: str | None = None
    stopped: bool = False


@dataclass(frozen=True)
class WorkerMessage(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM's class, or an inert one
    """Workers to scheduler side.

    Attributes:
        reports: by rank; ranks with nothing to say are left out.
    """

    reports: dict[int, RankReport]

    def aggregate(self, other: WorkerMessage) -> WorkerMessage:
        """Merge the messages of two workers, whose reports are of different ranks."""
        return WorkerMessage({**self.reports, **other.reports})
