"""Others' connectors under the simulation: what is known of them is found again, and what is right is not reported."""

from __future__ import annotations

import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from cargohold.cli import main
from cargohold.engine.core.request import ScheduledTokens
from cargohold.errors import ConfigError
from cargohold.lab.simulation.campaign import Shrinker
from cargohold.lab.simulation.faults import parse_faults
from cargohold.lab.simulation.run import RunResult
from cargohold.lab.simulation.traffic import Ask
from cargohold.lab.simulation.world import Scenario

pytest.importorskip(
    "vllm.v1.metrics.cache_hit_source", reason="vLLM 0.32 has an environment of its own: make test-vllm"
)

from vllm.distributed.kv_events import BlockRemoved
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.base import LookupResult, OffloadingEvent
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy
from vllm.v1.kv_offload.tiering.fs import manager as fs
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

from cargohold.integrations.vllm import compat
from cargohold.lab.vllm.configuration import DRAFTED
from cargohold.lab.vllm.others.recipe import StrangerRecipe, kind_of
from cargohold.lab.vllm.worker import SimulatedWorker, WriteFirstRunner
from tests.vllm.test_simulation_found import shared_block

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_vllm_connector"
OURS = "vllm:cargohold.integrations.vllm.connector:CargoholdConnector"
OURS_CONFIG = {"host_bytes": "1MiB", "kv_events_salted": True}
OFFLOADING, SIMPLE = "vllm:OffloadingConnector", "vllm:SimpleCPUOffloadConnector"
WRONG_TOKEN, CONFLICT, HOST_EVENTS = "WrongTokenError", "CopyConflictError", "host events"
V32, V33 = (0, 32), (0, 33)


def recipe(
    connector: str, workload: str = "any", faults: str = "none", config: Mapping[str, Any] | None = None
) -> StrangerRecipe:
    return StrangerRecipe(workload, connector, parse_faults(faults), config or {})


def play(seed: int, *options: Any) -> RunResult:
    played = recipe(*options)
    return played.run(played.scenario(seed)).play()


@pytest.mark.parametrize(
    ("versions", "connector", "workload", "seed", "kind"),
    [
        ([V32], OFFLOADING, "any", 145, WRONG_TOKEN),
        ([V32, V33], OFFLOADING, "windows", 10011, WRONG_TOKEN),
        ([V32, V33], OFFLOADING, "any", 118, "standstill"),
        ([V32, V33], OFFLOADING, "any", 457, "standstill"),
        ([V32], f"{OFFLOADING}+OffloadingConnector", "any", 19, CONFLICT),
        ([V32, V33], SIMPLE, "any", 16, "unrest"),
        ([V32], SIMPLE, "any", 500861, WRONG_TOKEN),
        ([V32, V33], SIMPLE, "any", 12, HOST_EVENTS),
        ([V32, V33], OFFLOADING, "any", 204, HOST_EVENTS),
    ],
)
def test_what_docs_findings_lists_is_found_in_the_versions_that_have_it(
    versions: list[tuple[int, int]], connector: str, workload: str, seed: int, kind: str
) -> None:
    found = kind_of(play(seed, connector, workload).error)
    assert found == (kind if compat.vllm_version() in versions else None)


def test_a_budget_of_seeds_finds_nothing_that_is_not_listed() -> None:
    results = {seed: play(seed, OFFLOADING) for seed in range(24)}
    assert {seed: result.error for seed, result in results.items() if result.error is not None} == {}
    for what in ("restored tokens", "device tokens", "preemptions", "resets"):
        assert sum(result.tallies[what] for result in results.values()) > 0, f"no {what}: this proves little"


def test_a_connector_that_is_right_is_not_blamed() -> None:
    results = [play(seed, OURS, "any", "none", OURS_CONFIG) for seed in range(6)]
    assert [result.error for result in results] == [None] * 6
    assert sum(result.tallies["restored tokens"] for result in results) > 0, "this proves little"


@pytest.mark.parametrize(
    ("connector", "expected"),
    [("vllm_shelf:ShelfConnector", {None}), ("forgetful:ForgetfulShelf", {None, WRONG_TOKEN})],
)
def test_of_the_two_example_connectors_the_wrong_one_is_caught(
    connector: str, expected: set[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    assert {kind_of(play(seed, f"vllm:{connector}").error) for seed in range(8)} == expected


def without_removals(take: Callable[[Any], Iterable[Any]]) -> Callable[[Any], Iterable[Any]]:
    return lambda self: [event for event in take(self) if not isinstance(event, BlockRemoved)]


def test_a_connector_that_announces_no_removals_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (OffloadingConnectorScheduler, SimpleCPUOffloadScheduler):
        monkeypatch.setattr(kind, "take_events", without_removals(kind.take_events))
    for connector in (OFFLOADING, SIMPLE):
        assert HOST_EVENTS in {kind_of(play(seed, connector, "preemption").error) for seed in range(4)}


def test_a_connector_that_announces_what_is_still_being_stored_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = CPUOffloadingManager.prepare_store

    def announce(self: CPUOffloadingManager, *args: Any) -> Any:
        prepared = prepare(self, *args)
        if prepared is not None and self.events is not None:
            self.events.append(OffloadingEvent(prepared.keys_to_store, self.medium, removed=False))
        return prepared

    monkeypatch.setattr(CPUOffloadingManager, "prepare_store", announce)
    assert HOST_EVENTS in {kind_of(play(seed, OFFLOADING, "preemption").error) for seed in range(4)}


def test_tokens_may_be_appended_to_a_block_that_is_stored_in_part() -> None:
    # A prefix may end inside a block where recurrent state is hashed finely: only later tokens change while it is copied.
    assert play(33, OFFLOADING, "recurrent").error is None


@pytest.mark.parametrize("connector", [OFFLOADING, SIMPLE])
def test_delays_are_borne(connector: str) -> None:
    results = [play(seed, connector, "shared-prefix", "late,late-worker,slow") for seed in range(8)]
    struck = sum(result.struck.total() for result in results)
    assert struck > 0
    assert [result.error for result in results if kind_of(result.error) not in (None, "unrest")] == []


def with_drafts(played: StrangerRecipe, num_seeds: int) -> list[Scenario]:
    scenarios = map(played.scenario, count())
    return list(islice((each for each in scenarios if DRAFTED in each.shape.scheduler), num_seeds))


@pytest.mark.parametrize(("connector", "config"), [(OFFLOADING, {}), (OURS, OURS_CONFIG)])
def test_speculative_tokens_are_proposed_taken_and_rejected(
    connector: str, config: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted: Counter[str] = Counter()
    accepted, reject = SimulatedWorker._accepted, WriteFirstRunner.reject

    def note_accepted(self: SimulatedWorker, share: Any) -> Any:
        tokens = accepted(self, share)
        drafted["right"] += len(tokens)
        return tokens

    def note_rejected(self: WriteFirstRunner, share: Any, num_tokens: int) -> None:
        drafted["wrong"] += num_tokens
        reject(self, share, num_tokens)

    monkeypatch.setattr(SimulatedWorker, "_accepted", note_accepted)
    monkeypatch.setattr(WriteFirstRunner, "reject", note_rejected)
    played = recipe(connector, "multi-turn", config=config)
    results = [played.run(scenario).play() for scenario in with_drafts(played, 4)]
    assert [result.error for result in results] == [None] * 4
    assert sum(result.tallies["restored tokens"] for result in results) > 0, "this proves little"
    assert drafted["right"] > 0
    assert drafted["wrong"] > 0


def test_a_step_has_room_for_a_request_and_its_speculative_tokens() -> None:
    # VLLM never schedules a loaded request that lacks one token if a step bears fewer tokens: seed 48 had 3, and needed 4.
    assert play(48, OFFLOADING).error is None
    options = [scenario.shape.scheduler for scenario in with_drafts(recipe(OFFLOADING), 8)]
    assert all(each["max_num_batched_tokens"] > each[DRAFTED] for each in options)


def test_kv_of_rejected_tokens_is_there_and_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reject = WriteFirstRunner.reject

    def one_place_too_early(self: WriteFirstRunner, share: Any, num_tokens: int) -> None:
        tables, start = share.block_ids, share.num_computed_tokens - 1
        early = ScheduledTokens(share.request_id, share.token_ids, start, start, tables, None)
        reject(self, early, num_tokens)

    monkeypatch.setattr(WriteFirstRunner, "reject", one_place_too_early)
    played = recipe(OFFLOADING, "multi-turn")
    assert WRONG_TOKEN in {kind_of(played.run(scenario).play().error) for scenario in with_drafts(played, 2)}


FILES = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs", "root_dir": "{scratch}"}]}


def test_tiers_on_files_give_back_what_host_memory_has_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = 0

    def count(*args: Any) -> None:
        nonlocal num_read
        num_read += 1
        load(*args)

    load = fs.batch_load_block
    monkeypatch.setattr(fs, "batch_load_block", count)
    for faults in ("none", "full,gone,late,slow"):
        assert [play(seed, OFFLOADING, "returning", faults, FILES).error for seed in range(4)] == [None] * 4
    assert num_read > 0, "nothing was read: this proves little"


def test_a_file_that_is_not_read_is_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs, "batch_load_block", lambda *args: None)
    found = {kind_of(play(seed, OFFLOADING, "returning", "none", FILES).error) for seed in range(4)}
    assert WRONG_TOKEN in found


def test_files_keep_the_kv_of_former_weights() -> None:
    result = play(4, OFFLOADING, "returning", "none", FILES)
    assert (kind_of(result.error), result.tallies["resets"]) == (WRONG_TOKEN, 1)


def test_a_reset_that_is_refused_is_tried_seldomer(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tried in every step, it let lazy stores begin anew for ever, and they held blocks, so that it was refused again.
    tries = 0
    reset = Scheduler.reset_prefix_cache

    def refuse(self: Scheduler, *args: Any, **options: Any) -> bool:
        nonlocal tries
        tries += 1
        reset(self, *args, **options)
        return False

    monkeypatch.setattr(Scheduler, "reset_prefix_cache", refuse)
    config = {"lazy_offload": True, "cpu_bytes_to_use": 1000000}
    assert kind_of(play(603952, SIMPLE, "any", "all", config).error) in (None, HOST_EVENTS)
    assert 1 < tries < 16


def test_what_host_memory_cannot_hold_at_once_is_read_from_files_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    # In the same step, what is read in evicts what has just been found.
    played = recipe(OFFLOADING, config=FILES)
    error = played.run(played.scenario(300067)).play().error
    assert kind_of(error) == "standstill"
    assert "nobody holds blocks, 18 of 18 are free" in str(error)
    found: set[Any] = set()
    lookup, ends, evict = (
        TieringOffloadingManager.lookup,
        TieringOffloadingManager.on_schedule_end,
        LRUCachePolicy.evict,
    )

    def lookup_and_note(self: Any, key: Any, *args: Any, **options: Any) -> Any:
        result = lookup(self, key, *args, **options)
        found.update([key] if result is not LookupResult.MISS else [])
        return result

    def end_and_forget(self: Any, context: Any) -> None:
        found.clear()
        ends(self, context)

    monkeypatch.setattr(TieringOffloadingManager, "lookup", lookup_and_note)
    monkeypatch.setattr(TieringOffloadingManager, "on_schedule_end", end_and_forget)
    monkeypatch.setattr(LRUCachePolicy, "evict", lambda self, num, protected: evict(self, num, protected | found))
    assert played.run(played.scenario(300067)).play().error is None


def test_a_failed_copy_is_an_assertion_of_vllms_and_is_told_with_its_place() -> None:
    errors = [play(seed, OFFLOADING, "shared-prefix", "failed").error for seed in range(8)]
    told = next(str(error) for error in errors if error is not None)
    assert "AssertionError" in told
    assert "offloading/worker.py" in told
    assert "assert transfer_result.success" in told


@pytest.mark.parametrize(
    ("connector", "expected"),
    [
        ("vllm:NixlConnector", "needs another engine and NIXL's agent"),
        ("vllm:LMCacheMPConnector", "needs LMCache's server"),
        ("vllm:Offloading", "'Offloading' is not registered"),
        ("vllm:nowhere:Class", "No module named 'nowhere'"),
        ("vllm:pathlib:Path", "KVConnectorBase_V1"),
    ],
)
def test_what_cannot_be_played_is_refused_by_name(connector: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        recipe(connector)


def test_tiers_that_cannot_be_played_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="needs another engine"):
        recipe(OFFLOADING, config={**FILES, "secondary_tiers": [{"type": "p2p"}]})


def test_a_failure_becomes_small_and_a_script_that_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    played = recipe(OFFLOADING, "windows")
    scenario = played.scenario(10011)
    error = played.run(scenario).play().error
    assert error is not None
    small = Shrinker(lambda less: played.fails_like(less, error), played.simpler).shrink(scenario)
    assert len([action for action in small.actions if isinstance(action, Ask)]) <= 3
    path = tmp_path / "shows_it.py"
    path.write_text(played.script(small, error, "cargohold simulate"))
    shown = runpy.run_path(str(path))
    assert shown["SCENARIO"] == small
    assert shown["show"](shown["SCENARIO"]) == 1
    table = capsys.readouterr().out
    assert "| step | computes | waits | copies | free" in table
    assert WRONG_TOKEN in table


def test_a_failure_of_vllm_s_own_is_not_put_down_to_the_connector() -> None:
    played = recipe(SIMPLE)
    scenario = shared_block(played.scenario(0).connector)
    error = played.run(scenario).play().error
    assert kind_of(error) == WRONG_TOKEN
    assert error is not None
    assert "Without a connector it ends in the same way" in str(played.remark(scenario, error))
    windows = recipe(OFFLOADING, "windows")
    failing = windows.scenario(10011)
    error = windows.run(failing).play().error
    assert error is not None
    assert windows.remark(failing, error) is None


def command(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["cargohold", "simulate", "--engine", "vllm", *options])
    return int(main())


def test_the_command_lists_what_failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--connector", SIMPLE, "--first-seed", "14", "--seeds", "3", "--faults", "none", "--jobs", "1"]
    assert command(monkeypatch, *options, "--keep-going", "--no-shrink") == 1
    assert "1 failed, the first is seed 16: OracleError: unrest" in capsys.readouterr().out


def test_the_command_takes_options_of_the_connector(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = '{"cpu_bytes_to_use": 1000000, "eviction_policy": "arc"}'
    options = ["--connector", OFFLOADING, "--replay", "3", "--faults", "none"]
    assert command(monkeypatch, *options, "--connector-config", config) == 0
    assert "'cpu_bytes_to_use': 1000000, 'eviction_policy': 'arc'" in capsys.readouterr().out
    assert command(monkeypatch, *options, "--connector-config", "{") == 2
    assert "it must be JSON" in capsys.readouterr().err


def test_options_that_vllm_refuses_end_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = '{"blocks_per_chunk": 0}'
    options = [
        "--connector",
        OFFLOADING,
        "--seeds",
        "2",
        "--faults",
        "none",
        "--jobs",
        "1",
        "--connector-config",
        config,
    ]
    assert command(monkeypatch, *options) == 2
    assert "'blocks_per_chunk' must be greater than 0" in capsys.readouterr().err
