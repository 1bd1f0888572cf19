"""``cargohold run``: complete prompts."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.progress import Progress

from cargohold.cli.app import app
from cargohold.cli.common import describe_reuse, errors, keep_what_is_not_utf8, loaded, remark
from cargohold.cli.options import EngineOptions, ModelArgument, SamplingOptions, takes_groups
from cargohold.engine.outputs import RequestOutput
from cargohold.engine.sampling_params import SamplingParams
from cargohold.llm import LLM


@app.command()
@takes_groups
def run(
    model: ModelArgument,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="What to complete; may be given several times.")
    ] = None,
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008  # frozen
    engine: EngineOptions = EngineOptions(),  # noqa: B008  # frozen
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per prompt, with its tokens and metrics.")
    ] = False,
) -> None:
    """Complete prompts, given with --prompt or piped in (as one).

    Completions go to standard output; where each prompt's KV came from goes to standard error.
    """
    params = sampling.params()
    prompts = prompt or [_from_stdin()]
    with loaded(model, **engine.llm_options()) as llm:
        if len(prompts) == 1 and not as_json:
            _stream(llm, prompts[0], params)
        else:
            for output in _generate(llm, prompts, params):
                _show(output, as_json=as_json)


def _from_stdin() -> str:
    keep_what_is_not_utf8()
    # The program that started this process may have closed standard input; then Python has none.
    text = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().strip()
    if not text:
        raise typer.BadParameter("there is no prompt; give it with --prompt or pipe one in")
    return text


def _stream(llm: LLM, prompt: str, sampling: SamplingParams) -> None:
    for output in llm.stream(prompt, sampling):
        typer.echo(output.new_text, nl=output.finished)
        if output.finished:
            remark(describe_reuse(output.metrics))


def _generate(llm: LLM, prompts: Sequence[str], sampling: SamplingParams) -> list[RequestOutput]:
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("generating", total=len(prompts))
        return llm.generate(prompts, sampling, progress=lambda done, _: bar.update(task, completed=done))


def _show(output: RequestOutput, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_as_object(output)))
    else:
        remark(f"> {output.prompt}")
        typer.echo(output.text)
        remark(f"{describe_reuse(output.metrics)}\n")


def _as_object(output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": output.prompt,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "error": output.error,
        "metrics": dataclasses.asdict(output.metrics),
        "cache_notes": output.cache_notes,
    }
