"""How long a connector may keep requests waiting, and what is not its fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from vllm.config import CacheConfig

from cargohold.integrations.vllm import compat
from cargohold.integrations.vllm.connector import CargoholdConnector
from cargohold.integrations.vllm.layout import shares_load_ends
from cargohold.protocol import AttentionKind, KVCacheGroup, metrics
from cargohold.transfer import Direction
from tests.vllm.common import EAGER, ask_twice, forget, make_prompts, tokens
from tests.vllm.engine import Answer, Engine
from tests.vllm.faults import Faults


class Clock:
    """Time that passes when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of connectors started after this."""
    clock = Clock()
    monkeypatch.setattr(CargoholdConnector, "_clock", lambda _: clock)
    return clock


def status(engine: Engine, request_id: str) -> str:
    """Where vLLM has a request, which it gives longer names."""
    (found,) = [request for name, request in engine.scheduler.requests.items() if name.startswith(request_id)]
    return str(found.status.name)


def test_who_waits_for_a_place_does_not_wait_for_the_connector(
    vllm_model: Callable[[str], str], start: Callable[..., Any], faults: Faults, clock: Clock
) -> None:
    engine = start(vllm_model("llama"), EAGER, max_num_seqs=1)
    (known,) = make_prompts(1, 330)
    (expected,) = ask_twice(engine, [known])
    forget(engine)
    engine.add("loads", known, 60)
    engine.add("waits", known, 6)
    engine.step()
    while status(engine, "loads") != "RUNNING":
        engine.step()
    clock.now += 1000
    ended: dict[str, Any] = {}
    while engine.is_busy:
        ended |= engine.step()
    assert not engine.side.guard.broken
    assert ended["waits"].tokens == expected.tokens


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_connector_sees_waiting_requests_in_vllms_order(
    policy: str, vllm_model: Callable[[str], str], start: Callable[..., Any], faults: Faults
) -> None:
    """Found by use: with priorities, they were shown in the order in which they had come."""
    engine = start(vllm_model("llama"), EAGER, max_num_seqs=1, scheduling_policy=policy)
    if not hasattr(engine.scheduler, "kv_holding_waiting"):
        pytest.skip(f"vLLM {compat.VLLM_VERSION} has other queues")
    (known,) = make_prompts(1, 330)
    ask_twice(engine, [known])
    forget(engine)
    for number, priority in enumerate((0, 5, 3, 9, -1)):
        engine.add(str(number), known if number == 4 else make_prompts(1, 60, seed=number)[0], 20, priority=priority)
    scheduler = engine.scheduler
    seen: set[str] = set()
    faults.hold_polls = 3  # a load keeps a request waiting for some steps
    while engine.is_busy:
        engine.step()
        waiting = [*scheduler.kv_holding_waiting, *scheduler.waiting]
        assert [own.request_id for own in engine.side._context.waiting_requests()] == [
            own.request_id for own in waiting
        ]
        seen.update(own.status.name for own in waiting)
    assert seen >= {"WAITING", "WAITING_FOR_REMOTE_KVS"}


RETAINED = "prefix_cache_retention_interval"
HELD_STEPS = 200
SPARSE = [("gemma3", 1500), ("mistral-window", 400), ("lfm2", 400)]
"""Models of which vLLM's prefix cache keeps only some blocks, and device blocks in which their prompts find room."""


@dataclass
class Crowd:
    """What became of requests that came together.

    Attributes:
        answers: theirs, in order.
        num_loads: loads of all of them.
        most_loads: loads in flight at a time.
        num_steps: steps until the last of them had ended.
    """

    answers: list[Answer]
    num_loads: int
    most_loads: int = 0
    num_steps: int = 0


def ask_together(engine: Engine, prompts: Sequence[Sequence[int]], faults: Faults) -> Crowd:
    """Let requests arrive at once while each load takes ``HELD_STEPS`` steps."""
    faults.hold_polls = HELD_STEPS
    faults.counts.clear()
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, 1)
    ended: dict[str, Answer] = {}
    crowd = Crowd([], 0)
    while engine.is_busy:
        ended |= engine.step()
        crowd.num_steps += 1
        crowd.most_loads = max(crowd.most_loads, len(engine.side._loads))
    faults.hold_polls = 0
    crowd.answers = [ended[str(number)] for number in range(len(prompts))]
    crowd.num_loads = sum(count for (direction, _), count in faults.counts.items() if direction is Direction.LOAD)
    return crowd


@pytest.mark.parametrize(
    ("kind", "num_blocks", "options", "keeps_ends", "num_loads"),
    [
        ("llama", 400, {}, True, 1),
        ("mistral-window", 400, {RETAINED: None}, True, 1),
        ("mistral-window", 400, {}, True, 1),
        ("gemma3", 1500, {}, True, 1),
        ("lfm2", 400, {}, True, 1),
        ("gemma3", 1500, {}, False, 5),
    ],
)
def test_requests_wait_for_another_ones_load_if_they_find_it_on_the_device(
    kind: str,
    num_blocks: int,
    options: dict[str, Any],
    keeps_ends: bool,
    num_loads: int,
    vllm_model: Callable[[str], str],
    start: Callable[..., Any],
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by a review: of windows and states vLLM keeps the end of each prompt only, so requests waited in vain, in a row.

    Then each loaded for itself. Now vLLM keeps them at the end of a load, too, if this version of it can.
    """
    if kind != "llama" and RETAINED not in CacheConfig.__dataclass_fields__:
        pytest.skip("this version of vLLM keeps all of it")
    if not keeps_ends:
        monkeypatch.setattr(compat, "KEEPS_SHARED_PREFIXES", False)
    model = vllm_model(kind)
    (shared,) = make_prompts(1, 320)
    prompts = [[*shared, *tail] for tail in make_prompts(5, 100, seed=3)]
    reference = start(model, num_blocks=1500)
    expected = tokens([reference.ask([prompt], 1)[0] for prompt in prompts])
    engine = start(model, EAGER, num_blocks=num_blocks, **options)
    engine.ask([[*shared, 5, 6, 7]], 1)
    forget(engine)
    crowd = ask_together(engine, prompts, faults)
    assert tokens(crowd.answers) == expected
    assert (crowd.most_loads, crowd.num_loads) == (num_loads, num_loads)
    assert [answer.device for answer in crowd.answers] == [320] * 5
    assert crowd.num_steps < 2 * HELD_STEPS, "nobody waits in vain"


@pytest.mark.parametrize(("kind", "num_blocks"), SPARSE)
def test_a_later_request_finds_the_whole_load_of_another_on_the_device(
    kind: str, num_blocks: int, vllm_model: Callable[[str], str], start: Callable[..., Any]
) -> None:
    engine = start(vllm_model(kind), EAGER, num_blocks=num_blocks)
    (shared,) = make_prompts(1, 320)
    engine.ask([[*shared, 5, 6, 7]], 1)
    forget(engine)
    answers = [engine.ask([[*shared, *tail]], 1)[0] for tail in make_prompts(3, 100, seed=3)]
    assert [(answer.restored, answer.device) for answer in answers] == [(320, 320), (0, 320), (0, 320)]


@pytest.mark.parametrize(("kind", "num_blocks"), SPARSE)
def test_requests_do_not_wait_for_a_load_that_ends_elsewhere(
    kind: str, num_blocks: int, vllm_model: Callable[[str], str], start: Callable[..., Any], faults: Faults
) -> None:
    """Of windows and states, only those at the end of a load are loaded, and none where two prompts begin to differ."""
    if RETAINED not in CacheConfig.__dataclass_fields__:
        pytest.skip("this version of vLLM keeps all of it")
    model = vllm_model(kind)
    (shared,) = make_prompts(1, 320)
    # Three conversations that go on, and two requests that have the beginning in common with them.
    known = [[*shared, *tail] for tail in make_prompts(3, 160, seed=3)]
    prompts = [[*prompt, *tail] for prompt, tail in zip([*known, shared, shared], make_prompts(5, 50, 6), strict=True)]
    reference = start(model, num_blocks=1500)
    expected = tokens([reference.ask([prompt], 1)[0] for prompt in prompts])
    engine = start(model, EAGER, num_blocks=num_blocks)
    for prompt in [*known, shared]:
        engine.ask([[*prompt, 5, 6, 7]], 1)
    forget(engine)
    crowd = ask_together(engine, prompts, faults)
    assert tokens(crowd.answers) == expected
    assert (crowd.most_loads, crowd.num_loads) == (4, 4)
    assert [answer.device for answer in crowd.answers] == [480, 480, 480, 320, 320]
    assert crowd.num_steps < 2 * HELD_STEPS, "nobody waits in vain"


@pytest.mark.skipif(not compat.KEEPS_SHARED_PREFIXES, reason="this version of vLLM marks no shared prefixes")
@pytest.mark.parametrize(("kind", "num_blocks"), SPARSE)
def test_what_requests_share_is_loaded_once_where_one_of_them_ends_there(
    kind: str, num_blocks: int, vllm_model: Callable[[str], str], start: Callable[..., Any], faults: Faults
) -> None:
    """Conversations that go on behind the same beginning load only what each has behind it."""
    model = vllm_model(kind)
    (shared,) = make_prompts(1, 320)
    known = [[*shared, *tail] for tail in make_prompts(2, 160, seed=3)]
    prompts = [[*prompt, *tail] for prompt, tail in zip([shared, *known], make_prompts(3, 50, 6), strict=True)]
    reference = start(model, num_blocks=1500)
    expected = tokens([reference.ask([prompt], 1)[0] for prompt in prompts])
    engine = start(model, EAGER, num_blocks=num_blocks)
    for prompt in [shared, *known]:
        engine.ask([[*prompt, 5, 6, 7]], 1)
    forget(engine)
    crowd = ask_together(engine, prompts, faults)
    assert tokens(crowd.answers) == expected
    assert [(answer.restored, answer.device) for answer in crowd.answers] == [(320, 320), (160, 480), (160, 480)]


@pytest.mark.skipif(not compat.KEEPS_SHARED_PREFIXES, reason="this version of vLLM marks no shared prefixes")
@pytest.mark.parametrize("drops", [True, False])
def test_loads_are_not_shared_by_their_ends_where_vllm_drops_the_last_block_of_a_hit(drops: bool) -> None:
    speculation = SimpleNamespace(use_eagle=lambda: drops, use_eagle_block_drop=lambda: drops)
    group = KVCacheGroup(0, AttentionKind.SLIDING_WINDOW, 32, ("layer",), window_tokens=64)
    assert shares_load_ends(SimpleNamespace(speculative_config=speculation), [group]) is not drops


def test_a_pause_is_not_the_connectors_fault(
    vllm_model: Callable[[str], str], start: Callable[..., Any], clock: Clock
) -> None:
    engine = start(vllm_model("llama"), EAGER)
    prompts = make_prompts(3, 330)
    expected = tokens(ask_twice(engine, prompts))
    forget(engine)
    engine.add("gone", prompts[0], 6)
    engine.step()
    assert status(engine, "gone") == "WAITING_FOR_REMOTE_KVS"
    engine.abort("gone")
    clock.now += 1000  # in one process nobody steps while nobody asks
    for prompt, answer in zip(prompts, expected, strict=True):
        assert engine.ask([prompt], 6)[0].tokens == answer
        clock.now += 1000
    assert not engine.side.guard.broken


def test_who_wants_nothing_cached_gets_nothing_restored_and_does_not_wait(
    vllm_model: Callable[[str], str], start: Callable[..., Any], faults: Faults, clock: Clock
) -> None:
    engine = start(vllm_model("llama"), EAGER)
    (known,) = make_prompts(1, 330)
    (expected,) = ask_twice(engine, [known])
    forget(engine)
    faults.hold_polls = 20
    engine.add("loads", known, 6)
    engine.add("scores", known, 60, prompt_logprobs=1)
    engine.step()
    assert status(engine, "loads") == "WAITING_FOR_REMOTE_KVS"
    assert status(engine, "scores") == "RUNNING"
    assert engine.side._stats[metrics.DEFERRED_LOOKUPS.of()] == 0
    ended: dict[str, Any] = {}
    while engine.is_busy:
        ended |= engine.step()
        clock.now += 5  # less than the limit in the time of a load, and more in that of an answer
    assert not engine.side.guard.broken
    assert ended["scores"].restored == 0
    assert ended["scores"].tokens[:6] == expected.tokens
