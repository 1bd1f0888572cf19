"""``cargohold chat``: talk to a model, and see after each answer what was reused from where."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import typer

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
from cargohold.errors import RequestError
from cargohold.llm import LLM

HELP = "/new starts over, /why explains the last answer's cache hits, /quit leaves"


@app.command()
def chat(  # noqa: PLR0913, PLR0917  # each argument is an option of the command
    model: ModelArgument,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    host_bytes: HostBytes = "1GiB",
    num_device_blocks: DeviceBlocks = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
) -> None:
    """Talk to a model. Ctrl-C ends an answer, Ctrl-D the conversation."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    with loaded(model, host_bytes=host_bytes, num_device_blocks=num_device_blocks, dtype=dtype, device=device) as llm:
        errors.print(HELP, style="dim")
        Conversation(llm, sampling).run()


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
                case "/why":
                    self._explain()
                case command if command.startswith("/"):
                    errors.print(f"there is no {command}; {HELP}", style="dim")
                case question:
                    self._answer(question)

    def _answer(self, question: str) -> None:
        self.messages.append({"role": "user", "content": question})
        text = ""
        try:
            for output in self.llm.stream(self.llm.chat_prompt(self.messages), self.sampling):
                sys.stdout.write(output.new_text)
                sys.stdout.flush()
                text, self.last = output.text, output
        except KeyboardInterrupt:
            errors.print("\n(interrupted)", style="dim")
        except RequestError as error:
            self.messages.pop()
            errors.print(str(error), style="red")
            return
        sys.stdout.write("\n")
        self.messages.append({"role": "assistant", "content": text})
        if self.last is not None and self.last.finished:
            errors.print(describe_reuse(self.last.metrics), style="dim")

    def _explain(self) -> None:
        notes = () if self.last is None else self.last.cache_notes
        errors.print("\n".join(notes) or "nothing to explain yet", style="dim")


def _ask() -> str | None:
    try:
        return str(typer.prompt("you", prompt_suffix="> ", default="", show_default=False, err=True))
    except (typer.Abort, EOFError):
        return None
