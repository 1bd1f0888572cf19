from __future__ import annotations

import pytest

from cargohold.errors import ConfigError
from cargohold.replay.advice import Machine, advise, fits
from cargohold.replay.costs import CostModel
from cargohold.replay.loading import load_workload
from cargohold.replay.planning import Budget, Plan, Planner
from cargohold.replay.replaying import replay
from cargohold.replay.tiers import DISK, HOST
from cargohold.replay.traces import TraceRequest
from cargohold.replay.workload import Workload

TOKEN_BYTES = 1 << 10
BLOCK_TOKENS = 16
MIB = 1 << 20


def looping(num_hot: int = 20, num_cold: int = 180) -> Workload:
    """A few prompts that come all the time, and many that come twice, far apart: a curve with one sharp bend."""
    requests: list[TraceRequest] = []
    for at in range(2 * num_cold):
        hot, cold = at % num_hot, at % num_cold
        for block in (hot, num_hot + cold):
            arrival_ms = 1000.0 * len(requests)
            requests.append(TraceRequest(hash_ids=[block], block_tokens=BLOCK_TOKENS, timestamp_ms=arrival_ms))
    return load_workload(requests)


def planned(workload: Workload, budget: Budget, costs: CostModel) -> tuple[Planner, Plan, str]:
    planner = Planner(workload, costs, "arc", budget)
    results = [
        result for policy in ("arc", "optimum", "infinite") for result in replay(workload, policy, planner.curve())
    ]
    results += replay(workload, "arc", planner.tiers())
    plan = planner.plan(results)
    return planner, plan, " ".join(advise(planner, plan, workload, costs, budget))


def test_the_bend_is_where_what_is_hot_fits() -> None:
    workload = looping()
    _, plan, words = planned(workload, Budget(), CostModel(bytes_per_token=TOKEN_BYTES))
    assert plan.knee is not None and 20 <= plan.knee.num_chunks <= 64
    assert "The curve bends at" in words
    assert [step.num_chunks for step in plan.steps] == sorted({step.num_chunks for step in plan.steps})
    assert plan.steps[-1].num_chunks == workload.num_unique
    assert sum(step.added_hit_tokens for step in plan.steps) == plan.steps[-1].result.num_hit_tokens


def test_the_budget_is_on_the_curve_and_more_memory_than_needed_does_not_move_the_bend() -> None:
    workload, costs = looping(), CostModel(bytes_per_token=TOKEN_BYTES)
    _, without, _ = planned(workload, Budget(), costs)
    _, plan, words = planned(workload, Budget(host_bytes=100 * MIB), costs)
    assert plan.steps[-1].num_bytes == 100 * MIB
    assert plan.knee is not None and without.knee is not None
    assert plan.knee.num_chunks == without.knee.num_chunks
    assert plan.host is plan.steps[-1].result
    assert "100 MiB of host memory" in words


def test_a_disk_is_judged_by_what_it_adds_and_by_its_wear() -> None:
    workload, costs = looping(), CostModel(bytes_per_token=TOKEN_BYTES, prefill_tokens_per_s=1000.0)
    budget = Budget(host_bytes=25 * BLOCK_TOKENS * TOKEN_BYTES, disk_bytes=100 * MIB)
    _, plan, words = planned(workload, budget, costs)
    assert plan.host is not None and plan.both is not None
    assert plan.both.num_prefix_hits > plan.host.num_prefix_hits
    assert "written per hour" in words and "points)" in words


@pytest.mark.parametrize(("rate", "word"), [(100.0, "pays:"), (1e9, "does not pay")])
def test_a_tier_pays_if_it_is_faster_than_prefill(rate: float, word: str) -> None:
    costs = CostModel(bytes_per_token=TOKEN_BYTES, prefill_tokens_per_s=rate, bytes_per_s={HOST: 1e6, DISK: 1e6})
    _, _, words = planned(looping(), Budget(), costs)
    assert word in words


def test_where_nothing_comes_back_no_bend_is_claimed() -> None:
    workload = load_workload(TraceRequest(hash_ids=[at], block_tokens=BLOCK_TOKENS) for at in range(50))
    _, plan, words = planned(workload, Budget(), CostModel(bytes_per_token=TOKEN_BYTES))
    assert plan.knee is None
    assert "Nothing comes back: a cache of any size would find nothing." in words and "brings more" not in words
    told = " ".join(fits(Budget(), plan, Machine(memory_bytes=20 * MIB)))
    assert told == "This machine, with the limits of its control groups, allows 20 MiB in all."


def test_without_a_prefill_rate_the_break_even_is_told() -> None:
    costs = CostModel(bytes_per_token=1000, bytes_per_s={HOST: 5e6, DISK: 1e6})
    _, _, words = planned(looping(), Budget(), costs)
    assert "as long as prefill computes less than 5,000 tokens per second" in words


def test_a_prompt_that_host_memory_can_never_hold() -> None:
    workload = load_workload([TraceRequest(hash_ids=list(range(100)), block_tokens=BLOCK_TOKENS)] * 3)
    costs = CostModel(bytes_per_token=TOKEN_BYTES)
    assert "never bring it back" in planned(workload, Budget(host_bytes=MIB), costs)[2]
    assert "never bring it back" not in planned(workload, Budget(host_bytes=2 * MIB), costs)[2]


def test_what_does_not_fit_the_machine() -> None:
    budget = Budget(host_bytes=10 * MIB, disk_bytes=20 * MIB)
    _, plan, _ = planned(looping(), budget, CostModel(bytes_per_token=TOKEN_BYTES))

    def words(memory_bytes: int, disk_free_bytes: int | None) -> str:
        return " ".join(fits(budget, plan, Machine(memory_bytes=memory_bytes, disk_free_bytes=disk_free_bytes)))

    assert "the host memory asked for takes 50% of it" in words(20 * MIB, None)
    assert "the host memory asked for does not fit" in words(5 * MIB, None)
    assert "20 MiB fits" in words(20 * MIB, 20 * MIB)
    assert "20 MiB does not fit" in words(20 * MIB, 19 * MIB)
    told = fits(Budget(), plan, Machine(memory_bytes=20 * MIB, disk_free_bytes=19 * MIB))
    assert list(told)[-1] == "The disk has 19 MiB free."
    assert "the bend of the curve does not fit" in " ".join(fits(Budget(), plan, Machine(memory_bytes=1)))


def test_a_trace_without_hits_or_times() -> None:
    workload = load_workload([TraceRequest(hash_ids=[at], block_tokens=BLOCK_TOKENS) for at in range(50)])
    costs = CostModel(bytes_per_token=TOKEN_BYTES, prefill_tokens_per_s=10.0)
    _, plan, words = planned(workload, Budget(host_bytes=MIB), costs)
    assert plan.knee is None
    assert "0.0% prefix hits" in words and "0.0 s of prefill saved." in words


def test_what_cannot_be_planned() -> None:
    workload, costs = looping(), CostModel(bytes_per_token=TOKEN_BYTES)
    with pytest.raises(ConfigError, match="host_bytes"):
        Planner(workload, costs, "lru", Budget(host_bytes=100))
    with pytest.raises(ConfigError, match="disk_bytes"):
        Planner(workload, costs, "lru", Budget(host_bytes=MIB, disk_bytes=100))
    with pytest.raises(ConfigError, match="host memory above"):
        Budget(disk_bytes=MIB)
    with pytest.raises(ConfigError, match="model"):
        Planner(workload, CostModel(), "lru", Budget())
    untold = load_workload([TraceRequest(hash_ids=[1])])
    with pytest.raises(ConfigError, match="block-tokens"):
        Planner(untold, costs, "lru", Budget())
