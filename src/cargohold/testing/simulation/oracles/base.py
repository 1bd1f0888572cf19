"""Base class of oracles, which check something that must always hold."""

from __future__ import annotations

from typing import NoReturn

from cargohold.engine.core.scheduler import RequestUpdate
from cargohold.engine.core.step import SchedulerStep, StepOutput


class OracleError(AssertionError):
    """Something that must always hold does not.

    Attributes:
        oracle: name of the oracle that found it.
    """

    def __init__(self, oracle: str, message: str) -> None:
        super().__init__(f"{oracle}: {message}")
        self.oracle = oracle


class Oracle:
    """Watches one engine replica. The defaults watch nothing.

    Attributes:
        name: what it is called in reports.
    """

    name = "oracle"

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """Cheap checks, after every step."""

    def on_update(self, update: RequestUpdate) -> None:
        """Learn what has become of a request."""

    def inspect(self) -> None:
        """Thorough checks, which walk everything; made now and then."""

    def at_end(self) -> None:
        """Checks when all work is done."""

    def require(self, holds: bool, message: str) -> None:
        """Raise ``OracleError`` unless ``holds``. In checks after every step, use ``fail``, which saves making the message."""
        if not holds:
            self.fail(message)

    def fail(self, message: str) -> NoReturn:
        """Raise ``OracleError``."""
        raise OracleError(self.name, message)
