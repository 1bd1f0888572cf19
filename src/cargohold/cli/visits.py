"""Visits to conversations for the demos, and a comparison of visits without and with offloading."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import median
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from cargohold.cli.common import errors
from cargohold.engine.outputs import RequestMetrics
from cargohold.errors import CargoholdError
from cargohold.llm import LLM


@dataclass(frozen=True, slots=True)
class Conversation:
    """A user's questions, turn by turn.

    Attributes:
        topic: name of the document.
        questions: the first one contains the document.
    """

    topic: str
    questions: tuple[str, ...]


def load_conversations(turns: int) -> list[Conversation]:
    """The conversations that come with the package, cut to ``turns`` turns."""
    texts = files("cargohold.cli") / "texts"
    questions: dict[str, list[str]] = json.loads((texts / "questions.json").read_text(encoding="utf-8"))
    return [
        Conversation(topic, (f"{(texts / f'{topic}.txt').read_text(encoding='utf-8')}\n\n{first}", *rest[: turns - 1]))
        for topic, (first, *rest) in questions.items()
    ]


LONG_CONTEXT_TOKENS = 1500
EXIT_DIFFERENT = 1


class TurnedOffError(CargoholdError):
    """The connector that a demo or benchmark is about was turned off: it does not show any more what it says.

    Attributes:
        why: the reason.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"offloading was turned off, so there is nothing to show; {why}")
        self.why = why


def require_offloading(llm: LLM) -> None:
    """Raise ``TurnedOffError`` if the connector of ``llm`` was turned off."""
    error = llm.status.connector_error
    if error is not None:
        raise TurnedOffError(error)


@dataclass(frozen=True, slots=True)
class Visit:
    """One question in one conversation, answered.

    Attributes:
        conversation: its topic.
        turn: number of the question, from 0.
        answer: tokens or text.
        metrics: where the context came from, and how long the first token took.
    """

    conversation: str
    turn: int
    answer: tuple[int, ...] | str
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a conversation's latest question.

    Attributes:
        text: the answer's text, which becomes part of the conversation.
        compared: tokens or text, which must be the same without and with offloading.
        metrics: the request's metrics.
    """

    text: str
    compared: tuple[int, ...] | str
    metrics: RequestMetrics


def visits(
    conversations: Sequence[Conversation], ask: Callable[[list[dict[str, str]]], Answer], tick: Callable[[], None]
) -> Iterator[Visit]:
    """Ask every conversation's first question, then every conversation's second one, and so on; call ``tick`` after each.

    Nothing is asked before the next visit is wanted.
    """
    messages: dict[str, list[dict[str, str]]] = {talk.topic: [] for talk in conversations}
    for turn in range(len(conversations[0].questions)):
        for talk in conversations:
            history = messages[talk.topic]
            history.append({"role": "user", "content": talk.questions[turn]})
            answer = ask(history)
            history.append({"role": "assistant", "content": answer.text})
            tick()
            yield Visit(talk.topic, turn, answer.compared, answer.metrics)


def show(out: Console, without: Sequence[Visit], with_offload: Sequence[Visit]) -> None:
    """Print table, sentence and JSON. Raises ``typer.Exit`` if the answers differ."""
    out.print(table(without, with_offload))
    summary = summarize(without, with_offload)
    out.print(sentence(summary))
    out.print(json.dumps(summary), soft_wrap=True, highlight=False)
    if not summary["identical"]:
        raise typer.Exit(EXIT_DIFFERENT)


def summarize(without: Sequence[Visit], with_offload: Sequence[Visit]) -> dict[str, Any]:
    """A summary of the visits, as values for JSON."""
    pairs = list(zip(without, with_offload, strict=True))
    long = [
        (a.metrics.ttft_s or 0.0, b.metrics.ttft_s or 0.0)
        for a, b in pairs
        if a.turn > 0 and a.metrics.prompt_tokens >= LONG_CONTEXT_TOKENS
    ]
    recompute_s = median(a for a, _ in long) if long else None
    restored_s = median(b for _, b in long) if long else None
    return {
        "identical": all(a.answer == b.answer for a, b in pairs),
        "visits": len(pairs),
        "restored_tokens": sum(sum(visit.metrics.restored_tokens.values()) for visit in with_offload),
        "ttft_recompute_s": recompute_s and round(recompute_s, 4),
        "ttft_restored_s": restored_s and round(restored_s, 4),
        "speedup": round(recompute_s / restored_s, 1) if recompute_s and restored_s else None,
    }


def sentence(summary: dict[str, Any]) -> str:
    """The summary as a sentence for people."""
    same = "All answers are identical" if summary["identical"] else "[red]ANSWERS DIFFER[/red]"
    if summary["speedup"] is None:
        return f"\n{same}; no visit had a context of {LONG_CONTEXT_TOKENS} tokens or more.\n"
    return (
        f"\n{same}. Coming back to a long context, the first token takes {summary['ttft_restored_s']:.2f} s instead of "
        f"{summary['ttft_recompute_s']:.2f} s: {summary['speedup']:.0f} times sooner "
        f"({summary['restored_tokens']:,} tokens were restored instead of computed).\n"
    )


def table(without: Sequence[Visit], with_offload: Sequence[Visit]) -> Table:
    """The visits as a table, one per line."""
    rows = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)  # 80 columns wide
    for column in ("about", "visit"):
        rows.add_column(column)
    for column in ("context\ntokens", "restored\ntokens", "first token\nwithout", "first token\nwith"):
        rows.add_column(column, justify="right")
    rows.add_column("identical\noutput", justify="center")
    for a, b in zip(without, with_offload, strict=True):
        same = a.answer == b.answer
        rows.add_row(
            a.conversation,
            str(a.turn + 1),
            f"{a.metrics.prompt_tokens:,}",
            _restored(b.metrics),
            f"{a.metrics.ttft_s:.2f} s",
            f"{b.metrics.ttft_s:.2f} s",
            "yes" if same else "NO",
            style=None if same else "red",
        )
    return rows


def _restored(metrics: RequestMetrics) -> str:
    """Number of restored tokens, with the names of tiers below host memory that some of them come from."""
    below = [tier for tier in ("disk", "shared") if metrics.restored_tokens.get(tier)]
    return " ".join([f"{sum(metrics.restored_tokens.values()):,}", *below])


def progress() -> Progress:
    """A progress bar on standard error."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description:20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        disable=not errors.is_terminal,
    )


def ticker(bar: Progress, description: str, total: int) -> Callable[[], None]:
    """Add a task to the progress bar. Returns a function that advances it by one step."""
    task = bar.add_task(description, total=total)
    return lambda: bar.advance(task)
