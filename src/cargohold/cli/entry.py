"""The cargohold command: one app, a subcommand per tool."""

from __future__ import annotations

from typing import Any

import typer

from cargohold.cli.app import EXIT_USAGE, app
from cargohold.cli.signals import interrupted

# Everything that is wrong with a command line is raised as this class, the parent of ``BadParameter``. Typer keeps it private.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main() -> int:
    """Run the command line.

    Returns:
        The exit status: 0; 1 if something failed; 2 for impossible requests; 130 after Ctrl-C, and 143 after SIGTERM.
    """
    try:
        from cargohold.cli import (  # noqa: PLC0415  # they join
            cache,  # noqa: F401
            chat,  # noqa: F401
            demo,  # noqa: F401
            demo_vllm,  # noqa: F401
            doctor,  # noqa: F401
            plan,  # noqa: F401
            replay,  # noqa: F401
            run,  # noqa: F401
            serve,  # noqa: F401
            simulate,  # noqa: F401
            top,  # noqa: F401
        )

        return int(app(standalone_mode=False, prog_name="cargohold") or 0)
    except _UsageError as error:
        if getattr(error, "message", None) != "" or hasattr(error, "param"):  # otherwise the help has been shown
            typer.echo(_describe(error), err=True)
        return EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):  # before a subcommand has begun
        return interrupted()


def _describe(error: Any) -> str:
    """One line for an error in the command line."""
    command = "cargohold" if error.ctx is None else error.ctx.command_path
    message = " ".join((_describe_value(error) or error.format_message()).split())
    return f"{command}: {message.rstrip('.')}; see {command} --help"


def _describe_value(error: Any) -> str | None:
    """What is wrong with a value that pydantic has parsed, which Typer leaves out; ``None`` for other errors."""
    parsed = getattr(error.__cause__, "errors", None)
    if parsed is None or getattr(error, "param", None) is None:
        return None
    found = parsed()[0]
    expected = found["msg"].partition(",")[0].replace("Input should", "it must", 1)
    return f"{error.param.opts[0]}={found['input']!r} is not possible: {expected}"
