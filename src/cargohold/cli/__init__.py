"""The cargohold command: one app, a subcommand per tool. Imports nothing that takes time."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any, Final

VLLM_FLAGS: Final = "vllm-flags"
VLLM_BENCH: Final = "vllm-bench"


def main() -> int:
    """Run the command line.

    Returns:
        The exit status: 0; 1 if something failed; 2 for impossible requests; 130 after Ctrl-C, and 143 after SIGTERM.
    """
    from cargohold.cli.signals import failed, interrupted, termination  # noqa: PLC0415  # not names of this package

    with termination.handled():
        # Modules that take time to import are imported here, where Ctrl-C is answered as at any later moment.
        try:
            return _flushed_run()
        except KeyboardInterrupt:  # before a subcommand has begun
            return interrupted()
        except OSError as error:
            return failed(error)


def _flushed_run() -> int:
    """Run the command line to the end of its output, whose failures the interpreter would tell in words of its own."""
    try:
        return _run()
    finally:
        if sys.stdout is not None:  # the program that started this process may have closed it
            sys.stdout.flush()


def _run() -> int:
    if sys.argv[1:2] in ([VLLM_FLAGS], [VLLM_BENCH]):  # which need nothing of what the others need
        from cargohold.cli import vllm_flags  # noqa: PLC0415  # slow to import

        return (vllm_flags.main if sys.argv[1] == VLLM_FLAGS else vllm_flags.bench)(sys.argv[2:])
    if missing := [name for name in ("packaging", "rich", "typer") if find_spec(name) is None]:
        names = ", ".join(missing)
        sys.stderr.write(
            f"cargohold: all commands but {VLLM_FLAGS} and {VLLM_BENCH} need {names}: pip install 'cargohold[cli]'\n"
        )
        return 2

    import typer  # noqa: PLC0415  # slow to import

    from cargohold.cli import (  # noqa: PLC0415  # they join
        cache,  # noqa: F401
        demo,  # noqa: F401
        doctor,  # noqa: F401
        replay,  # noqa: F401
        run,  # noqa: F401
        simulate,  # noqa: F401
        top,  # noqa: F401
    )
    from cargohold.cli.app import EXIT_USAGE, app  # noqa: PLC0415  # slow to import

    # Everything that is wrong with a command line is raised as this class, the parent of ``BadParameter``, which is private.
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]
    try:
        return int(app(standalone_mode=False, prog_name="cargohold") or 0)
    except usage_error as error:
        if getattr(error, "message", None) != "" or hasattr(error, "param"):  # otherwise the help has been shown
            typer.echo(_describe(error), err=True)
        return EXIT_USAGE
    except typer.Abort as abort:
        raise KeyboardInterrupt from abort


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
