from __future__ import annotations

import math
import multiprocessing
import random
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cargohold.cache.policies import DEFAULT_POLICY, POLICIES
from cargohold.errors import CargoholdError, ConfigError
from cargohold.lab.replay import replaying
from cargohold.lab.replay.replaying import BOUNDS, ReplayResult, plan_tasks, replay, run_tasks
from cargohold.lab.replay.tiers import run_tiers
from cargohold.lab.replay.traces import TraceRequest, read_trace, stop
from cargohold.lab.replay.workload import Workload, WorkloadOptions, load_workload

MADE_TRACE = Path(__file__).parent.parent / "data" / "made_trace.jsonl"


def conversations(seed: int, num_requests: int = 400, *, max_new: int = 12) -> list[list[int]]:
    """Prompts that grow, branch and come back: ids form a trie."""
    rng = random.Random(seed)
    paths: list[list[int]] = [[0, 1, 2]]
    next_id = 3
    for _ in range(num_requests):
        path = rng.choice(paths[-40:])
        kept = path if rng.random() < 0.7 else path[: rng.randint(0, len(path))]
        num_new = rng.randint(0, max_new)
        paths.append([*kept, *range(next_id, next_id + num_new)][:120])
        next_id += num_new
    return paths


def workload_of(paths: Iterable[Sequence[int]], selection: WorkloadOptions | None = None) -> Workload:
    return load_workload((TraceRequest(hash_ids=list(path)) for path in paths), selection)


def one(workload: Workload, policy: str, *capacities: int) -> ReplayResult:
    (result,) = replay(workload, policy, [capacities])
    return result


def naive_lru(paths: Iterable[Sequence[int]], capacity: int) -> tuple[int, int]:
    """Leaf-first LRU, one chunk at a time: prefix hits, and chunks written."""
    cache: OrderedDict[int, None] = OrderedDict()
    num_hits = num_stored = 0
    for path in paths:
        hits = next((at for at, chunk in enumerate(path) if chunk not in cache), len(path))
        num_hits += hits
        stored = path[hits : hits + max(0, capacity - hits)]
        num_stored += len(stored)
        for chunk in reversed(path[: hits + len(stored)]):
            cache[chunk] = None
            cache.move_to_end(chunk)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return num_hits, num_stored


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("capacity", [1, 7, 60, 300, 5000])
def test_lru_is_what_a_naive_model_says(seed: int, capacity: int) -> None:
    paths = conversations(seed)
    result = one(workload_of(paths), "lru", capacity)
    num_hits, num_stored = naive_lru(paths, capacity)
    (host,) = result.tiers
    assert (result.num_prefix_hits, host.stored) == (num_hits, num_stored)
    assert result.num_block_hits == result.num_prefix_hits == host.loaded
    assert host.stored == host.held + host.evicted
    assert result.num_lookups == sum(map(len, paths))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_no_policy_beats_the_optimum_and_the_optimum_does_not_beat_infinity(seed: int) -> None:
    workload = workload_of(conversations(seed))
    infinite = one(workload, "infinite", 1)
    for capacity in (5, 50, 500):
        optimum = one(workload, "optimum", capacity)
        best = max(one(workload, policy, capacity).num_prefix_hits for policy in POLICIES)
        assert best <= optimum.num_prefix_hits <= infinite.num_prefix_hits
    assert one(workload, "optimum", workload.num_unique).num_prefix_hits == infinite.num_prefix_hits


def test_the_optimum_keeps_nothing_for_answers_that_will_be_computed_anyway() -> None:
    # Both answers come before the second look-up of 9, and are all that would be kept if they were worth a slot.
    requests = [
        TraceRequest(hash_ids=[9]),
        TraceRequest(hash_ids=[], output_hash_ids=[1, 2]),
        TraceRequest(hash_ids=[], output_hash_ids=[1, 2]),
        TraceRequest(hash_ids=[9]),
    ]
    workload = load_workload(requests)
    assert one(workload, "optimum", 1).num_prefix_hits == 1
    assert one(workload, "optimum", 2).num_prefix_hits == 1


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_tier_for_everything_is_infinite(policy: str) -> None:
    workload = workload_of(conversations(1))
    everything = one(workload, policy, workload.num_unique)
    infinite = one(workload, "infinite", 1)
    assert everything.num_prefix_hits == infinite.num_prefix_hits
    assert everything.tiers == infinite.tiers


def test_infinite_is_what_a_set_says_also_where_ids_form_no_trie() -> None:
    rng = random.Random(3)
    paths = [[rng.randrange(60) for _ in range(rng.randint(0, 9))] for _ in range(300)]
    seen: set[int] = set()
    prefix = present = 0
    for path in paths:
        first_of_its_own = {chunk: at for at, chunk in reversed(list(enumerate(path)))}
        hits = [chunk in seen or first_of_its_own[chunk] < at for at, chunk in enumerate(path)]
        present += sum(hits)
        prefix += [*hits, False].index(False)
        seen |= set(path)
    result = one(workload_of(paths), "infinite", 1)
    assert (result.num_prefix_hits, result.num_block_hits) == (prefix, present)


def test_ids_that_form_no_trie_are_counted_and_have_no_optimum() -> None:
    workload = workload_of([[1, 2, 3], [4, 2], [], [1, 2, 3]])
    assert workload.count_misplaced() == 1
    assert workload_of(conversations(0)).count_misplaced() == 0
    with pytest.raises(ConfigError, match="trie"):
        one(workload, "optimum", 2)
    assert one(workload, "lru", 10).num_block_hits == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_leaves_holes_so_prefix_hits_are_block_hits(policy: str) -> None:
    result = one(
        workload_of([[1, 2], [1, 2, 3, 4], [9, 8], [1, 2, 3, 4], [7], [1, 2, 5], [9, 8, 6], [1, 2, 3]]), policy, 4
    )
    assert result.num_prefix_hits == result.num_block_hits > 0


class TestTwoTiers:
    def test_what_host_memory_lost_comes_back_from_disk(self) -> None:
        workload = workload_of([[1, 2], [3, 4], [1, 2]])
        run = run_tiers(workload, "lru", (2, 10))
        host, disk = run.traffic()
        assert run.hits.tolist() == [0, 0, 2]
        assert (host.loaded, host.stored, host.evicted) == (0, 6, 4)
        assert (disk.loaded, disk.stored, disk.evicted) == (2, 4, 0)

    def test_a_prefix_may_be_part_here_and_part_there(self) -> None:
        run = run_tiers(workload_of([[1, 2, 3], [9], [1, 2, 3]]), "lru", (3, 10))
        host, disk = run.traffic()
        assert run.hits.tolist() == [0, 0, 3]
        assert (host.loaded, disk.loaded) == (2, 1)

    def test_what_does_not_fit_into_host_memory_is_not_promoted(self) -> None:
        run = run_tiers(workload_of([[1, 2], [1, 2, 3, 4], [7, 8], [1, 2, 3, 4]]), "lru", (2, 10))
        assert run.hits.tolist()[-1] <= 2

    @pytest.mark.parametrize("policy", ["lru", "reuse-index"])
    def test_a_large_disk_makes_up_for_little_memory(self, policy: str) -> None:
        workload = workload_of(conversations(2))
        longest = int((workload.ends - workload.starts).max())
        alone = one(workload, policy, longest)
        both = one(workload, policy, longest, workload.num_unique)
        infinite = one(workload, "infinite", 1)
        assert alone.num_prefix_hits < both.num_prefix_hits == infinite.num_prefix_hits
        assert both.tiers[1].evicted == 0
        assert one(workload, policy, longest, 300).num_prefix_hits <= both.num_prefix_hits

    def test_a_disk_knows_of_no_use_but_its_own(self) -> None:
        # What host memory has is not asked of the disk, which evicts 1 and 2 although they were just used.
        run = run_tiers(workload_of([[1, 2], [3, 4], [1, 2], [5, 6], [3, 4], [1, 2]]), "lru", (4, 4))
        assert run.hits.tolist() == [0, 0, 2, 0, 2, 0]
        assert [tier.loaded for tier in run.traffic()] == [2, 2]

    def test_what_host_memory_has_behind_a_hole_is_not_read_from_disk(self) -> None:
        # FIFO has evicted 1 and 2, and kept 3 and 4.
        run = run_tiers(workload_of([[1, 2], [1, 2, 3, 4], [9, 8], [1, 2, 3, 4]]), "fifo", (4, 10))
        assert run.hits.tolist() == [0, 2, 0, 4]
        assert [tier.loaded for tier in run.traffic()] == [2 + 2, 2]

    def test_hits_are_the_sum_of_what_tiers_loaded(self) -> None:
        for seed in range(5):
            result = one(workload_of(conversations(seed)), "lru", 60, 200)
            assert result.num_prefix_hits == sum(tier.loaded for tier in result.tiers)


class TestBehindADevicePool:
    @pytest.mark.parametrize("policy", ["lru", "reuse-index"])
    @pytest.mark.parametrize("part", [0.5, 1, 2])
    def test_both_are_one_cache(self, policy: str, part: float) -> None:
        # One cache of both sizes: a host memory that held the device's chunks once more would find nothing up to its size.
        workload = workload_of(conversations(2)).behind(60)
        result = one(workload, policy, round(60 * part))
        alone = int(workload.on_device.sum())
        whole = one(workload_of(conversations(2)), "lru", round(60 * (1 + part))).num_prefix_hits
        assert alone + result.num_prefix_hits >= alone + 0.8 * (whole - alone) > alone
        (host,) = result.tiers
        assert host.loaded == result.num_prefix_hits
        best = one(workload, "optimum", round(60 * part)).num_prefix_hits
        assert result.num_prefix_hits <= best <= one(workload, "infinite", 1).num_prefix_hits

    @pytest.mark.parametrize("device", [1, 20, 60, 1000])
    def test_the_device_alone_is_lru(self, device: int) -> None:
        paths = conversations(1)
        assert int(workload_of(paths).behind(device).on_device.sum()) == naive_lru(paths, device)[0]

    def test_tokens_that_the_device_finds_are_not_saved(self) -> None:
        workload = load_workload([TraceRequest(hash_ids=[1, 2], block_tokens=16) for _ in range(3)])
        assert workload.prompt_tokens_from(0) == 6 * 16
        behind = workload.behind(4)
        assert behind.prompt_tokens_from(0) == 2 * 16
        assert one(behind, "lru", 4).num_hit_tokens == 0

    def test_what_neither_can_hold_is_a_miss(self) -> None:
        workload = workload_of([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]]).behind(2)
        assert one(workload, "lru", 2).num_prefix_hits <= 2
        assert one(workload, "fifo", 6).num_prefix_hits == 4

    def test_a_disk_below_has_all(self) -> None:
        workload = workload_of(conversations(2)).behind(60)
        longest = int((workload.ends - workload.starts).max())
        both = one(workload, "reuse-index", longest, workload.num_unique)
        assert both.num_prefix_hits == one(workload, "infinite", 1).num_prefix_hits


class TestAtItsTime:
    """What a server learns when an answer is complete is not known before."""

    ENDED_S = 100.0

    def requests(self, end: str, *, answer_tokens: int) -> list[TraceRequest]:
        """Sessions whose answers end as given, or in a call, in turn; both come back, and others take their place."""
        requests = []
        for turn in range(200):
            stop = end if turn % 2 else "tool_call"
            ids = [10 * turn + at for at in range(4)]
            requests.append(
                TraceRequest(hash_ids=ids, timestamp_ms=1000 * turn, output_length=answer_tokens, stop=stop)
            )
            if turn % 2 == 0 and turn > 4:
                back = [10 * (turn - 4) + at for at in range(4)]
                requests.append(TraceRequest(hash_ids=back, timestamp_ms=1000 * turn + 1, stop="answer"))
        return requests

    def hits(self, end: str, *, answer_tokens: int, rate: float) -> list[int]:
        workload = load_workload(self.requests(end, answer_tokens=answer_tokens), WorkloadOptions(rate=rate))
        return list(map(int, one(workload, "reuse-index", 12).run.hits))

    def test_how_a_turn_ends_changes_no_hit_before_its_answer_is_complete(self) -> None:
        """It does in a replay that reads ahead, as one does here where answers take no time."""
        for end in ("answer", "error"):
            late = self.hits(end, answer_tokens=1_000_000, rate=10)
            assert late == self.hits("tool_call", answer_tokens=1_000_000, rate=10)
        assert self.hits("error", answer_tokens=1, rate=1e6) != self.hits("tool_call", answer_tokens=1, rate=1e6)

    def test_an_answer_is_complete_when_it_is_written_when_it_was_recorded_or_when_its_session_goes_on(self) -> None:
        requests = [
            TraceRequest(hash_ids=[1], timestamp_ms=1000, output_length=40),
            TraceRequest(hash_ids=[2], timestamp_ms=2000, output_length=40, ended_ms=2500),
            TraceRequest(hash_ids=[3], timestamp_ms=3000, output_length=400, session_id="a"),
            TraceRequest(hash_ids=[4], timestamp_ms=4000, output_length=20, session_id="b"),
            TraceRequest(hash_ids=[3, 5], timestamp_ms=6000, session_id="a"),
        ]
        assert load_workload(requests, WorkloadOptions(rate=20)).answered_s.tolist() == [3.0, 1.5, 5.0, 5.0, 6.0]
        assert load_workload([TraceRequest(hash_ids=[1], output_length=9)]).answered_s.tolist() == [-math.inf]
        with pytest.raises(ConfigError, match="rate"):
            WorkloadOptions(rate=0)

    @pytest.mark.parametrize(("again_ms", "num_found"), [(1999, 1), (2001, 2)])
    def test_what_an_answer_filled_is_found_when_it_is_complete(self, again_ms: int, num_found: int) -> None:
        asked = [
            TraceRequest(hash_ids=[1], output_hash_ids=[2], timestamp_ms=0, output_length=80),
            TraceRequest(hash_ids=[1, 2, 3], timestamp_ms=again_ms),
        ]
        assert one(load_workload(asked), "lru", 9).run.hits.tolist() == [0, num_found]


class TestOptions:
    REQUESTS = tuple(
        TraceRequest(hash_ids=[at, 100 + at], timestamp_ms=1000 * at, session_id=at % 2, input_length=24)
        for at in range(10)
    )

    @pytest.mark.parametrize(
        "options",
        [{"blocks_per_chunk": 0}, {"block_tokens": -1}, {"blocks_per_chunk": True}],
    )
    def test_impossible_options(self, options: dict[str, float]) -> None:
        with pytest.raises(ConfigError):
            WorkloadOptions(**options)  # type: ignore[arg-type]  # that is the point

    def test_nothing_to_replay(self) -> None:
        for requests, selection in [
            ((), WorkloadOptions()),
            ((TraceRequest(hash_ids=[]),), WorkloadOptions()),
            (self.REQUESTS, WorkloadOptions(blocks_per_chunk=3)),
        ]:
            with pytest.raises(ConfigError, match="nothing to replay"):
                load_workload(requests, selection)

    def test_chunks_are_named_by_their_last_block_and_the_rest_is_left_out(self) -> None:
        workload = workload_of([[1, 2, 3, 4, 5], [1, 2, 3, 9]], WorkloadOptions(blocks_per_chunk=2))
        assert workload.chunks.tolist() == [0, 1, 0, 2]
        assert workload.num_lookups == 4

    def test_requests_are_put_in_order_of_their_times(self) -> None:
        shuffled = list(self.REQUESTS)
        random.Random(1).shuffle(shuffled)
        workload = load_workload(shuffled)
        assert not workload.is_sorted
        by_time = load_workload(self.REQUESTS)
        renamed = {old: new for new, old in enumerate(dict.fromkeys(workload.chunks.tolist()))}
        assert [renamed[chunk] for chunk in workload.chunks.tolist()] == by_time.chunks.tolist()
        assert workload.ends.tolist() == by_time.ends.tolist()

    def test_block_size_is_given_recorded_or_implied(self) -> None:
        lengths = [37, 160, 161, 512, 1000]
        partial = [TraceRequest(hash_ids=list(range(-(-n // 16))), input_length=n) for n in lengths]
        full = [TraceRequest(hash_ids=list(range(n // 16)), input_length=n) for n in lengths]
        assert load_workload(partial).block_tokens == load_workload(full).block_tokens == 16
        assert load_workload(full, WorkloadOptions(block_tokens=8)).block_tokens == 8
        recorded = [TraceRequest(hash_ids=[1, 2], block_tokens=128)]
        assert load_workload(recorded).block_tokens == 128
        assert workload_of([[1, 2]]).block_tokens is None
        odd = [TraceRequest(hash_ids=[1, 2], input_length=n) for n in (3, 900, 70000)]
        assert load_workload(odd).block_tokens is None

    def test_a_prompts_last_block_counts_only_its_tokens(self) -> None:
        requests = [TraceRequest(hash_ids=[1, 2], input_length=20, block_tokens=16)] * 2
        result = one(load_workload(requests), "lru", 2)
        assert (result.num_prefix_hits, result.num_hit_tokens) == (2, 20)

    def test_answers_are_stored_but_not_looked_up(self) -> None:
        requests = [
            TraceRequest(hash_ids=[1, 2], output_hash_ids=[3]),
            TraceRequest(hash_ids=[1, 2, 3, 4], output_hash_ids=[5]),
        ]
        workload = load_workload(requests)
        assert (workload.num_lookups, workload.num_unique) == (6, 5)
        for policy in ("lru", *BOUNDS):
            assert one(workload, policy, 5).num_prefix_hits == 3


class TestGrid:
    def test_the_default_policy_may_learn_in_a_first_pass(self) -> None:
        """Found by use: a plan underestimated it, because it learned during the trace."""
        workload = load_workload(read_trace([str(MADE_TRACE)], on_bad_line=stop))
        tasks = {learns: plan_tasks(["lru", DEFAULT_POLICY], [(100,)], learns_first=learns) for learns in (False, True)}
        fresh, learned = ([of for (of,) in run_tasks(workload, tasks[learns])] for learns in (False, True))
        assert fresh[0] == replace(learned[0], seconds=fresh[0].seconds)
        assert learned[1].num_prefix_hits > fresh[1].num_prefix_hits
        assert learned[1].tiers[0].loaded == learned[1].num_prefix_hits, "the first pass is not counted"

    def test_processes_find_what_one_process_finds(self) -> None:
        workload = workload_of(conversations(4))
        tasks = plan_tasks(["lru", "arc", *BOUNDS, "lru"], [(20,), (100,), (20,)])
        assert len(tasks) == 6

        def found(num_processes: int) -> set[tuple[object, ...]]:
            return {
                (result.policy, result.capacities, result.num_prefix_hits, result.tiers)
                for results in run_tasks(workload, tasks, num_processes)
                for result in results
            }

        assert len(found(1)) == 7
        assert found(2) == found(1)

    def test_bad_sizes_and_policies(self) -> None:
        with pytest.raises(ConfigError, match="mru"):
            plan_tasks(["lru", "mru"], [(1,)])
        with pytest.raises(ConfigError, match="at least one chunk"):
            list(run_tasks(workload_of([[1]]), plan_tasks(["lru"], [(0,), (1,)]), 2))
        with pytest.raises(ConfigError, match="trie"):
            list(run_tasks(workload_of([[1, 2], [2]]), plan_tasks(["optimum", "lru"], [(1,)]), 2))

    def test_a_process_that_dies_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Killed while they work, and not in the middle of an answer, for whose rest the standard library waits for ever."""
        monkeypatch.setattr(replaying, "_run_task", run_lru_alone)
        results = run_tasks(workload_of(conversations(5)), plan_tasks(["lru", "arc"], [(10,)]), 2)
        assert next(results) == []
        for process in multiprocessing.active_children():
            process.kill()
        with pytest.raises(CargoholdError, match="died"):
            list(results)

    def test_who_stops_listening_waits_for_no_replay_and_leaves_no_process(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(replaying, "_run_task", run_lru_alone)
        results = run_tasks(workload_of(conversations(5)), plan_tasks(["lru", "arc"], [(10,)]), 2)
        assert next(results) == []
        results.close()
        assert not multiprocessing.active_children()


def run_lru_alone(task: replaying.Task) -> list[ReplayResult]:
    """In place of a replay: all others take for ever."""
    if task.policy != "lru":
        threading.Event().wait()
    return []
