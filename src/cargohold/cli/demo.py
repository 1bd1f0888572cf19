"""``cargohold demo``: conversations that do not fit the device pool together, without and with offloading."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import median
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from cargohold.cli.app import Answers, app, errors, loaded
from cargohold.connector.offloading import OffloadConfig
from cargohold.engine.core.request import SamplingParams
from cargohold.engine.outputs import RequestMetrics
from cargohold.errors import CargoholdError
from cargohold.llm import LLM
from cargohold.tiers import DiskTierConfig


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


def require_offloading(llm: LLM) -> None:
    """Raise ``CargoholdError`` if the connector of ``llm`` was turned off: a demo does not show any more what it says."""
    error = llm.status.connector_error
    if error is not None:
        raise CargoholdError(f"offloading was turned off, so there is nothing to show; {error}")


@dataclass(frozen=True, slots=True)
class Visit:
    """One question in one conversation, answered.

    Attributes:
        conversation: its topic.
        turn: number of the question, from 0.
        answer: the answer's tokens, which must be the same without and with offloading.
        metrics: where the context came from, and how long the first token took.
    """

    conversation: str
    turn: int
    answer: tuple[int, ...]
    metrics: RequestMetrics


def visits(llm: LLM, conversations: Sequence[Conversation], answer_tokens: int) -> Iterator[Visit]:
    """Ask every conversation's first question, then every conversation's second one, and so on.

    Nothing is asked before the next visit is wanted.
    """
    sampling = SamplingParams(max_tokens=answer_tokens)
    llm.generate("warm up", SamplingParams(max_tokens=2))  # the first pass takes time for things that later ones do not
    messages: dict[str, list[dict[str, str]]] = {talk.topic: [] for talk in conversations}
    for turn in range(len(conversations[0].questions)):
        for talk in conversations:
            history = messages[talk.topic]
            history.append({"role": "user", "content": talk.questions[turn]})
            output = llm.chat(history, sampling)
            require_offloading(llm)
            llm.settle()  # what it writes must not slow the other engine down
            history.append({"role": "assistant", "content": output.text})
            yield Visit(talk.topic, turn, output.token_ids, output.metrics)


TITLES = (
    "                context          restored  first token  first token  identical\n"
    "about     visit  tokens            tokens      without         with  output"
)


def show_row(out: Console, without: Visit, with_offload: Visit) -> None:
    """Print one visit as a row of the table."""
    same = without.answer == with_offload.answer
    row = (
        f"{without.conversation:<10}{without.turn + 1:>5}{without.metrics.prompt_tokens:>8,}"
        f"{_restored(with_offload.metrics):>18}{without.metrics.ttft_s:>11.2f} s{with_offload.metrics.ttft_s:>11.2f} s"
        f"  {'yes' if same else 'NO'}"
    )
    out.print(row, style=None if same else "red", highlight=False, soft_wrap=True)


def summarize(pairs: Sequence[tuple[Visit, Visit]]) -> dict[str, Any]:
    """A summary of the visits, each without and with offloading, as values for JSON."""
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
        "restored_tokens": sum(sum(visit.metrics.restored_tokens.values()) for _, visit in pairs),
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


def _restored(metrics: RequestMetrics) -> str:
    """Number of restored tokens, with the names of tiers below host memory that some of them come from."""
    below = [tier for tier, restored in metrics.restored_tokens.items() if restored and tier != "host"]
    return " ".join([f"{sum(metrics.restored_tokens.values()):,}", *below])


_DISK_BYTES: Final = "4GiB"


@app.command()
def demo(
    model: Annotated[str, typer.Option("--model", help="Any model with a chat template.")] = "smollm2",
    turns: Annotated[int, typer.Option("--turns", min=2, max=4, help="Questions per conversation.")] = 2,
    answer_tokens: Annotated[int, typer.Option("--answer-tokens", min=1, max=512, help="Length of an answer.")] = 8,
    device_blocks: Annotated[
        int,
        typer.Option(
            "--num-device-blocks", help="Device pool, in blocks of 16 tokens: too small for two conversations."
        ),
    ] = 192,
    host_bytes: Annotated[str, typer.Option("--host-bytes", help="Host memory for KV.")] = "2GiB",
    disk_dir: Annotated[
        str | None,
        typer.Option(
            "--disk-dir", help=f"Keep KV in this directory too, {_DISK_BYTES} at most: the next run finds it."
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", min=1, help="Split the model over this many worker processes.")
    ] = 1,
) -> None:
    """Show what offloading does for conversations that come back: same answers, first token much sooner."""
    tiers = () if disk_dir is None else (DiskTierConfig(directory=disk_dir, max_bytes=_DISK_BYTES),)
    offload = OffloadConfig(host_bytes=host_bytes, tiers=tiers)  # refuses bad options before minutes are spent
    conversations = load_conversations(turns)
    out = Answers()
    options: dict[str, Any] = {
        "num_device_blocks": device_blocks,
        "dtype": "float32",
        "tensor_parallel_size": tensor_parallel_size,
    }
    with loaded(model, **options, offload=offload) as offloading, loaded(model, **options) as plain:
        out.print(
            f"{len(conversations)} conversations of {turns} questions, visited in turn. Together they are several times "
            f"larger than the device pool, so every visit finds its context evicted.\n"
        )
        total = len(conversations) * turns
        # Visit by visit, first one engine and then the other: what else the machine does slows both of them down alike.
        asked = (visits(llm, conversations, answer_tokens) for llm in (plain, offloading))
        rows, pairs = zip(*asked, strict=True), list[tuple[Visit, Visit]]()
        out.print(TITLES)
        for number in range(1, total + 1):
            with errors.status(f"visit {number} of {total}, without offloading and with"):
                pairs.append(next(rows))
            show_row(out, *pairs[-1])
    summary = summarize(pairs)
    out.print(sentence(summary))
    out.print(json.dumps(summary), soft_wrap=True, highlight=False)
    if not summary["identical"]:
        raise typer.Exit(EXIT_DIFFERENT)
