"""One command, a subcommand per tool."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from cargohold.errors import CargoholdError

app = typer.Typer(
    name="cargohold",
    help="Keeps the KV cache that an LLM engine has no room for, and puts it back when the prefix returns.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line. Errors that we raise on purpose are one line, without a traceback."""
    from cargohold.cli import chat, demo, run  # noqa: F401, PLC0415  # they add themselves to the app

    try:
        app(standalone_mode=False)
    except CargoholdError as error:
        typer.echo(f"cargohold: {error}", err=True)
        sys.exit(EXIT_USAGE)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.exit(0)  # the reader has seen enough


@app.callback()
def configure(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the engine and its connector do.")] = False,
) -> None:
    """Set up logging; the docstring of the app is its help."""
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
