"""Random traffic on a tiny device pool, against the same requests without a connector; also with faults in every transfer.

Fresh seeds are drawn by ``conftest`` and named in the tests' ids; CARGOHOLD_VLLM_SEED repeats one, CARGOHOLD_VLLM_ROUNDS says
how many tests draw some, for longer runs by hand.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from cargohold.protocol import TransferOutcome
from cargohold.transfer import CopyJob
from tests.vllm.faults import Faults

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from tests.vllm.common import CAN_DRAFT, COMPOSED, EAGER, LAZY
from tests.vllm.engine import Answer, Engine
from tests.vllm.models import VOCAB_SIZE, save_guesser

MAX_PROMPT_TOKENS = 360
LIMITS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 6, "max_num_batched_tokens": 192}
# No recurrent state: vLLM's answers for it depend on what else is in the batch and on its own prefix cache, without any
# connector. tests/vllm/test_models.py asks such models one request at a time.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_blocks": 36},
    "mistral-window": {"num_blocks": 18},
    "gemma3": {"num_blocks": 110},
}
CONNECTORS: dict[str, dict[str, Any]] = {
    "eager": {**EAGER, "host_bytes": "4MiB"},
    "eager in pairs": {**EAGER, "host_bytes": "4MiB", "policy": "lru", "blocks_per_chunk": 2},
    "lazy": {**LAZY, "host_bytes": "4MiB"},
    "composed": COMPOSED,
}
FIXED = (1, 2, 3, 4)
FRESH = int(os.environ["CARGOHOLD_VLLM_SEED"])
ROUNDS = int(os.environ.get("CARGOHOLD_VLLM_ROUNDS") or 1)
SEEDS = {"fixed": FIXED} | {f"fresh-{seed}": (seed, seed + 1) for seed in range(FRESH, FRESH + 2 * ROUNDS, 2)}


@dataclass(frozen=True)
class Arrival:
    """A request of the workload.

    Attributes:
        step: when it comes.
        prompt: its tokens.
        max_tokens: how long its answer is.
        abort_after: steps after which its client goes away; ``None`` if it waits.
    """

    step: int
    prompt: tuple[int, ...]
    max_tokens: int
    abort_after: int | None


def make_workload(seed: int, num_requests: int = 18) -> list[Arrival]:
    """Conversations that go on, prompts that share beginnings, and some that share nothing."""
    rng = random.Random(seed)
    talks = [_tokens(rng, rng.randint(40, 200)) for _ in range(5)]
    arrivals = []
    step = 0
    for _ in range(num_requests):
        talk = rng.randrange(len(talks))
        if rng.random() < 0.6:
            talks[talk] = (talks[talk] + _tokens(rng, rng.randint(1, 90)))[:MAX_PROMPT_TOKENS]
        prompt = talks[talk]
        if rng.random() < 0.25:
            prompt = prompt[: rng.randint(1, len(prompt))] + _tokens(rng, rng.randint(1, 120))
        step += rng.choice((0, 0, 1, 5, 20))
        abort_after = rng.randint(0, 15) if rng.random() < 0.15 else None
        arrivals.append(Arrival(step, prompt[:MAX_PROMPT_TOKENS], rng.randint(1, 25), abort_after))
    return arrivals


def serve(
    engine: Engine, workload: list[Arrival], wishes: Callable[[int], Mapping[str, Any]] = lambda _: {}
) -> dict[int, Answer]:
    """The answers of those who waited for them, by number; ``wishes`` gives what more a request wants."""
    waiting = dict(enumerate(workload))
    aborts: dict[int, list[str]] = {}
    answers: dict[int, Answer] = {}
    step = 0
    while waiting or engine.is_busy:
        for number in [number for number, arrival in waiting.items() if arrival.step <= step]:
            arrival = waiting.pop(number)
            engine.add(str(number), arrival.prompt, arrival.max_tokens, **wishes(number))
            if arrival.abort_after is not None:
                aborts.setdefault(step + arrival.abort_after, []).append(str(number))
        for request_id in aborts.pop(step, ()):
            engine.abort(request_id)
        answers |= {int(request_id): answer for request_id, answer in engine.step().items()}
        step += 1
    return {number: answers[number] for number, arrival in enumerate(workload) if arrival.abort_after is None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seeds", SEEDS.values(), ids=SEEDS.keys())
def test_tokens_never_depend_on_offloading(
    kind: str,
    seeds: tuple[int, ...],
    vllm_model: Callable[[str], str],
    start: Callable[..., Engine],
    faults: Faults,
) -> None:
    workloads = [make_workload(seed) for seed in seeds]
    options = KINDS[kind] | LIMITS
    reference = start(vllm_model(kind), **(options | {"num_blocks": 2000}))
    expected = [serve(reference, workload) for workload in workloads]
    num_restored = 0
    for at, (seed, workload) in enumerate(zip(seeds, workloads, strict=True)):
        rng = random.Random(seed)
        connector = list(CONNECTORS)[at] if seeds is FIXED else rng.choice(list(CONNECTORS))
        faults.outcome, faults.hold_polls = lambda _job: TransferOutcome.DONE, 0
        engine = start(
            vllm_model(kind),
            CONNECTORS[connector],
            **options,
            **speculation(vllm_model(kind), random.Random(f"{seed}/drafts")),
            async_scheduling=rng.random() < 0.5,
        )
        for state in ("sound", "faulty"):
            answers = serve(engine, workload)
            for number, answer in answers.items():
                where = f"request {number} of seed {seed} with {connector}, {state}"
                assert answer.tokens == expected[at][number].tokens, where
            num_restored += sum(answer.restored for answer in answers.values())
            faults.outcome, faults.hold_polls = unreliable(rng), rng.choice((0, 1, 4))
        engine.check_settled()
        assert not engine.side.guard.broken
    if seeds is FIXED:  # fresh ones may happen to restore or to fail nothing
        assert num_restored > 1000, "next to nothing was restored: this proves nothing"
        assert any(outcome is not TransferOutcome.DONE for _, outcome in faults.counts)


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(count))


def speculation(model: str, rng: random.Random) -> dict[str, Any]:
    """In half of the engines that can, a draft model whose guesses are often wrong."""
    if not CAN_DRAFT or not model.endswith("llama") or rng.random() < 0.5:
        return {}
    drafts = {"method": "draft_model", "model": save_guesser(model, 0.05), "num_speculative_tokens": 3}
    return {"speculative_config": drafts}


def unreliable(rng: random.Random) -> Callable[[CopyJob], TransferOutcome]:
    outcomes = (TransferOutcome.DONE, TransferOutcome.ABANDONED, TransferOutcome.FAILED)
    return lambda _job: rng.choices(outcomes, (8, 1, 1))[0]
