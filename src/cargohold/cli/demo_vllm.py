"""``cargohold demo-vllm``: the same demo on a real server, ``vllm serve``, through the ``openai`` package."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from cargohold.cli.app import EXIT_USAGE, app
from cargohold.cli.common import Answers, errors, quiet_transformers
from cargohold.cli.visits import (
    Answer,
    Conversation,
    TurnedOffError,
    Visit,
    load_conversations,
    progress,
    show,
    ticker,
    visits,
)
from cargohold.engine.model.source import locate_model
from cargohold.engine.outputs import RequestMetrics
from cargohold.integrations.vllm.server import serving, why_turned_off
from cargohold.integrations.vllm.settings import Settings

SERVED_NAME = "demo"


@app.command()
def demo_vllm(
    model: Annotated[str, typer.Option("--model", help="Any model with a chat template.")] = "smollm2",
    turns: Annotated[int, typer.Option("--turns", min=2, max=4, help="Questions per conversation.")] = 3,
    answer_tokens: Annotated[int, typer.Option("--answer-tokens", min=1, help="Length of an answer.")] = 24,
    device_blocks: Annotated[
        int,
        typer.Option(
            "--num-device-blocks", min=2, help="Device pool, in blocks of 32 tokens: too small for two conversations."
        ),
    ] = 90,
    host_bytes: Annotated[str, typer.Option("--host-bytes", help="Host memory for KV.")] = "2GiB",
) -> None:
    """Show what offloading does inside vLLM for conversations that come back."""
    for package in ("vllm", "openai"):
        if find_spec(package) is None:
            expected = "run make demo-vllm, which makes an environment that has it, or install it here"
            typer.echo(f"cargohold demo-vllm: the package {package} is not installed here; {expected}", err=True)
            raise typer.Exit(EXIT_USAGE)
    extra = {"host_bytes": host_bytes}
    Settings.parse(extra)  # refuses bad options before minutes are spent
    conversations = load_conversations(turns)
    out = Answers()
    out.print(
        f"{len(conversations)} conversations of {turns} questions, visited in turn, on vllm serve. Together they are several "
        f"times larger than the device pool, so every visit finds its context evicted.\n"
    )
    with errors.status("looking for the model; the first time it is converted, which takes about 20 s"):
        quiet_transformers()
        path = locate_model(model)
    options = {
        "served-model-name": SERVED_NAME,
        "dtype": "float32",
        "block-size": 32,
        "num-gpu-blocks-override": device_blocks,
        "max-model-len": (device_blocks - 2) * 32,
        "max-num-seqs": 4,
        "enforce-eager": True,
        "enable-prompt-tokens-details": True,
    }
    runs = []
    with tempfile.TemporaryDirectory(prefix="cargohold-") as directory, progress() as bar:
        for title, transfer_config in (("without offloading", None), ("with offloading", _transfer_config(extra))):
            tick = ticker(bar, title, len(conversations) * turns)
            log = Path(directory, "vllm.log")
            with serving(path, log, transfer_config=transfer_config, options=options) as url:
                runs.append(_visit_all(url, log, conversations, answer_tokens, tick))
    show(out, *runs)


def _transfer_config(extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": "CargoholdConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _visit_all(
    url: str, log: Path, conversations: Sequence[Conversation], answer_tokens: int, tick: Callable[[], None]
) -> list[Visit]:
    """Make the visits on a server. Raises ``TurnedOffError`` once its log says that offloading was turned off."""
    from openai import OpenAI  # noqa: PLC0415  # there only beside vLLM

    client = OpenAI(base_url=url, api_key="none", max_retries=0)
    _ask(client, [{"role": "user", "content": "warm up"}], 2)

    def ask(messages: list[dict[str, str]]) -> Answer:
        answer = _ask(client, messages, answer_tokens)
        if (why := why_turned_off(log)) is not None:
            raise TurnedOffError(why)
        return answer

    return list(visits(conversations, ask, tick))


def _ask(client: Any, messages: list[dict[str, str]], max_tokens: int) -> Answer:
    """Ask for one answer. It is streamed, so that the time to the first token is the one that a user sees."""
    started = time.perf_counter()
    stream = client.chat.completions.create(
        model=SERVED_NAME,
        messages=messages,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, first_s, usage = "", None, None
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first_s = time.perf_counter() - started if first_s is None else first_s
            text += chunk.choices[0].delta.content
        usage = chunk.usage or usage
    assert usage is not None, "vLLM sends usage last, as it was asked to"
    details = usage.prompt_tokens_details
    found = (details.cached_tokens or 0) if details is not None else 0
    metrics = RequestMetrics(
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        restored_tokens={"device or host": found} if found else {},
        ttft_s=first_s,
    )
    return Answer(text, text, metrics)
