from __future__ import annotations

import os
import random
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.errors import ConfigError
from cargohold.lab.replay.advice import (
    advise,
    as_facts,
    disk_problems,
    disk_table,
    fits,
    plan_table,
    recommend,
)
from cargohold.lab.replay.costs import CostModel
from cargohold.lab.replay.planning import GIB, Gain, Plan, Planner, Recommendation, SizingBudget, _falling
from cargohold.lab.replay.replaying import INFINITE, OPTIMUM, ReplayResult, replay
from cargohold.lab.replay.tiers import DISK, HOST
from cargohold.lab.replay.traces import TraceRequest, read_trace
from cargohold.lab.replay.workload import Workload, load_workload
from cargohold.option_values import format_bytes

TOKEN_BYTES = 1 << 10
BLOCK_TOKENS = 16
MIB = 1 << 20
CHAT = Path(os.environ.get("CARGOHOLD_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
CHAT /= "mooncake_conversation_h1.jsonl.zst"
CHAT_COSTS = CostModel(bytes_per_token=128 << 10, prefill_tokens_per_s=8000.0)


@cache
def looping(num_hot: int = 10, num_cold: int = 90, rounds: int = 2) -> Workload:
    """A few prompts that come all the time, and many that come again late."""
    requests: list[TraceRequest] = []
    for at in range(rounds * num_cold):
        hot, cold = at % num_hot, at % num_cold
        for block in (hot, num_hot + cold):
            arrival_ms = 1000.0 * len(requests)
            requests.append(TraceRequest(hash_ids=[block], block_tokens=BLOCK_TOKENS, timestamp_ms=arrival_ms))
    return load_workload(requests)


@cache
def conversations(minutes: float) -> Workload:
    """Chats that begin at a constant rate, with pauses of two lengths: the beginning of one endless trace."""
    rng = random.Random(3)
    lines: list[tuple[float, list[int]]] = []
    next_id = 0
    for chat in range(60 * 35 // 2):
        # It begins an hour earlier, so that what is kept does not begin with beginnings.
        arrival_s, path = 8.0 * chat - 60 * 60, list[int]()
        while True:
            path = [*path, *range(next_id, next_id + 2)]
            next_id += 2
            lines.append((arrival_s, path))
            if rng.random() < 0.4:
                break
            arrival_s += rng.expovariate(1 / 20) if rng.random() < 0.7 else rng.expovariate(1 / 300)
    lines.sort(key=lambda line: line[0])
    return load_workload(
        TraceRequest(hash_ids=path, block_tokens=1024, timestamp_ms=1000 * arrival_s)
        for arrival_s, path in lines
        if 0 <= arrival_s < 60 * minutes
    )


_PLAYED: dict[tuple[int, str, tuple[tuple[int, ...], ...]], tuple[Workload, list[ReplayResult]]] = {}


def played(workload: Workload, policy: str, sizes: Iterable[tuple[int, ...]]) -> list[ReplayResult]:
    """What a replay finds; several tests plan for the same workload at the same sizes."""
    key = (id(workload), policy, tuple(sizes))
    if key not in _PLAYED:
        _PLAYED[key] = workload, list(replay(workload, policy, key[2]))  # the workload stays, and with it its id
    return _PLAYED[key][1]


def planned(
    workload: Workload, budget: SizingBudget, costs: CostModel, policy: str = "arc"
) -> tuple[Planner, Plan, str]:
    planner = Planner(workload, costs, policy, budget)
    names = dict.fromkeys((policy, "lru", OPTIMUM, INFINITE))
    results = [result for name in names for result in played(workload, name, planner.curve())]
    results += played(workload, policy, planner.further(results))
    plan = planner.plan(results)
    return planner, plan, " ".join((*recommend(planner, plan), *advise(planner, plan)))


def recommended(workload: Workload, costs: CostModel, *prices: float) -> list[Recommendation]:
    results = [*played(workload, INFINITE, [(1,)])]
    found = []
    for price in prices:
        planner = Planner(workload, costs, "lru", SizingBudget(host_price_s=price))
        if price == prices[0]:
            results += played(workload, "lru", planner.curve())
        plan = planner.plan([*results, *played(workload, "lru", planner.further(results))])
        assert plan.recommendation is not None
        found.append(plan.recommendation)
    return found


class TestRecommendation:
    @pytest.mark.parametrize(
        ("lengths", "prices"),
        [((20, 40), (30.0, 100.0)), pytest.param((20, 40, 80), (10.0, 30.0, 100.0), marks=pytest.mark.long)],
    )
    def test_it_does_not_move_with_the_length_of_the_trace(
        self, lengths: tuple[int, ...], prices: tuple[float, ...]
    ) -> None:
        costs = CostModel(bytes_per_token=128 << 10, prefill_tokens_per_s=1000.0)
        cuts = [recommended(conversations(minutes), costs, *prices) for minutes in lengths]
        for sizes in zip(*cuts, strict=True):
            known = [size.num_bytes for size in sizes if not size.is_least]
            assert len(known) >= 2
            assert max(known) / min(known) < 1.25
            assert all(size.num_bytes < 1.25 * known[-1] for size in sizes if size.is_least)

    @pytest.mark.long
    @pytest.mark.skipif(
        not CHAT.exists(), reason="the trace of chats is not there: CARGOHOLD_TRACES names its directory"
    )
    def test_it_does_not_move_with_the_length_of_a_real_trace(self) -> None:
        """Of 7 minutes it is "at least": the rest of the trace shows how much more pays."""
        requests = list(read_trace([CHAT]))
        cuts = [
            load_workload([one for one in requests if (one.arrival_ms or 0) < 60_000 * minutes])
            for minutes in (7, 14, 30)
        ]
        short, half, whole = (recommended(cut, CHAT_COSTS, 2.0)[0] for cut in cuts)
        assert short.is_least and short.num_bytes <= half.num_bytes
        assert not half.is_least and not whole.is_least
        assert half.num_bytes == pytest.approx(whole.num_bytes, rel=0.25)

    @pytest.mark.parametrize("seconds", [400, pytest.param(1600, marks=pytest.mark.long)])
    def test_what_a_full_cache_saves_does_not_move_with_the_length_of_the_trace(self, seconds: int) -> None:
        # Every second, a new chunk is used, and the one of 100 seconds ago a second and last time.
        requests = [
            TraceRequest(hash_ids=[chunk], block_tokens=BLOCK_TOKENS, timestamp_ms=1000 * second)
            for second in range(seconds)
            for chunk in (second + 100, second)
        ]
        planner, plan, _ = planned(load_workload(requests), SizingBudget(), CostModel(bytes_per_token=64), "lru")
        shares = {step.num_bytes >> 10: planner.saved_share(step.result) for step in plan.steps}
        assert shares[128] == 0.0
        assert shares[256] == pytest.approx(0.5, abs=0.01)

    def test_up_to_it_a_gib_earns_its_price_and_beyond_it_does_not(self) -> None:
        costs = CostModel(bytes_per_token=TOKEN_BYTES, prefill_tokens_per_s=100.0)
        _, plan, words = planned(looping(), SizingBudget(host_price_s=300_000.0), costs)
        assert plan.recommendation is not None
        hot = 10 * BLOCK_TOKENS * TOKEN_BYTES
        assert hot < plan.recommendation.num_bytes < 4 * hot
        assert "Beyond, it saves less." in words

    def test_if_all_of_a_long_trace_pays_it_is_all_of_it(self) -> None:
        costs = CostModel(bytes_per_token=TOKEN_BYTES, prefill_tokens_per_s=100.0)
        workload = looping(num_cold=40, rounds=5)
        _, plan, words = planned(workload, SizingBudget(), costs)
        assert plan.recommendation == Recommendation(num_bytes=workload.num_unique * BLOCK_TOKENS * TOKEN_BYTES)
        assert "It holds everything" in words and "too short" not in words

    def test_what_a_short_trace_does_not_tell_is_said(self) -> None:
        costs = CostModel(bytes_per_token=128 << 10, prefill_tokens_per_s=1000.0)
        planner, plan, words = planned(conversations(10), SizingBudget(host_price_s=0.01), costs, "lru")
        assert plan.recommendation is not None and plan.recommendation.is_least
        everything = planner.workload.num_unique * planner.chunk_bytes
        assert plan.recommendation.num_bytes == plan.longest_judged_bytes < everything
        assert "Recommended: at least" in words and "too short to tell how much more would pay" in words
        assert "The trace is too short for sizes above" in words and "record about" in words
        assert all(step.is_judged for step in plan.steps), "nothing else is shown"

    def test_a_size_asked_for_that_the_trace_cannot_fill_is_marked(self) -> None:
        budget = SizingBudget(host_bytes=1 << 40)
        planner, plan, words = planned(conversations(10), budget, CHAT_COSTS, "lru")
        assert plan.host is plan.steps[-1] and not plan.host.is_judged
        assert "The trace is too short to fill it." in words
        assert plan_table(planner, plan)[1][-1][1] == "too short"

    def test_a_dear_gib_is_not_recommended(self) -> None:
        _, plan, words = planned(looping(), SizingBudget(host_price_s=1e9), CHAT_COSTS)
        assert plan.recommendation == Recommendation(num_bytes=0) and plan.recommended is None
        assert "Recommended: no host memory." in words

    def test_where_nothing_comes_back_no_cache_is_recommended(self) -> None:
        workload = load_workload(
            TraceRequest(hash_ids=[at], block_tokens=BLOCK_TOKENS, timestamp_ms=1000 * at) for at in range(50)
        )
        _, _, words = planned(workload, SizingBudget(), CHAT_COSTS)
        assert "Nothing comes back: a cache of any size would find nothing." in words

    @pytest.mark.parametrize(("has_times", "rate", "told"), [
        (True, None, "Give --prefill-tokens-per-s"), (False, 1000.0, "the requests have no times"),
    ])  # fmt: skip
    def test_without_times_or_a_prefill_rate_no_size_is_recommended(
        self, has_times: bool, rate: float | None, told: str
    ) -> None:
        workload = load_workload(
            TraceRequest(hash_ids=[at % 9], block_tokens=BLOCK_TOKENS, timestamp_ms=at if has_times else None)
            for at in range(50)
        )
        costs = CostModel(bytes_per_token=TOKEN_BYTES, prefill_tokens_per_s=rate)
        planner, plan, words = planned(workload, SizingBudget(host_bytes=MIB, disk_bytes=MIB), costs)
        assert plan.recommendation is None and told.lower() in words.lower()
        assert as_facts(planner, plan)["recommended_host_bytes"] is None
        assert "is unknown without times and a prefill rate" in words

    @given(st.lists(st.tuples(st.integers(1, 100), st.floats(-10, 10)), min_size=1))
    def test_gains_are_evened_out_until_they_fall(self, widths: list[tuple[int, float]]) -> None:
        at, gains = 0, list[Gain]()
        for width, gain in widths:
            gains.append((at, at + width, gain))
            at += width
        evened = _falling(gains)
        values = [gain for _, _, gain in evened]
        assert values == sorted(values, reverse=True)
        assert [gain[:2] for gain in evened] == [gain[:2] for gain in gains]

        def total(some: list[Gain]) -> float:
            return sum((upper - lower) * gain for lower, upper, gain in some)

        assert total(evened) == pytest.approx(total(gains), abs=1e-6)
        # It never promises less than there is for sizes up to here: it is the hull above.
        assert all(total(evened[:upto]) >= total(gains[:upto]) - 1e-6 for upto in range(len(gains)))


class TestDemand:
    def test_it_is_said_before_and_after(self) -> None:
        # Every second, 16 tokens are asked for twice; one accelerator computes 16.
        workload = load_workload(
            TraceRequest(hash_ids=[at // 2], block_tokens=16, input_length=16, timestamp_ms=500 * at)
            for at in range(801)
        )
        costs = CostModel(bytes_per_token=TOKEN_BYTES, prefill_tokens_per_s=16.0, bytes_per_s={HOST: 1e12, DISK: 1e12})
        planner, plan, words = planned(workload, SizingBudget(host_price_s=0.001), costs, "lru")
        assert planner.demand() == pytest.approx(2.0, rel=0.01)
        assert plan.recommended is not None
        assert planner.demand_left(plan.recommended.result) == pytest.approx(1.0, rel=0.01)
        assert "Prompts ask for 32 tokens per second" in words
        assert "Without a cache, prefill keeps 2 accelerators busy." in words
        assert "With what is recommended, prefill keeps 1 accelerator busy." in words
        facts = as_facts(planner, plan)
        assert facts["demand_accelerators"] == pytest.approx(2.0, rel=0.01)
        assert facts["demand_left_accelerators"] == pytest.approx(1.0, rel=0.01)


class TestDisk:
    SLOW = CostModel(bytes_per_token=128 << 10, prefill_tokens_per_s=1000.0)

    def plan(self, **budget: Any) -> tuple[Planner, Plan, str]:
        sizes = {"host_bytes": GIB, "disk_bytes": 8 * GIB, "disk_writes_per_day": 1e6}
        planner = Planner(conversations(20), self.SLOW, "lru", SizingBudget(**sizes | budget))
        plan = planner.plan(self.results(planner.budget.disk_bytes))
        return planner, plan, " ".join((*recommend(planner, plan), *advise(planner, plan)))

    @staticmethod
    @cache
    def results(disk_bytes: int) -> list[ReplayResult]:
        planner = Planner(conversations(20), TestDisk.SLOW, "lru", SizingBudget(host_bytes=GIB, disk_bytes=disk_bytes))
        results = [result for name in ("lru", INFINITE) for result in replay(planner.workload, name, planner.curve())]
        return [*results, *replay(planner.workload, "lru", planner.further(results))]

    def test_one_that_can_do_it_and_earns_its_price_is_recommended(self) -> None:
        planner, plan, words = self.plan()
        assert plan.disk is not None and disk_problems(planner, plan.disk) == []
        assert plan.disk.is_judged and plan.disk.gib_gain > 0.1
        assert "Recommended below 1.0 GiB of host memory: 8.0 GiB of disk." in words
        left = as_facts(planner, plan)["disk"]["demand_left_accelerators"]
        assert plan.host is not None and left < (planner.demand_left(plan.host.result) or 0.0)
        assert f"Both together leave {left:.2g} accelerators busy" in words

    @pytest.mark.parametrize(
        ("limits", "problem"),
        [
            ({"disk_write_bytes_per_s": 1e8}, "it cannot keep up"),
            ({"disk_writes_per_day": 1.0}, "it wears out"),
            ({"disk_price_s": 1e6}, "less than its price"),
        ],
    )
    def test_one_that_cannot_is_said_to_be_infeasible(self, limits: dict[str, float], problem: str) -> None:
        planner, plan, words = self.plan(**limits)
        assert plan.disk is not None
        (found,) = disk_problems(planner, plan.disk)
        assert problem in found
        assert "Not recommended: 8.0 GiB of disk." in words and "Recommended below" not in words
        assert as_facts(planner, plan)["disk"]["problems"] == [found]

    def test_it_is_said_what_it_may_be_written_in_a_day(self) -> None:
        for writes_per_day in (1.0, 1e6):
            planner, plan, words = self.plan(disk_writes_per_day=writes_per_day)
            heads, rows = disk_table(planner, plan)
            assert heads[-1] == "max_daily_bytes" and plan.host is not None and plan.host.with_disk is not None
            most = format_bytes(int(8 * GIB * writes_per_day))
            assert f"max_daily_bytes={most}." in words
            disk = plan.host.with_disk[1].tiers[1]
            per_token = disk.stored * planner.chunk_bytes // (disk.loaded * (planner.workload.chunk_tokens or 0))
            (row,) = (row for row in rows if row[0] == "1.0 GiB")
            assert (row[2], row[4]) == (format_bytes(per_token), most)

    def test_what_is_written_and_read_is_that_of_the_full_disk(self) -> None:
        planner, plan, _ = self.plan()
        assert plan.disk is not None and plan.host is not None and plan.host.with_disk is not None
        alone, both = plan.host.with_disk
        assert alone.num_requests == both.num_requests < planner.workload.num_requests
        seconds = planner.workload.seconds_from(len(planner.workload.ends) - both.num_requests)
        written = both.tiers[1].stored * planner.chunk_bytes / seconds
        assert plan.disk.written_bytes_per_s == pytest.approx(written)
        assert plan.disk.writes_per_day == pytest.approx(written * 86400 / (8 * GIB))
        read = both.tiers[1].loaded * planner.chunk_bytes / seconds
        assert plan.disk.busy == pytest.approx(written / 2e9 + read / 3e9)

    def test_one_that_the_trace_cannot_fill_may_pay_later(self) -> None:
        _, plan, words = self.plan(disk_bytes=1 << 42, disk_price_s=1e6)
        assert plan.disk is not None and not plan.disk.is_judged
        assert "Whether 4.0 TiB of disk pays is unknown: the trace is too short to fill it." in words
        assert "at least" in words

    @pytest.mark.long
    @pytest.mark.skipif(
        not CHAT.exists(), reason="the trace of chats is not there: CARGOHOLD_TRACES names its directory"
    )
    def test_four_terabytes_cannot_take_what_chats_write(self) -> None:
        workload = load_workload(read_trace([CHAT]))
        planner = Planner(workload, CHAT_COSTS, "lru", SizingBudget(host_bytes=1 << 40, disk_bytes=4 * 10**12))
        results = list(replay(workload, "lru", planner.curve()))
        # The size of the budget is enough: other sizes with the disk are for the page.
        further = [size for size in planner.further(results) if len(size) == 1 or size[0] == 1 << 14]
        results += replay(workload, "lru", further)
        plan = planner.plan([*results, *replay(workload, INFINITE, [(1,)])])
        assert plan.disk is not None
        keep_up, wear = disk_problems(planner, plan.disk)
        assert "GB/s would be written" in keep_up and "times a day and endures 1" in wear


@pytest.mark.parametrize(("rate", "word"), [(100.0, "as fast as prefill"), (1e9, "does not pay")])
def test_a_tier_pays_if_it_is_faster_than_prefill(rate: float, word: str) -> None:
    costs = CostModel(bytes_per_token=TOKEN_BYTES, prefill_tokens_per_s=rate, bytes_per_s={HOST: 1e6, DISK: 1e6})
    _, _, words = planned(looping(), SizingBudget(), costs)
    assert word in words


def test_without_a_prefill_rate_the_break_even_is_told() -> None:
    costs = CostModel(bytes_per_token=1000, bytes_per_s={HOST: 5e6, DISK: 1e6})
    _, _, words = planned(looping(), SizingBudget(), costs)
    assert "as long as prefill computes less than 5,000 tokens per second" in words


def test_a_prompt_that_host_memory_can_never_hold() -> None:
    workload = load_workload([TraceRequest(hash_ids=list(range(100)), block_tokens=BLOCK_TOKENS)] * 3)
    costs = CostModel(bytes_per_token=TOKEN_BYTES)
    assert "never bring it back" in planned(workload, SizingBudget(host_bytes=MIB), costs)[2]
    assert "never bring it back" not in planned(workload, SizingBudget(host_bytes=2 * MIB), costs)[2]


def test_what_does_not_fit_the_machine() -> None:
    costs = CostModel(bytes_per_token=TOKEN_BYTES, prefill_tokens_per_s=1000.0)
    planner, plan, _ = planned(looping(), SizingBudget(host_bytes=10 * MIB, disk_bytes=20 * MIB), costs)

    assert "the host memory asked for takes 50% of it" in fits(planner, plan, 20 * MIB)
    assert "the host memory asked for does not fit" in fits(planner, plan, 5 * MIB)
    planner, plan, _ = planned(looping(), SizingBudget(), costs)
    assert "what is recommended does not fit" in fits(planner, plan, 1)


def test_what_cannot_be_planned() -> None:
    workload, costs = looping(), CostModel(bytes_per_token=TOKEN_BYTES)
    with pytest.raises(ConfigError, match="host_bytes"):
        Planner(workload, costs, "lru", SizingBudget(host_bytes=100))
    with pytest.raises(ConfigError, match="disk_bytes"):
        Planner(workload, costs, "lru", SizingBudget(host_bytes=MIB, disk_bytes=100))
    with pytest.raises(ConfigError, match="host memory above"):
        SizingBudget(disk_bytes=MIB)
    with pytest.raises(ConfigError, match="host_price_s"):
        SizingBudget(host_price_s=0.0)
    with pytest.raises(ConfigError, match="model"):
        Planner(workload, CostModel(), "lru", SizingBudget())
    untold = load_workload([TraceRequest(hash_ids=[1])])
    with pytest.raises(ConfigError, match="block-tokens"):
        Planner(untold, costs, "lru", SizingBudget())
