"""Models for tests: one whose calls return when all is settled, and access to an engine in its own thread."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from cargohold import LLM, RequestOutput, SamplingParams
from cargohold.base_llm import BaseLLM, Prompt
from cargohold.engine.core.scheduler import Scheduler
from cargohold.engine.engine_thread import EngineThread
from cargohold.engine.llm_engine import LLMEngine

T = TypeVar("T")


class SettledLLM(LLM):
    """Its calls return when copies and writes have ended, so that what the next one finds does not depend on their speed."""

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        outputs = super().generate(prompts, sampling, **options)
        self.settle()
        return outputs

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any
    ) -> Generator[RequestOutput]:
        outputs = super().stream(prompt, sampling, **options)
        return self._settled_after(outputs)

    def _settled_after(self, outputs: Generator[RequestOutput]) -> Generator[RequestOutput]:
        yield from outputs
        self.settle()


def in_engine(llm: BaseLLM, question: Callable[[LLMEngine], T]) -> T:
    """Ask the engine something between two of its steps."""
    return thread_of(llm).ask(question).result()


def scheduler_of(llm: BaseLLM) -> Scheduler:
    """The scheduler, to look at while the engine has nothing to do or has ended."""
    return thread_of(llm)._engine.scheduler


def thread_of(llm: BaseLLM) -> EngineThread:
    """The thread in which the engine runs, to post to or to close."""
    return llm._engine
