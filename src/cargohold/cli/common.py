"""What subcommands share: options, loading with a spinner, and numbers for people."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

from cargohold.connector.offloading import OffloadConfig
from cargohold.engine.outputs import RequestMetrics
from cargohold.llm import LLM

ModelArgument = Annotated[
    str, typer.Argument(help="A directory, a GGUF file, a Hugging Face hub id, or smollm2.", metavar="MODEL")
]
HostBytes = Annotated[
    str | None, typer.Option("--host-bytes", help="Host memory for KV, such as 2GiB. Without it nothing is offloaded.")
]
DeviceBlocks = Annotated[
    int | None, typer.Option("--num-device-blocks", help="Blocks of the device pool; by default 2 GiB worth of them.")
]
Dtype = Annotated[
    str, typer.Option("--dtype", help="float32, bfloat16, float16, or auto for the type it was saved in.")
]
Device = Annotated[str, typer.Option("--device", help="cpu or a CUDA device.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Generate at most so many tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", help="Sample among the likeliest tokens of this total probability.")]
TopK = Annotated[int, typer.Option("--top-k", help="Sample among so many likeliest tokens; 0 for all.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")]

errors = Console(stderr=True)
"""Where progress goes, so that standard output stays clean."""


@contextmanager
def loaded(model: str, *, host_bytes: str | None = None, **options: Any) -> Iterator[LLM]:
    """An ``LLM``, loaded behind a spinner, closed at the end. Options that are ``None`` keep their defaults."""
    offload = None if host_bytes is None else OffloadConfig(host_bytes=host_bytes)
    chosen = {key: value for key, value in options.items() if value is not None}
    with errors.status(f"loading {model} (the first time also converts it, which takes about 20 s)"):
        quiet_transformers()
        llm = LLM(model, offload=offload, **chosen)
    with llm:
        yield llm


def quiet_transformers() -> None:
    """Keep transformers' own progress bars and advice off the screen."""
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415  # slow to import

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def describe_reuse(metrics: RequestMetrics) -> str:
    """One line on where a prompt's tokens came from and how long the first answer token took."""
    restored = sum(metrics.restored_tokens.values())
    parts = [f"{metrics.device_tokens} on the device"]
    parts += [f"{count} from {tier}" for tier, count in metrics.restored_tokens.items()]
    parts.append(f"{max(0, metrics.prompt_tokens - metrics.device_tokens - restored)} computed")
    ttft = "" if metrics.ttft_s is None else f"; first token after {metrics.ttft_s:.2f} s"
    return f"{metrics.prompt_tokens} prompt tokens: {', '.join(parts)}{ttft}"
