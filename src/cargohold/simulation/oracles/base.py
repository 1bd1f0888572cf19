"""What an oracle is: something that must hold, whatever happens."""

from __future__ import annotations

from typing import NoReturn

from cargohold.engine.core.step import SchedulerStep, StepOutput


class OracleError(AssertionError):
    """Something that must always hold does not.

    Attributes:
        oracle: which one found it.
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

    def inspect(self) -> None:
        """Thorough checks, which walk everything; now and then."""

    def at_end(self) -> None:
        """All work is done."""

    def require(self, holds: bool, message: str) -> None:
        """Raise ``OracleError`` unless ``holds``. In checks after every step, ``fail`` saves making messages for nobody."""
        if not holds:
            self.fail(message)

    def fail(self, message: str) -> NoReturn:
        """Raise ``OracleError``."""
        raise OracleError(self.name, message)
