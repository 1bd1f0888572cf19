"""vLLM's own scheduler with the adapter, under simulated workers, links, tiers and faults: no model, no forward pass."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest

from cargohold.cli import main
from cargohold.engine.core.request import ScheduledTokens
from cargohold.errors import ConfigError
from cargohold.lab.simulation.faults import Fault, parse_faults
from cargohold.lab.simulation.run import RunResult
from cargohold.lab.simulation.workloads import WORKLOADS

# Something that vLLM has since 0.32, whose inside the simulation follows.
pytest.importorskip(
    "vllm.v1.metrics.cache_hit_source", reason="vLLM 0.32 has an environment of its own: make test-vllm"
)

from cargohold.lab.vllm.configuration import ASYNC
from cargohold.lab.vllm.recipe import APPLICABLE, VllmRecipe
from cargohold.lab.vllm.worker import AlignedStateBlocks, RunningStates, StateMove, WriteFirstRunner


def play(seed: int, workload: str = "any", connector: str = "any", faults: str = "all") -> RunResult:
    recipe = VllmRecipe(workload, connector, parse_faults(faults))
    result = recipe.run(recipe.scenario(seed)).play()
    options = f"--workload {workload} --connector {connector} --faults {faults}"
    assert result.error is None, f"cargohold simulate --engine vllm --replay {seed} {options}: {result.error!r}"
    return result


@pytest.mark.parametrize("connector", APPLICABLE)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_nothing_goes_wrong_in_vllm_whatever_goes_wrong(workload: str, connector: str) -> None:
    assert play(crc32(f"{workload} {connector}".encode()) % 100_000, workload, connector).num_steps > 0


def test_loads_preemptions_and_resets_happen() -> None:
    results = [play(seed, workload, "eager", "none") for workload in ("preemption", "stops") for seed in range(5)]
    for what in ("restored tokens", "device tokens", "preemptions", "resets"):
        assert sum(result.tallies[what] for result in results) > 0, f"no {what}: this proves little"


def test_states_move_and_blocks_are_copied_before_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: Counter[str] = Counter()
    copy, copy_blocks = AlignedStateBlocks.copy, WriteFirstRunner.copy_blocks

    def noted(self: AlignedStateBlocks, moves: Sequence[StateMove]) -> None:
        happened["moves"] += len(moves)
        copy(self, moves)

    def noted_blocks(self: WriteFirstRunner, pairs: Iterable[tuple[int, int]]) -> None:
        happened["copies on write"] += len(list(pairs))
        copy_blocks(self, pairs)

    monkeypatch.setattr(AlignedStateBlocks, "copy", noted)
    monkeypatch.setattr(WriteFirstRunner, "copy_blocks", noted_blocks)
    happened["restored"] = sum(play(seed, "recurrent", "eager", "none").tallies["restored tokens"] for seed in range(8))
    assert all(happened[what] for what in ("moves", "copies on write", "restored")), happened


def test_states_move_as_in_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker import mamba_utils  # noqa: PLC0415  # takes half a minute, for it brings PyTorch's compiler

    theirs: list[tuple[str, int, int]] = []

    def note(*args: Any) -> None:
        _, _, _, _, source, destination, num_more_accepted, request, _ = args
        assert num_more_accepted == 0
        if source != destination:
            theirs.append((request.request_id, source, destination))

    monkeypatch.setattr(mamba_utils, "collect_mamba_copy_meta", note)
    random = Random(1)  # repeatable, on purpose
    buffers = SimpleNamespace(mamba_group_ids=[0], mamba_spec=SimpleNamespace(num_speculative_blocks=0, block_size=4))
    places: dict[str, int] = {}
    running, ours = RunningStates(4), []
    num_computed = {name: random.randint(0, 9) for name in "abcd"}
    for _ in range(300):
        lost = {name for name in num_computed if random.random() < 0.05}
        num_computed |= {name: random.randint(0, 9) for name in lost}
        steps = {name: random.choice((1, 1, random.randint(1, 9))) for name in num_computed if random.random() < 0.7}
        output = SimpleNamespace(
            finished_req_ids=set(),
            preempted_req_ids=lost,
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=lost),
            num_scheduled_tokens=steps,
        )
        batch = SimpleNamespace(req_ids=list(steps), num_accepted_tokens_cpu=[1] * len(steps))
        requests = {name: SimpleNamespace(request_id=name, num_computed_tokens=num_computed[name]) for name in steps}
        caching = SimpleNamespace(enable_prefix_caching=True)
        mamba_utils.preprocess_mamba(output, None, caching, places, batch, requests, {}, None, buffers)
        running.forget(lost)
        shares = [
            ScheduledTokens(name, (0,) * count, num_computed[name], num_computed[name], ([],), None)
            for name, count in steps.items()
        ]
        ours += [(move.share.request_id, move.source, move.destination) for move in running.moves(shares)]
        for name, count in steps.items():
            num_computed[name] += count
    assert ours == theirs
    assert len(ours) > 100


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.value)
def test_every_fault_strikes(fault: Fault) -> None:
    connector = "tiered" if fault in (Fault.HANGS, Fault.TORN, Fault.CORRUPT) else "eager"
    for seed in range(200):
        result = play(seed, "shared-prefix", connector, fault.value)
        if result.struck[fault] or result.tallies["restarts"]:
            return
    raise AssertionError("it never strikes")


def test_half_of_the_engines_schedule_ahead() -> None:
    ahead = [VllmRecipe("small").scenario(seed).shape.scheduler[ASYNC] for seed in range(40)]
    assert 8 < sum(ahead) < 32


def test_a_seed_is_the_same_run_every_time() -> None:
    first, second = (play(7) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("connector", ["eager-locks", "eager-requests", "tiered-requests"])
def test_connectors_without_a_view_of_the_pool_are_refused_by_name(connector: str) -> None:
    with pytest.raises(ConfigError, match=connector):
        VllmRecipe("any", connector)


def test_the_command_plays_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--engine", "vllm", "--replay", "3", "--workload", "multi-turn", "--connector", "eager"]
    monkeypatch.setattr(sys, "argv", ["cargohold", "simulate", *options])
    assert main() == 0
    shown = capsys.readouterr().out
    assert f"{ASYNC}=" in shown
    assert "ended well" in shown
