"""The app that subcommands add themselves to, and what they share.

The app determines how subcommands end and what they log. They share groups of options, consoles, remarks, loading with a
spinner, and numbers for people.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.core import TyperGroup

from cargohold import __version__
from cargohold.cli.signals import EXIT_FAILED, failed, interrupted, termination
from cargohold.connector.offloading import OffloadConfig
from cargohold.engine.core.request import SamplingParams
from cargohold.engine.model.files import is_kept_converted
from cargohold.engine.outputs import RequestMetrics
from cargohold.errors import CargoholdError, ConfigError, ModelError, RequestError, one_line
from cargohold.llm import LLM
from cargohold.option_values import format_count
from cargohold.options import made
from cargohold.process import made_for_good

errors = Console(stderr=True)

_LEAST_WIDTH: Final = 80
_ANY_WIDTH: Final = 1000


class Answers(Console):
    """Standard output. When its reader closes the pipe, the command ends quietly, as other commands do."""

    def print_table(self, table: Table) -> None:
        """Print a table as wide as the terminal, but not so narrow that something would be cut off.

        A number without its last digits is another number, so it is better to let the terminal break lines. Names that are
        too long are broken: they may differ in their ends only.
        """
        least = _LEAST_WIDTH
        for column in table.columns:
            column.overflow = "fold"
        if all(column.no_wrap for column in table.columns):
            least = Measurement.get(self, self.options.update(max_width=_ANY_WIDTH), table).maximum
        before = self.width
        self.width = max(before, least)
        self.print(table)
        self.width = before

    def on_broken_pipe(self) -> None:
        """Raise the error again, for the app to handle."""
        raise  # noqa: PLE0704  # called by rich while it handles the error


# --- functions that subcommands share ---------------------------------------------------------------------------------


def remark(text: str, style: str = "dim") -> None:
    """Print text that is not part of the answer to standard error. Brackets are not markup, and lines are not broken."""
    errors.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def loaded(model: str, **options: Any) -> Iterator[LLM]:
    """An ``LLM``, loaded behind a spinner, closed at the end."""
    with loading(model):
        llm = LLM(model, **options)
    with llm:
        yield llm


@contextmanager
def loading(model: str) -> Iterator[None]:
    """A spinner while the model is loaded in the block."""
    once = "" if is_kept_converted(model) else "; the first time it is converted, which takes about 20 s"
    with errors.status(f"loading {escape(model)}{once}"), made_for_good():
        quiet_transformers()
        yield


def progress(*columns: ProgressColumn) -> Progress:
    """A progress bar with these columns, shown while the ``with`` block runs if standard error is a terminal."""
    every = (SpinnerColumn(), TextColumn("{task.description}"), *columns, TimeElapsedColumn())
    return Progress(*every, console=errors, transient=True, disable=not errors.is_terminal)


def require_packages(command: str, *packages: str) -> None:
    """End the command with a message if one of the server's packages is not installed."""
    if missing := next((package for package in packages if find_spec(package) is None), None):
        message = f"the package {missing} is not installed here: pip install 'cargohold[serve]'"
        typer.echo(f"cargohold {command}: {message}", err=True)
        raise typer.Exit(EXIT_USAGE)


def quiet_transformers() -> None:
    """Keep transformers' own progress bars and advice off the screen."""
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415  # slow to import

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def check_writable(option: str, file: Path) -> None:
    """Raise ``ConfigError`` if the file cannot be written, before time is spent on what is to be in it."""
    if not file.parent.is_dir():
        raise ConfigError(option, str(file), "there is no such directory")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(option, str(file), "it must be a writable file")


def keep_what_is_not_utf8() -> None:
    """Read standard input as Python reads the command line: keep bytes that are not UTF-8, which the tokenizer refuses."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def describe_reuse(metrics: RequestMetrics) -> str:
    """One line on where a prompt's tokens came from and how long the first answer token took."""
    restored = sum(metrics.restored_tokens.values())
    parts = [f"{metrics.device_tokens:,} on the device"]
    parts += [f"{count:,} from {tier}" for tier, count in metrics.restored_tokens.items()]
    if metrics.preemptions:
        # After a preemption, restored tokens may be of the answer, and the same tokens may be restored several times.
        parts[-1] += f" in {metrics.preemptions + 1} goes"
    else:
        parts.append(f"{max(0, metrics.prompt_tokens - metrics.device_tokens - restored):,} computed")
    ttft = "" if metrics.ttft_s is None else f"; first token after {metrics.ttft_s:.2f} s"
    return f"{format_count(metrics.prompt_tokens, 'prompt token')}: {', '.join(parts)}{ttft}"


DEFAULT_DISK_BYTES: Final = "20GiB"

MetricsKeyOption = Annotated[
    str | None,
    typer.Option(
        help="Key for the engines' /metrics, if they need one.", envvar="CARGOHOLD_METRICS_KEY", show_envvar=True
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
ModelArgument = Annotated[
    str, typer.Argument(help="A directory, a GGUF file, a Hugging Face hub id, or smollm2.", metavar="MODEL")
]


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are chosen; see ``SamplingParams``."""

    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to generate.")] = 128
    temperature: Annotated[
        float, typer.Option(help="0 takes the most likely token; higher values are more random.")
    ] = 0.0
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens with this total probability.")] = 1.0
    top_k: Annotated[int, typer.Option(help="Sample from this many of the most likely tokens; 0 for all.")] = 0
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None

    def params(self) -> SamplingParams:
        """The options as sampling parameters. Raises ``ConfigError`` for impossible ones."""
        return SamplingParams(**dataclasses.asdict(self))


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the model is loaded and what is kept; see ``EngineConfig`` and ``OffloadConfig``."""

    host_bytes: Annotated[
        str | None, typer.Option(help="Host memory for KV, such as 2GiB. Without it, nothing is offloaded.")
    ] = None
    disk_dir: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIRECTORY",
            help="Also keep KV in this directory, where the next run finds it. Can be repeated, the fastest first.",
        ),
    ] = None
    disk_bytes: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZE", help=f"Size limit of each directory; by default {DEFAULT_DISK_BYTES}."),
    ] = None
    shared_url: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Share KV with other engines: s3://bucket/prefix, redis://host:6379, ..."),
    ] = None
    tier: Annotated[
        list[str] | None,
        typer.Option(metavar="JSON", help='Any other tier, with its options: {"kind": ...}; can be repeated.'),
    ] = None
    num_device_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the device pool; by default 1 GiB of blocks.")
    ] = None
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Maximum length of a sequence; by default what the model and the device pool allow."),
    ] = None
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: as the model was saved.")] = "auto"
    device: Annotated[str, typer.Option(help="cpu or a CUDA device.")] = "cpu"
    record: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a block trace for cargohold replay: hashes, no text.")
    ] = None

    traces: Annotated[bool, typer.Option("--traces", help="Create OpenTelemetry spans for each request.")] = False

    def llm_options(self) -> dict[str, Any]:
        """Keyword arguments for ``LLM``. Raises ``ConfigError`` for impossible options."""
        own = ("host_bytes", "disk_dir", "disk_bytes", "shared_url", "tier")
        options = {key: value for key, value in dataclasses.asdict(self).items() if key not in own}
        return {**options, "offload": self._offload()}

    def _offload(self) -> OffloadConfig | None:
        directories, sizes = self.disk_dir or [], self.disk_bytes or []
        if len(sizes) not in {0, len(directories)}:
            raise ConfigError("disk_bytes", ", ".join(sizes), "it must be given once for each --disk-dir")
        tiers: list[object] = [
            {"kind": "disk", "directory": directory, "max_bytes": size}
            for directory, size in zip(directories, sizes or [DEFAULT_DISK_BYTES] * len(directories), strict=True)
        ]
        tiers += [{"kind": "shared", "url": url} for url in self.shared_url or ()]
        tiers += [parse_json("tier", text) for text in self.tier or ()]
        if self.host_bytes is not None:
            return made(OffloadConfig, {"host_bytes": self.host_bytes, "tiers": tiers})
        if tiers:
            expected = "tiers below host memory need --host-bytes too: give a size, such as 1GiB"
            raise ConfigError("host_bytes", None, expected)
        return None


def takes_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Let a subcommand take groups of options.

    A parameter whose type and default are a dataclass is replaced by one parameter per field, whose defaults are the values in
    the parameter's default.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        parameter.name: parameter.annotation
        for parameter in signature.parameters.values()
        if dataclasses.is_dataclass(parameter.annotation)
    }

    @functools.wraps(command)
    def flat(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        command(**values)

    parameters = [flat for parameter in signature.parameters.values() for flat in _flattened(parameter)]
    flat.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # what inspect looks for
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def _flattened(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    if not dataclasses.is_dataclass(parameter.annotation):
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    hints = get_type_hints(parameter.annotation, include_extras=True)
    for field in dataclasses.fields(parameter.annotation):
        default = getattr(parameter.default, field.name)
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
        )


# --- the app ----------------------------------------------------------------------------------------------------------


EXIT_USAGE = 2


def parse_json(option: str, text: str) -> dict[str, Any]:
    """Read the value of an option. Raises ``ConfigError`` if it is not an object of JSON."""
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError) as error:
        raise ConfigError(option, text, f"it must be JSON: an object ({one_line(error)})") from error


_OTHER_NAMES = {
    "directory": "disk_dir",
    "disk_price_s": "disk_price",
    "host_price_s": "host_price",
    "max_bytes": "disk_bytes",
    "url": "shared_url",
}
"""Options whose names on the command line differ from those in Python."""


class PlainFlags(TyperGroup):
    """Shows flags in its help, and in that of its commands, without a type: they take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        _plain(() if command is None else command.get_params(ctx))
        return command


def _plain(params: Iterable[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return list(params)


class _Commands(PlainFlags):
    """Ends every subcommand the way a shell expects: errors that we raise on purpose are one line, without a traceback."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Read the command line up to the subcommand; Typer would end without a word, or with a traceback."""
        try:
            return super().make_context(*args, **options)
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(interrupted()) from interrupt
        except OSError as error:
            raise typer.Exit(failed(error)) from error

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
        except OSError as error:
            raise typer.Exit(failed(error)) from error

    def _describe(self, ctx: Any, error: CargoholdError) -> str:
        """The error's message, with an option named as it is on the command line."""
        command = self.get_command(ctx, ctx.invoked_subcommand or "")
        if not isinstance(error, ConfigError) or command is None:
            return str(error)
        known = {name for parameter in command.params for name in parameter.opts}
        key = error.key.rpartition(".")[2]  # of tiers[0].directory, the command line gives the directory
        names = (f"--{name.replace('_', '-')}" for name in (key, _OTHER_NAMES.get(key, "")))
        option = error.key if error.key.startswith("--") else next((name for name in names if name in known), None)
        if option is None:
            return str(error)
        if error.value is None and option in error.expected:
            return error.expected  # a sentence of its own
        if error.value is None:
            return f"not possible without {option}: {error.expected}"
        # On the command line, an option that is not given has the value None.
        return str(ConfigError(option, error.value, error.expected.removesuffix(", or None")))


app = typer.Typer(
    name="cargohold",
    cls=_Commands,
    help="KV cache offloading for LLM engines, to host memory, disks and shared stores.",
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
