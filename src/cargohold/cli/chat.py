"""``cargohold chat``: talk to a model, and see after each answer what was reused from where."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field

import typer

from cargohold.cli.app import app
from cargohold.cli.common import describe_reuse, keep_what_is_not_utf8, loaded, remark
from cargohold.cli.options import EngineOptions, ModelArgument, SamplingOptions, takes_groups
from cargohold.engine.outputs import RequestOutput
from cargohold.engine.sampling_params import SamplingParams
from cargohold.errors import RequestError
from cargohold.llm import LLM

HELP = "/new starts over, /why explains the last answer's cache hits, /quit leaves"
ASK = "you> "


@app.command()
@takes_groups
def chat(
    model: ModelArgument,
    sampling: SamplingOptions = SamplingOptions(max_tokens=256),  # noqa: B008  # frozen
    engine: EngineOptions = EngineOptions(host_bytes="1GiB"),  # noqa: B008  # frozen
) -> None:
    """Talk to a model.

    /new starts over, /why explains the last answer's cache hits. Ctrl-C ends an answer; /quit or Ctrl-D ends the conversation.
    """
    params = sampling.params()
    keep_what_is_not_utf8()
    with loaded(model, **engine.llm_options()) as llm:
        llm.chat_prompt([{"role": "user", "content": "Hello"}])  # fails at once if the model cannot chat
        remark(HELP)
        Conversation(llm, params).run()


@dataclass(slots=True)
class Conversation:
    """A conversation in the terminal."""

    llm: LLM
    sampling: SamplingParams
    messages: list[dict[str, str]] = field(default_factory=list)
    last: RequestOutput | None = None

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
                        remark(output.error or describe_reuse(output.metrics))
            except KeyboardInterrupt:
                typer.echo()
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
    if sys.stdout is None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return sys.stdin.readline() or None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, PLC0415  # lets input() edit lines, where there is one
    try:
        return input(ASK)
    except EOFError:
        typer.echo()
        return None
