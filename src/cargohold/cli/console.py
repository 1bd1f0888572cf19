"""Consoles of the command: answers go to standard output, progress and remarks to standard error."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

errors = Console(stderr=True)

_LEAST_WIDTH: Final = 80
_ANY_WIDTH: Final = 1000


class Answers(Console):
    """Standard output. When its reader closes the pipe, the command ends quietly, as other commands do."""

    def print_table(self, table: Table) -> None:
        """Print a table as wide as the terminal, but not so narrow that something would be cut off.

        A number without its last digits is another number, so it is better to let the terminal break lines.
        """
        least = _LEAST_WIDTH
        if all(column.no_wrap for column in table.columns):
            least = Measurement.get(self, self.options.update(max_width=_ANY_WIDTH), table).maximum
        before = self.width
        self.width = max(before, least)
        self.print(table)
        self.width = before

    def on_broken_pipe(self) -> None:
        """Raise the error again, for the app to handle."""
        raise  # noqa: PLE0704  # called by rich while it handles the error
