"""``cargohold run``, ``chat``, ``serve`` and ``dashboard``: use a model here, or behind known interfaces and a page."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.progress import BarColumn

from cargohold.cli.app import (
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
from cargohold.cli.signals import EXIT_FAILED, termination
from cargohold.connector.factory import equal_parts, start_report
from cargohold.engine.core.request import SamplingParams
from cargohold.engine.outputs import RequestOutput
from cargohold.errors import ConfigError, RequestError, one_line
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per prompt, with its tokens and metrics.")
    ] = False,
) -> None:
    """Complete prompts, given with --prompt or piped in (as one).

    Completions go to standard output; where each prompt's KV came from goes to standard error.
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


HELP = "/new starts over, /why explains the last answer's cache hits, /quit leaves"
LEAVE = "to leave, type /quit, or press Ctrl-D or Ctrl-C again"
ASK = "you> "


@app.command()
@takes_groups
def chat(
    model: ModelArgument,
    sampling: SamplingOptions = SamplingOptions(max_tokens=256),  # noqa: B008  # frozen
    engine: EngineOptions = EngineOptions(host_bytes="2GiB"),  # noqa: B008  # frozen
) -> None:
    """Talk to a model.

    /new starts over, /why explains the last answer's cache hits. Ctrl-C ends an answer; /quit or Ctrl-D ends the conversation.
    """
    params = sampling.params()
    keep_what_is_not_utf8()
    with loaded(model, **engine.llm_options()) as llm:
        llm.chat_prompt([{"role": "user", "content": "Hello"}])  # fails at once if the model cannot chat
        remark(HELP)
        conversation = TerminalChat(llm, params)
        conversation.run()
    if conversation.has_failed and not _is_in_terminal():
        raise typer.Exit(EXIT_FAILED)  # the reason was not shown


@dataclass(slots=True)
class TerminalChat:
    """A conversation in the terminal.

    Attributes:
        llm: answers.
        sampling: how its tokens are chosen.
        messages: what was said.
        last: the last output of the last answer that has ended.
        has_failed: whether a question was refused, or an answer ended with an error.
    """

    llm: LLM
    sampling: SamplingParams
    messages: list[dict[str, str]] = field(default_factory=list)
    last: RequestOutput | None = None
    has_failed: bool = False

    def run(self) -> None:
        """Ask and answer until the input ends."""
        while (text := _ask()) is not None:
            match text.strip():
                case "":
                    continue
                case "/quit":
                    return
                case "/new":
                    self.messages.clear()
                    remark("a new conversation")
                case "/why":
                    self._explain()
                case command if command.startswith("/"):
                    remark(f"there is no {command}; {HELP}")
                case question:
                    self._answer(question)

    def _answer(self, question: str) -> None:
        self.messages.append({"role": "user", "content": question})
        try:
            answer = self._stream_answer()
        except RequestError as error:
            self.messages.pop()
            self.has_failed = True
            remark(f"{error.reason}; /new starts over", style="red")
        else:
            self.messages.append({"role": "assistant", "content": answer})

    def _stream_answer(self) -> str:
        """Print the answer as it comes; returns its text, or what there is of it if it is interrupted."""
        text = ""
        with contextlib.closing(self.llm.stream(self.llm.chat_prompt(self.messages), self.sampling)) as outputs:
            try:
                for output in outputs:
                    typer.echo(output.new_text, nl=output.finished)
                    text = output.text
                    if output.finished:
                        self.last = output
                        self.has_failed |= output.error is not None
                        remark(_ending(output))
            except KeyboardInterrupt:
                typer.echo()
                if termination.is_asked_for:
                    raise
                remark("(interrupted)")
        return text

    def _explain(self) -> None:
        if self.last is None:
            remark("nothing to explain yet: no answer has ended")
        else:
            remark("\n".join(self.last.cache_notes) or "the last answer's prompt found nothing in a cache")


def _ask() -> str | None:
    """The next line of input; ``None`` when there is no more."""
    if sys.stdin is None:  # the program that started this process has closed it
        return None
    if not _is_in_terminal():
        return sys.stdin.readline() or None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, PLC0415  # lets input() edit lines, where there is one
    try:
        return _input()
    except EOFError:
        typer.echo()
        return None


def _input() -> str:
    """A line from the terminal. Ctrl-C drops what is typed; a second one in a row, or SIGTERM, raises ``KeyboardInterrupt``."""
    try:
        return input(ASK)
    except KeyboardInterrupt:
        typer.echo()
        if termination.is_asked_for:
            raise
    # One too many, meant for an answer that has just ended, does not lose the conversation.
    remark(LEAVE)
    return input(ASK)


def _is_in_terminal() -> bool:
    """Whether a person types the questions and reads the answers."""
    return sys.stdin is not None and sys.stdout is not None and sys.stdin.isatty() and sys.stdout.isatty()


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
