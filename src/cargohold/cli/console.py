"""Where the command writes: answers to standard output, progress and remarks to standard error."""

from __future__ import annotations

from rich.console import Console

errors = Console(stderr=True)


class Answers(Console):
    """Standard output. A reader that has seen enough ends the command as quietly as any other that pipes."""

    def on_broken_pipe(self) -> None:
        """Let the error pass, for the app to handle."""
        raise  # noqa: PLE0704  # called by rich while it handles the error
