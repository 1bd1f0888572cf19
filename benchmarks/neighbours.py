"""What vLLM's own connectors find and ours does not, request by request, in vLLM's own scheduler.

Models, copies and time are simulated (``cargohold.lab.vllm``): the counts are the same on any machine. What is found shows in
what is left to compute: the fewer tokens, the more was found, on the device or below it, also after a preemption.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from random import Random
from typing import Any, Final

from benchmarks.environment import NotInstalledError
from cargohold.connector.config import EXCLUSIVE
from cargohold.engine.core.request import SchedulerStep, StepOutput
from cargohold.engine.core.request_queues import LoadFailurePolicy, QueuePolicy
from cargohold.lab.simulation.connectors import NO_CONNECTOR, ConnectorPlan, TierPlan
from cargohold.lab.simulation.fingerprints import GroupPlan
from cargohold.lab.simulation.replica import Replica
from cargohold.lab.simulation.run import ScenarioRun
from cargohold.lab.simulation.timeline import Timeline
from cargohold.lab.simulation.traffic import Action, Writer
from cargohold.lab.simulation.transfers import LinkProfile
from cargohold.lab.simulation.world import Scenario, Shape
from cargohold.protocol import AttentionKind

NOBODY: Final = "no connector"
ALONE: Final = "nothing forgotten"
OURS: Final = "Cargohold"
THEIRS: Final = ("OffloadingConnector", "SimpleCPUOffloadConnector")
CONTENDERS: Final = (NOBODY, ALONE, *THEIRS, OURS)
HOST_CHUNKS: Final = 4000
"""More than any traffic fills: nothing is evicted from host memory."""


@dataclass(frozen=True, slots=True)
class Model:
    """How a model's layers look back, and what vLLM does with it.

    Attributes:
        groups: its KV-cache groups.
        blocks_per_chunk: blocks per chunk, of all connectors that have chunks.
        unit: ``--prefix-match-unit``.
        drafted: tokens that a draft model proposes in each step.
    """

    groups: tuple[GroupPlan, ...]
    blocks_per_chunk: int = 1
    unit: int | None = None
    drafted: int = 0


FULL: Final = GroupPlan(block_tokens=4)
WINDOW: Final = GroupPlan(AttentionKind.SLIDING_WINDOW, 4, 10)
STATED: Final = (GroupPlan(block_tokens=16), GroupPlan(AttentionKind.RECURRENT, 16))
MODELS: Final[Mapping[str, Model]] = {
    "full attention": Model((FULL,)),
    "full attention, chunks of 3 blocks": Model((FULL,), 3),
    "full attention, 1 token drafted": Model((FULL,), drafted=1),
    "full attention, 3 tokens drafted": Model((FULL,), drafted=3),
    "a window beside it": Model((FULL, WINDOW)),
    "a window beside it, chunks of 3 blocks": Model((FULL, WINDOW), 3),
    "a window with blocks of another size": Model((FULL, replace(WINDOW, block_tokens=8))),
    "a window, 1 token drafted": Model((FULL, WINDOW), drafted=1),
    "local attention beside it": Model((FULL, GroupPlan(AttentionKind.CHUNKED_LOCAL, 4, 8))),
    "recurrent state beside it": Model(STATED),
    "recurrent state, hashed by 4 tokens": Model(STATED, unit=4),
}


@dataclass(slots=True)
class Traffic:
    """Writes requests, between which the device forgets what it had."""

    writer: Writer

    def ask(self, prompt: Sequence[int], max_tokens: int, *, times: int = 1) -> tuple[int, ...]:
        """Several requests at once for the same prompt; then other prompts. Returns the conversation so far."""
        asks = [self.writer.ask(prompt, max_tokens + at) for at in range(times)]
        for _ in range(2):
            self.writer.now += 5.0
            self.writer.ask(self.writer.text(100, 100), 1)
        self.writer.now += 5.0
        return asks[0].prompt + tuple(asks[0].answer())

    def text(self, low: int, high: int) -> tuple[int, ...]:
        """New tokens."""
        return self.writer.text(low, high)


def same_prompts(to: Traffic) -> None:
    prompts = [to.text(40, 80) for _ in range(3)]
    for prompt in prompts * 3:
        to.ask(prompt, 2)


def shared_beginnings(to: Traffic) -> None:
    system = to.text(70, 110)
    for _ in range(6):
        to.ask(system + to.text(8, 50), 2)


def turns(to: Traffic) -> None:
    told = to.text(30, 60)
    for _ in range(6):
        told = to.ask(told + to.text(5, 30), 6)


def forks(to: Traffic) -> None:
    trunk = to.text(60, 80)
    for _ in range(3):
        to.ask(trunk + to.text(8, 40), 3)
        told = to.ask(trunk + to.text(8, 40), 3)
        trunk = told[: to.writer.random.randint(len(trunk), len(told))]


def several_answers(to: Traffic) -> None:
    for _ in range(3):
        prompt = to.text(60, 90)
        to.ask(prompt, 3, times=4)
        to.ask(prompt, 3, times=4)


def preemption(to: Traffic) -> None:
    for _ in range(6):
        to.writer.ask(to.text(20, 40), 60)


TRAFFIC: Final = (same_prompts, shared_beginnings, turns, forks, several_answers, preemption)


@dataclass(slots=True)
class Computed(Timeline):
    """Counts the tokens that each request computes."""

    tokens: Counter[str] = field(default_factory=Counter)

    def step(self, now: float, engine: Replica, step: SchedulerStep, output: StepOutput) -> None:
        self.tokens.update({share.request_id: share.num_scheduled_tokens for share in step.scheduled})


def written(name: str, seed: int) -> tuple[Action, ...]:
    """A traffic."""
    writer = Writer(Random(f"{name} {seed}"))
    next(write for write in TRAFFIC if write.__name__ == name)(Traffic(writer))
    return writer.sorted_actions()


def play(model: Model, actions: Sequence[Action], contender: str) -> Counter[str]:
    """Play a traffic; return how many tokens each request computes. Raises what goes wrong."""
    computed = Computed()
    result = _run(model, tuple(actions), contender, computed).play()
    if result.error is not None:
        raise result.error
    return computed.tokens


def _run(model: Model, actions: tuple[Action, ...], contender: str, timeline: Timeline) -> ScenarioRun:
    from cargohold.lab.vllm.others.plan import StrangerPlan  # noqa: PLC0415  # needs vLLM
    from cargohold.lab.vllm.others.recipe import StrangerRun  # noqa: PLC0415
    from cargohold.lab.vllm.others.world import StrangerWorld  # noqa: PLC0415
    from cargohold.lab.vllm.recipe import VllmRun, VllmWorld  # noqa: PLC0415

    shape = _shape(model, actions)
    if contender in THEIRS:
        config: dict[str, Any] = {"cpu_bytes_to_use": 4096 * HOST_CHUNKS}
        if contender == THEIRS[0]:
            config["blocks_per_chunk"] = model.blocks_per_chunk
        theirs = Scenario(1, "", shape, StrangerPlan(contender, parts=((contender, config),)), {}, 0.0, actions)
        return StrangerRun(theirs, timeline=timeline, world=StrangerWorld(theirs))
    plan = NO_CONNECTOR
    if contender == OURS:
        options = {"mode": EXCLUSIVE, "blocks_per_chunk": model.blocks_per_chunk}
        plan = ConnectorPlan(EXCLUSIVE, (TierPlan(HOST_CHUNKS, None, options),))
    elif contender == ALONE:
        shape = replace(shape, num_blocks=100 * shape.num_blocks)
    own = Scenario(1, "", shape, plan, {}, 0.0, actions)
    return VllmRun(own, timeline=timeline, world=VllmWorld(own))


def _shape(model: Model, actions: Sequence[Action]) -> Shape:
    """An engine whose device holds hardly more than one request."""
    from cargohold.lab.vllm import configuration  # noqa: PLC0415  # needs vLLM

    longest = max(len(action.prompt) + action.max_tokens for action in actions)  # type: ignore[union-attr]  # all ask
    scheduler = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "policy": QueuePolicy.FCFS,
        "prefix_caching": True,
        "load_failure_policy": LoadFailurePolicy.RECOMPUTE,
        "emit_events": False,
        "emit_salted_events": False,
        configuration.MAX_MODEL_LEN: longest + 1,
        configuration.ASYNC: False,
        **({configuration.RETAINED: 0} if configuration.CAN_RETAIN_LESS else {}),
        **({configuration.MATCH_UNIT: model.unit} if model.unit else {}),
        **({configuration.DRAFTED: model.drafted} if model.drafted else {}),
    }
    shape = Shape(model.groups, 2, 1, scheduler, LinkProfile())
    return replace(shape, num_blocks=configuration.num_blocks_needed(shape) + 6)


@dataclass(frozen=True, slots=True)
class Row:
    """A model under one traffic.

    Attributes:
        computed: by contender, tokens computed; of one that fails, how.
        found_less: requests that compute more with ours than with the better one of theirs, and how many tokens more.
    """

    computed: Mapping[str, int | str]
    found_less: Mapping[str, int]


def compare(model: Model, traffic: str, seeds: Sequence[int], contenders: Sequence[str] = CONTENDERS) -> Row:
    """Play a traffic with every contender."""
    computed: dict[str, Any] = dict.fromkeys(contenders, 0)
    less: dict[str, int] = {}
    for seed in seeds:
        actions = written(traffic, seed)
        by_contender: dict[str, Counter[str]] = {}
        for contender in contenders:
            try:
                by_contender[contender] = play(model, actions, contender)
            except Exception as error:  # of theirs: what docs/findings.md lists
                if contender == OURS:
                    raise
                computed[contender] = type(error).__name__
                continue
            if not isinstance(computed[contender], str):
                computed[contender] += by_contender[contender].total()
        less |= {f"{name} of seed {seed}": more for name, more in _less(by_contender)}
    return Row(computed, less)


def _less(by_contender: Mapping[str, Counter[str]]) -> Iterator[tuple[str, int]]:
    theirs = [by_contender[name] for name in THEIRS if name in by_contender]
    for name, num_computed in by_contender[OURS].items():
        more = num_computed - min((of[name] for of in theirs), default=num_computed)
        if more > 0:
            yield name, more


def run(*, quick: bool) -> dict[str, Any]:
    """Compare every model under every traffic."""
    if find_spec("vllm") is None:
        raise NotInstalledError("vLLM is not installed; run this in an environment that has it")
    rows = []
    for name, model in list(MODELS.items())[:1] if quick else MODELS.items():
        for write in TRAFFIC[2:3] if quick else TRAFFIC:
            row = compare(model, write.__name__, (0,) if quick else (0, 1, 2))
            rows.append(
                {"model": name, "traffic": write.__name__, "computed": row.computed, "found_less": row.found_less}
            )
            cells = ", ".join(f"{contender} {count}" for contender, count in row.computed.items())
            less = f"; {len(row.found_less)} find less, {sum(row.found_less.values())} tokens" if row.found_less else ""
            print(f"{name}, {write.__name__}: computed with {cells}{less}", flush=True)
    return {"rows": rows}
