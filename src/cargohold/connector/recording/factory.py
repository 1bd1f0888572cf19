"""Makes a connector that records."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cargohold.connector.recording.scheduler import RecordingScheduler
from cargohold.connector.recording.trace_file import TraceFile
from cargohold.errors import ConfigError
from cargohold.protocol import (
    KVConnectorFactory,
    KVConnectorScheduler,
    KVConnectorWorker,
    SchedulerEnvironment,
    WorkerEnvironment,
)


@dataclass(frozen=True, slots=True)
class RecordingFactory:
    """Makes a connector that records. Satisfies ``cargohold.protocol.KVConnectorFactory``.

    Raises ``ConfigError`` if the path is empty, the file exists already, or its directory does not.

    Attributes:
        inner: makes the connector that does the work; ``NULL_CONNECTOR`` for none.
        file: path of the trace; ``{pid}`` in it stands for the process's id, for engines with several replicas. The file must
            not exist yet.
    """

    inner: KVConnectorFactory
    file: str

    def __post_init__(self) -> None:
        if not self.file:
            raise ConfigError("record", self.file, "it must be the path of a file to write")
        path = self._path()
        if path.is_dir():
            raise ConfigError("record", self.file, "it is a directory; give the path of a file to write")
        if path.exists():
            raise ConfigError("record", self.file, "there is such a file already; traces are not overwritten")
        if not path.parent.is_dir():
            raise ConfigError("record", self.file, "there is no such directory")

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> KVConnectorScheduler:
        """Make the inner scheduler side and a wrapper that records it. Raises ``ConfigError`` if the file cannot be created."""
        inner = self.inner.make_scheduler_side(environment)
        try:
            file = TraceFile(self._path())
        except BaseException:
            inner.shutdown()
            raise
        return RecordingScheduler(inner, file, environment)

    def make_worker_side(self, environment: WorkerEnvironment) -> KVConnectorWorker:
        """Make the inner worker side, where there is nothing to record."""
        return self.inner.make_worker_side(environment)

    def _path(self) -> Path:
        return Path(self.file.replace("{pid}", str(os.getpid())))
