"""What subcommands share: consoles, remarks, loading with a spinner, numbers for people."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from cargohold.engine.model.source import is_kept_converted
from cargohold.engine.outputs import RequestMetrics
from cargohold.llm import LLM
from cargohold.option_values import format_count
from cargohold.process import made_for_good

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


def quiet_transformers() -> None:
    """Keep transformers' own progress bars and advice off the screen."""
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415  # slow to import

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


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
