"""``cargohold run``, ``serve`` and ``dashboard``: use a model here, or behind known interfaces and a page."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.progress import BarColumn

from cargohold.cli.app import (
    AsJson,
    EngineOptions,
    MetricsKeyOption,
    ModelArgument,
    SamplingOptions,
    app,
    describe_reuse,
    keep_what_is_not_utf8,
    loaded,
    loading,
    progress,
    remark,
    require_packages,
    takes_groups,
)
from cargohold.cli.signals import EXIT_FAILED
from cargohold.connector.factory import equal_parts, start_report
from cargohold.engine.core.request import SamplingParams
from cargohold.engine.outputs import RequestOutput
from cargohold.errors import ConfigError, one_line
from cargohold.llm import LLM, AsyncLLM
from cargohold.option_values import parse_bytes


@app.command()
@takes_groups
def run(
    model: ModelArgument,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Prompt to complete; can be repeated.")
    ] = None,
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008  # frozen
    engine: EngineOptions = EngineOptions(),  # noqa: B008  # frozen
    as_json: AsJson = False,
) -> None:
    """Complete prompts, given with --prompt or piped in (as one).

    Completions go to standard output; where each prompt's KV came from goes to standard error. With --json, there is one object
    per prompt, with its tokens and metrics.
    """
    params = sampling.params()
    prompts = prompt or [_from_stdin()]
    if not all(prompts):
        raise ConfigError("prompt", "", "it must have at least one character")
    with loaded(model, **engine.llm_options()) as llm:
        if len(prompts) == 1 and not as_json:
            outputs = [_stream(llm, prompts[0], params)]
        else:
            outputs = _generate(llm, prompts, params)
            for output in outputs:
                _show(output, as_json=as_json)
    if any(output.error is not None for output in outputs):
        raise typer.Exit(EXIT_FAILED)


def _from_stdin() -> str:
    keep_what_is_not_utf8()
    # The program that started this process may have closed standard input; then Python has none.
    text = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().strip()
    if not text:
        raise typer.BadParameter("there is no prompt; give it with --prompt or pipe one in")
    return text


def _stream(llm: LLM, prompt: str, sampling: SamplingParams) -> RequestOutput:
    """Print the completion as it comes; returns the last output."""
    for output in llm.stream(prompt, sampling):
        typer.echo(output.new_text, nl=output.finished)
    remark(_ending(output))
    return output


def _ending(output: RequestOutput) -> str:
    return output.error or describe_reuse(output.metrics)


def _generate(llm: LLM, prompts: Sequence[str], sampling: SamplingParams) -> list[RequestOutput]:
    with progress(BarColumn()) as bar:
        task = bar.add_task("generating", total=len(prompts))
        return llm.generate(prompts, sampling, progress=lambda done, _: bar.update(task, completed=done))


def _show(output: RequestOutput, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_as_object(output)))
    else:
        remark(f"> {output.prompt}")
        typer.echo(output.text)
        remark(f"{_ending(output)}\n")


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


_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where the server listens, who has access, and its limits; see ``ServeConfig``."""

    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 allows other machines.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any free one.")] = 8000
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Accept only clients with a key; can be repeated: each key is a tenant with its own cache.",
            envvar="CARGOHOLD_API_KEYS",
            show_envvar=True,
        ),
    ] = None
    tenants: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help='Accept tenants with shares of host memory: JSON such as {"acme": {"key": "...", "hard": "2GiB"}}.',
        ),
    ] = None
    admin_key: Annotated[
        str | None,
        typer.Option(
            help="Key that sees all tenants' requests and can reset the cache.",
            envvar="CARGOHOLD_ADMIN_KEY",
            show_envvar=True,
        ),
    ] = None
    metrics_key: Annotated[
        str | None,
        typer.Option(
            help="Key that /metrics requires and that allows nothing else; with it, /metrics includes tenants.",
            envvar="CARGOHOLD_METRICS_KEY",
            show_envvar=True,
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host name to accept in requests, as after a proxy; can be repeated; * for any.",
            metavar="NAME",
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name of the model for clients; can be repeated.", metavar="NAME")
    ] = None
    max_queue: Annotated[
        int, typer.Option(help="Maximum number of waiting requests; more are rejected with status 429.")
    ] = 256
    max_body_bytes: Annotated[str, typer.Option(help="Maximum size of a request body.")] = "8MiB"

    def config(self) -> Any:
        """The options as the server takes them. Raises ``ConfigError`` for impossible ones."""
        from cargohold.connector.tenants import Tenant  # noqa: PLC0415  # as below
        from cargohold.serve.settings import ServeConfig  # noqa: PLC0415  # needs packages that may be absent

        return ServeConfig(
            host=self.host,
            port=self.port,
            api_keys=tuple(self.api_key or ()),
            tenants=() if self.tenants is None else Tenant.read(self.tenants),
            admin_key=self.admin_key,
            metrics_key=self.metrics_key,
            allowed_hosts=tuple(self.allowed_host or ()),
            served_names=tuple(self.served_model_name or ()),
            max_queue=self.max_queue,
            max_body_bytes=parse_bytes("max_body_bytes", self.max_body_bytes),
        )


@app.command()
@takes_groups
def serve(
    model: ModelArgument,
    server: ServeOptions = ServeOptions(),
    engine: EngineOptions = EngineOptions(host_bytes="2GiB"),  # noqa: B008  # frozen
) -> None:
    """Serve a model to clients of OpenAI's and Anthropic's interfaces, with a page that shows the cache.

    Ctrl-C and SIGTERM end it: it takes no more requests, and gives those that it has some seconds to end.
    """
    require_packages("serve", *_PACKAGES)
    from cargohold.serve.server import serving  # noqa: PLC0415  # needs packages that may be absent
    from cargohold.serve.settings import with_shares  # noqa: PLC0415  # as above

    config, options = server.config(), engine.llm_options()
    options["offload"] = with_shares(options["offload"], config)
    with serving(config, remark) as running:
        remark(f"loading {model}")
        with loading(model):
            llm = AsyncLLM(model, **options)
        running.open(llm)
        for line in _sizes(llm):
            remark(line)
        remark(f"serving {model} at {running.url} (a page for people), {running.url}/v1 (for clients)", style="")
        running.wait()


def _sizes(llm: AsyncLLM) -> Iterator[str]:
    """What fits: the longest sequence, unless the model alone limits it, the device pool, and each tier."""
    layout, limits = llm.plan.layout, llm.plan.limits
    if limits.limited_by:
        yield f"sequences are limited to {limits.max_model_len} tokens: {limits.limited_by}"
    yield from start_report(layout, llm.offload, equal_parts(layout))


@app.command()
def dashboard(
    urls: Annotated[list[str], typer.Argument(help="Addresses of engines, such as localhost:8000.", metavar="URL...")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 allows other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any free one.")] = 8080,
    interval: Annotated[float, typer.Option(help="Seconds between two polls of an engine.", min=0.5)] = 2.0,
    metrics_key: MetricsKeyOption = None,
) -> None:
    """Show the page for engines that run elsewhere: cargohold serve, or vLLM with the connector. Ctrl-C ends it."""
    require_packages("dashboard", *_PACKAGES)
    from cargohold.serve.dashboard import Engine, serve_dashboard  # noqa: PLC0415  # needs packages that may be absent
    from cargohold.serve.scrape import metrics_url, scrape  # noqa: PLC0415  # as above
    from cargohold.serve.settings import ServeConfig  # noqa: PLC0415  # as above

    of = {url: metrics_url(url) for url in urls}
    for url, address in of.items():
        try:
            socket.getaddrinfo(urlsplit(address).hostname, None)
        except (OSError, UnicodeError) as error:
            raise ConfigError("URL", url, f"no machine is known by that name here ({one_line(error)})") from error
    engines = [Engine(url, address, partial(scrape, key=metrics_key)) for url, address in of.items()]
    config = ServeConfig(host=host, port=port)
    serve_dashboard(engines, config, interval, lambda address: remark(f"a page for people at {address}", style=""))
