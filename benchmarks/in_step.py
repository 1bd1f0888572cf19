"""First tokens of restored prompts while others compute: with loads beside the batch, and within the step that computes."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

from cargohold import OffloadConfig, SamplingParams
from cargohold.base_llm import build_engine
from cargohold.connector.factory import connector_factory
from cargohold.connector.kernel import loads
from cargohold.engine.config import EngineConfig, plan_engine
from cargohold.engine.llm_engine import LLMEngine
from cargohold.engine.model.info import describe_model
from cargohold.engine.outputs import RequestOutput
from cargohold.protocol import metrics

MODEL = "smollm2"
BLOCK_TOKENS = 16
WAYS = ("beside", "within")


@dataclass(frozen=True)
class Workload:
    """Prompts that come back while other requests generate.

    Attributes:
        contexts: number of prompts that come back, once in each turn, one in every ``every`` steps.
        context_tokens: tokens of each.
        generating: number of requests that generate all the time.
        every: a prompt comes back in each step whose number this divides, and a new one a step later.
        new_tokens: tokens of each new prompt.
        turns: how often each way is measured, in turns.
    """

    contexts: int = 10
    context_tokens: int = 256
    generating: int = 4
    every: int = 5
    new_tokens: int = 64
    turns: int = 4


@dataclass
class Turn:
    """What one turn has measured: seconds to the first tokens, and of steps, by the clock and of the processor; all tokens."""

    first_s: list[float] = field(default_factory=list)
    first_cpu_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    step_cpu_s: list[float] = field(default_factory=list)
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def note(
        self, outputs: list[RequestOutput], arrived: dict[str, tuple[float, float]], now: tuple[float, float]
    ) -> None:
        """Note what prompts that came back have got now."""
        for output in outputs:
            since = arrived.get(output.request_id)
            if since is None or not output.token_ids:
                continue
            if output.request_id not in self.tokens:
                self.first_s.append(now[0] - since[0])
                self.first_cpu_s.append(now[1] - since[1])
            self.tokens[output.request_id] = tuple(output.token_ids)


def run(*, quick: bool) -> dict[str, Any]:
    workload = Workload(10, 48, 1, 2, 16, 1) if quick else Workload()
    with engine_for(workload) as engine:
        prompts = Prompts(workload, engine.limits.vocab_size)
        for context in prompts.contexts:
            engine.add_request(context, sampling(1))
            drain(engine)
        play(engine, prompts)  # measures copies and steps, on which the connector decides
        turns: dict[str, list[Turn]] = {way: [] for way in WAYS}
        shares = {}
        for at in range(workload.turns):
            for way in WAYS[:: 1 if at % 2 else -1]:
                before = engine.stats()
                with patch.object(loads, "MAX_IN_STEP_S", loads.MAX_IN_STEP_S if way == "within" else -1.0):
                    turns[way].append(play(engine, prompts))
                grown = {name: value - before.get(name, 0) for name, value in engine.stats().items()}
                shares[way] = round(grown.get(metrics.LOADS_IN_STEP, 0) / grown[metrics.PLANNED.of("load")], 2)
    return {
        "workload": {"model": MODEL, "dtype": "float32", "block_tokens": BLOCK_TOKENS, **vars(workload)},
        "loads_within_a_step": shares,
        **{what: compared(turns, what) for what in ("first_s", "first_cpu_s", "step_s", "step_cpu_s")},
        "identical": len({tuple(turn.tokens.items()) for of_way in turns.values() for turn in of_way}) == 1,
    }


@contextmanager
def engine_for(workload: Workload) -> Iterator[LLMEngine]:
    """An engine whose pool holds half of the contexts, and so none that comes back."""
    running = 6 * workload.generating + 4 * (workload.context_tokens // BLOCK_TOKENS + 3)
    blocks = workload.contexts * workload.context_tokens // BLOCK_TOKENS // 2 + running
    config = EngineConfig(model=MODEL, dtype="float32", block_tokens=BLOCK_TOKENS, num_device_blocks=blocks)
    plan = plan_engine(config, describe_model(config.model, config.dtype))
    engine = build_engine(plan, connector_factory(OffloadConfig(host_bytes="2GiB")))
    try:
        yield engine
    finally:
        engine.shutdown()


class Prompts:
    """Prompts of random tokens: the contexts are the same in all turns, questions and new prompts are not."""

    def __init__(self, workload: Workload, vocab_size: int) -> None:
        self._random = random.Random(1)
        self._vocab_size = vocab_size
        self.workload = workload
        self.contexts = [self.new(workload.context_tokens) for _ in range(workload.contexts)]
        self.questions = [self.new(BLOCK_TOKENS) for _ in self.contexts]

    def new(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(self._vocab_size) for _ in range(num_tokens)]


def play(engine: LLMEngine, prompts: Prompts) -> Turn:
    """Let all contexts come back, each in the middle of a step, and measure from there."""
    workload, turn = prompts.workload, Turn()
    arrived: dict[str, tuple[float, float]] = {}
    generating: set[str] = set()
    while len(turn.first_s) < workload.contexts:
        while len(generating) < workload.generating:
            generating.add(engine.add_request(prompts.new(2 * BLOCK_TOKENS), sampling(64)))
        before = time.perf_counter(), time.process_time()
        outputs = engine.step()
        after = time.perf_counter(), time.process_time()
        number, remainder = divmod(len(turn.step_s), workload.every)
        turn.step_s.append(after[0] - before[0])
        turn.step_cpu_s.append(after[1] - before[1])
        turn.note(outputs, arrived, after)
        generating.difference_update(output.request_id for output in outputs if output.finished)
        if not remainder and number < workload.contexts:
            name = engine.add_request(
                prompts.contexts[number] + prompts.questions[number], sampling(8), request_id=f"back {number}"
            )
            arrived[name] = (before[0] + after[0]) / 2, (before[1] + after[1]) / 2
        elif remainder == 1:
            engine.add_request(prompts.new(workload.new_tokens), sampling(1))
    for request_id in generating:
        engine.abort(request_id)
    turn.note(drain(engine), arrived, (0.0, 0.0))
    return turn


def sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def drain(engine: LLMEngine) -> list[RequestOutput]:
    """Step until all is done; return all outputs."""
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def compared(turns: dict[str, list[Turn]], what: str) -> dict[str, float]:
    """Medians of both ways, and the ratio of their means: steps are of several kinds."""
    values = {way: [value for turn in turns[way] for value in getattr(turn, what)] for way in WAYS}
    ratio = fmean(values["within"]) / fmean(values["beside"])
    return {**{way: round(median(values[way]), 4) for way in WAYS}, "ratio_of_means": round(ratio, 3)}
