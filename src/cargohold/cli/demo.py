"""``cargohold demo``: several conversations that do not fit the device pool together, without and with offloading."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from cargohold.cli.app import app
from cargohold.cli.common import Answers, errors, loaded, quiet_transformers
from cargohold.cli.visits import (
    Answer,
    Conversation,
    Visit,
    load_conversations,
    progress,
    require_offloading,
    show,
    ticker,
    visits,
)
from cargohold.connector.offloading import OffloadConfig
from cargohold.engine.model.info import describe_model
from cargohold.engine.model.kv_layout import KVGeometry
from cargohold.engine.model.silent_heads import write_with_silent_heads
from cargohold.engine.model.source import SMOLLM2
from cargohold.engine.sampling_params import SamplingParams
from cargohold.errors import ConfigError, UnsupportedModelError
from cargohold.llm import LLM
from cargohold.option_values import parse_path
from cargohold.tiers import DiskTierConfig
from cargohold.tiers.disk.root import make_private

_DISK_BYTES: Final = "4GiB"


@app.command()
def demo(
    model: Annotated[str, typer.Option("--model", help="Any model with a chat template.")] = "smollm2",
    turns: Annotated[int, typer.Option("--turns", min=2, max=4, help="Questions per conversation.")] = 3,
    answer_tokens: Annotated[int, typer.Option("--answer-tokens", min=1, help="Length of an answer.")] = 24,
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
        int, typer.Option("--tensor-parallel-size", min=1, help="Split the model over so many worker processes.")
    ] = 1,
) -> None:
    """Show what offloading does for conversations that come back: same answers, first token much sooner."""
    tiers = () if disk_dir is None else (DiskTierConfig(directory=disk_dir, max_bytes=_DISK_BYTES),)
    offload = OffloadConfig(host_bytes=host_bytes, tiers=tiers)  # refuses bad options before minutes are spent
    if disk_dir is not None:
        _check_directory(disk_dir)
    conversations = load_conversations(turns)
    out = Answers()
    out.print(
        f"{len(conversations)} conversations of {turns} questions, visited in turn. Together they are several times larger "
        f"than the device pool, so every visit finds its context evicted.\n"
    )
    options: dict[str, Any] = {
        "num_device_blocks": device_blocks,
        "dtype": "float32",
        "tensor_parallel_size": tensor_parallel_size,
    }
    with (
        _splittable(model, tensor_parallel_size, out) as path,
        loaded(path, **options, offload=offload) as offloading,
        loaded(path, **options) as plain,
        progress() as bar,
    ):
        _check_fits(plain, conversations, answer_tokens)
        total = len(conversations) * turns
        without = _visits(plain, conversations, answer_tokens, ticker(bar, "without offloading", total))
        with_offload = _visits(offloading, conversations, answer_tokens, ticker(bar, "with offloading", total))
        # Visit by visit, first one engine and then the other: what else the machine does slows both of them down alike.
        pairs = list(zip(without, with_offload, strict=True))
    show(out, [visit for visit, _ in pairs], [visit for _, visit in pairs])


@contextmanager
def _splittable(model: str, num_shards: int, out: Console) -> Iterator[str]:
    """Yield the model; if it is the built-in one and its heads do not split, a copy of it with silent heads added."""
    if model != SMOLLM2 or num_shards == 1:
        yield model
        return
    info = describe_model(model)
    if info.geometry.splits_over(num_shards):
        yield model
        return
    possible = _possible_shards(info.geometry)
    if num_shards not in possible:
        expected = (
            f"it must be one of {', '.join(map(str, possible))}: over so many workers this model's heads can be split"
        )
        raise ConfigError("tensor_parallel_size", num_shards, expected)
    out.print(
        f"SmolLM2 has {info.geometry.num_query_heads} query heads and {info.geometry.num_kv_heads} KV heads, which do not "
        f"split over {num_shards} workers. For this demo it gets more heads, which stay silent: its answers are the same.\n"
    )
    with tempfile.TemporaryDirectory(prefix="cargohold-") as directory:
        with errors.status("adding silent heads"):
            quiet_transformers()
            write_with_silent_heads(info, num_shards, Path(directory))
        yield directory


def _possible_shards(geometry: KVGeometry) -> list[int]:
    """Numbers of workers that the built-in model can be split over, with silent heads if necessary.

    Models of its kind must have a width that is a multiple of the heads, although with silent heads nothing depends on that.
    """
    width = geometry.num_query_heads * geometry.head_dim
    heads_per_kv_head = geometry.num_query_heads // geometry.num_kv_heads

    def num_heads(num_shards: int) -> int:
        return heads_per_kv_head * -(-geometry.num_kv_heads // num_shards) * num_shards

    shards = range(1, width + 1)
    return [count for count in shards if geometry.splits_over(count) or width % num_heads(count) == 0]


def _visits(
    llm: LLM, conversations: Sequence[Conversation], answer_tokens: int, tick: Callable[[], None]
) -> Iterator[Visit]:
    """Make the visits on an engine, one whenever the next is wanted."""
    sampling = SamplingParams(max_tokens=answer_tokens)
    _warm_up(llm)

    def ask(messages: list[dict[str, str]]) -> Answer:
        output = llm.chat(messages, sampling)
        require_offloading(llm)
        llm.settle()  # what it writes must not slow the other engine down
        return Answer(output.text, output.token_ids, output.metrics)

    yield from visits(conversations, ask, tick)


def _check_directory(directory: str) -> None:
    """Raise ``ConfigError`` unless files can be written to the directory, before time is spent on the model."""
    path = parse_path("disk_dir", directory).absolute()
    try:
        make_private(path)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        expected = f"it must be a directory where files can be written: {error.strerror}"
        raise ConfigError("disk_dir", directory, expected) from error


def _warm_up(llm: LLM) -> None:
    """Run the model once: the first pass takes time for things that later ones do not."""
    llm.generate("warm up", SamplingParams(max_tokens=2))


def _check_fits(llm: LLM, conversations: Sequence[Conversation], answer_tokens: int) -> None:
    """Raise an error that says what would work unless every conversation fits to its end."""
    longest = max(_num_tokens(llm, talk, answer_tokens) for talk in conversations)
    config, info = llm.plan.config, llm.plan.info
    if longest > info.max_positions:
        turns = len(conversations[0].questions)
        most = answer_tokens - -(-(longest - info.max_positions) // turns)
        if most > 0:
            has = f"the longest conversation would have about {longest:,} tokens"
            expected = f"{has}, and {info.name} is for at most {info.max_positions:,}; use at most {most}"
            raise ConfigError("answer_tokens", answer_tokens, expected)
        reason = f"the longest conversation has about {longest:,} tokens, and it is for at most {info.max_positions:,}"
        raise UnsupportedModelError(info.name, reason)
    if longest > llm.plan.scheduler.max_model_len:
        needed = -(-longest // config.block_tokens) + 1
        expected = f"the longest conversation alone needs about {needed} blocks"
        raise ConfigError("num_device_blocks", config.num_device_blocks, expected)


def _num_tokens(llm: LLM, talk: Conversation, answer_tokens: int) -> int:
    """About how many tokens a conversation has at its end."""
    turns = [({"role": "user", "content": text}, {"role": "assistant", "content": ""}) for text in talk.questions]
    return len(llm.chat_prompt([message for turn in turns for message in turn])) + answer_tokens * len(turns)
