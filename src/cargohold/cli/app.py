"""The app that subcommands add themselves to. Determines how they end and what they log."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cargohold import __version__
from cargohold.cli.common import errors
from cargohold.cli.signals import interrupted, termination
from cargohold.errors import CargoholdError, ConfigError, ModelError, RequestError, one_line

EXIT_FAILED = 1
EXIT_USAGE = 2

_OPTIONS_OF_TIERS = {"directory": "disk_dir", "max_bytes": "disk_bytes", "url": "shared_url"}
"""Names on the command line of options of tiers."""
_CONSOLES = ("typer", "click", "rich")
"""Packages that write nothing but answers and remarks."""


class _Commands(TyperGroup):
    """Ends every subcommand the way a shell expects: errors that we raise on purpose are one line, without a traceback."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Read the command line up to the subcommand, and handle Ctrl-C meanwhile, about which Typer would say nothing."""
        try:
            return super().make_context(*args, **options)
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(interrupted()) from interrupt

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except CargoholdError as error:
            if termination.is_asked_for:  # of all our processes, perhaps, and this one has noticed that others are gone
                raise typer.Exit(interrupted()) from error
            typer.echo(f"cargohold: {self._describe(ctx, error)}", err=True)
            is_usage = isinstance(error, ConfigError | ModelError | RequestError)
            raise typer.Exit(EXIT_USAGE if is_usage else EXIT_FAILED) from error
        except KeyboardInterrupt as interrupt:
            errors.show_cursor()  # a spinner that was about to start has hidden it, and does not know yet that it ends
            raise typer.Exit(interrupted()) from interrupt
        except BrokenPipeError as error:
            # The reader has seen enough. What is left in the buffer must go somewhere when the interpreter exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit from error
        except OSError as error:
            # A full disk behind standard output, for one; what is left in the buffer would fail again.
            logging.getLogger(__name__).info("where it failed:", exc_info=error)
            typer.echo(f"cargohold: {_describe_failure(error)}", err=True)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_FAILED) from error

    def _describe(self, ctx: Any, error: CargoholdError) -> str:
        """The error's message, with an option named as it is on the command line."""
        command = self.get_command(ctx, ctx.invoked_subcommand or "")
        if not isinstance(error, ConfigError) or command is None:
            return str(error)
        known = {name for parameter in command.params for name in parameter.opts}
        key = error.key.removeprefix("kv_connector_extra_config.")
        names = (f"--{name.replace('_', '-')}" for name in (key, _OPTIONS_OF_TIERS.get(key, "")))
        option = error.key if error.key.startswith("--") else next((name for name in names if name in known), None)
        if option is None:
            return str(error)
        if error.value is None and option in error.expected:
            return error.expected  # a sentence of its own
        if error.value is None:
            return f"not possible without {option}: {error.expected}"
        # On the command line, an option that is not given has the value None.
        return str(ConfigError(option, error.value, error.expected.removesuffix(", or None")))


def _describe_failure(error: OSError) -> str:
    """The error's message; the system names only files, so standard output has to be named here."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_console = frame.f_globals["__name__"].partition(".")[0] in _CONSOLES
    return f"standard output: {error.strerror}" if is_console and error.strerror else one_line(error)


app = typer.Typer(
    name="cargohold",
    cls=_Commands,
    help="Keeps the KV cache that an LLM engine has no room for, and puts it back when the prefix returns.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cargohold {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def configure(
    context: typer.Context,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the engine and its connector do.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Set up logging; the help of the app is its own."""
    del version
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("cargohold")
    logger.handlers = [handler]  # replaces the handler of an earlier call in the same process
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(EXIT_USAGE)
