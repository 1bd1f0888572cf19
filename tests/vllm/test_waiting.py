"""How long a connector may keep requests waiting, and what is not its fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from vllm.config import CacheConfig

from cargohold.integrations.vllm.connector import CargoholdConnector
from tests.vllm.common import EAGER, ask_twice, forget, make_prompts, tokens
from tests.vllm.engine import Engine
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


RETAINED = "prefix_cache_retention_interval"


@pytest.mark.parametrize(
    ("kind", "num_blocks", "options", "num_loads"),
    [
        ("llama", 400, {}, 1),
        ("mistral-window", 400, {}, 5),
        ("mistral-window", 400, {RETAINED: None}, 1),
        ("gemma3", 1500, {}, 5),
        ("lfm2", 400, {}, 5),
    ],
)
def test_requests_wait_for_another_ones_load_only_if_they_find_it_on_the_device(
    kind: str,
    num_blocks: int,
    options: dict[str, Any],
    num_loads: int,
    vllm_model: Callable[[str], str],
    start: Callable[..., Any],
    faults: Faults,
) -> None:
    """Found by a review: of windows and states vLLM keeps the end of each prompt only, so requests waited in vain, in a row."""
    if kind != "llama" and RETAINED not in CacheConfig.__dataclass_fields__:
        pytest.skip("this version of vLLM keeps all of it")
    model = vllm_model(kind)
    (shared,) = make_prompts(1, 320)
    prompts = [[*shared, *tail] for tail in make_prompts(5, 100, seed=3)]
    reference = start(model, num_blocks=1500)
    expected = tokens([reference.ask([prompt], 1)[0] for prompt in prompts])
    engine = start(model, EAGER, num_blocks=num_blocks, **options)
    engine.ask([[*shared, 5, 6, 7]], 1)
    forget(engine)
    faults.hold_polls = 200
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, 1)
    ended: dict[str, Any] = {}
    most_loads = 0
    while engine.is_busy:
        ended |= engine.step()
        most_loads = max(most_loads, len(engine.side._loading))
    faults.hold_polls = 0
    assert tokens([ended[str(number)] for number in range(5)]) == expected
    assert most_loads == num_loads


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
    assert engine.side._stats["deferred_lookups"] == 0
    ended: dict[str, Any] = {}
    while engine.is_busy:
        ended |= engine.step()
        clock.now += 5  # less than the limit in the time of a load, and more in that of an answer
    assert not engine.side.guard.broken
    assert ended["scores"].restored == 0
    assert ended["scores"].tokens[:6] == expected.tokens
