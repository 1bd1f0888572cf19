"""``cargohold run``: complete prompts."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.progress import Progress

from cargohold.cli.app import app
from cargohold.cli.common import (
    Device,
    DeviceBlocks,
    Dtype,
    HostBytes,
    MaxTokens,
    ModelArgument,
    Seed,
    Temperature,
    TopK,
    TopP,
    describe_reuse,
    errors,
    loaded,
)
from cargohold.engine.outputs import RequestOutput
from cargohold.engine.sampling_params import SamplingParams
from cargohold.llm import LLM


@app.command()
def run(  # noqa: PLR0913, PLR0917  # each argument is an option of the command
    model: ModelArgument,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="What to complete; may be given several times.")
    ] = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    host_bytes: HostBytes = None,
    num_device_blocks: DeviceBlocks = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt instead of text.")] = False,
) -> None:
    """Complete prompts, from --prompt or from standard input (one prompt)."""
    prompts = prompt or [_from_stdin()]
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    with loaded(model, host_bytes=host_bytes, num_device_blocks=num_device_blocks, dtype=dtype, device=device) as llm:
        if len(prompts) == 1 and not as_json:
            _stream(llm, prompts[0], sampling)
        else:
            for output in _generate(llm, prompts, sampling):
                _show(output, as_json=as_json)


def _from_stdin() -> str:
    text = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    if not text:
        raise typer.BadParameter("give a --prompt, or pipe one in")
    return text


def _stream(llm: LLM, prompt: str, sampling: SamplingParams) -> None:
    for output in llm.stream(prompt, sampling):
        sys.stdout.write(output.new_text)
        sys.stdout.flush()
        if output.finished:
            sys.stdout.write("\n")
            errors.print(describe_reuse(output.metrics), style="dim")


def _generate(llm: LLM, prompts: Sequence[str], sampling: SamplingParams) -> list[RequestOutput]:
    with Progress(console=errors, transient=True) as bar:
        task = bar.add_task("generating", total=len(prompts))
        return llm.generate(prompts, sampling, progress=lambda done, _: bar.update(task, completed=done))


def _show(output: RequestOutput, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(output)))
    else:
        typer.echo(f"{output.prompt}{output.text}\n")
        errors.print(describe_reuse(output.metrics), style="dim")
