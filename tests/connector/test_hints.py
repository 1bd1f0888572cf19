"""Hints in a simulated engine: what is kept, for how long, within which budgets, and what each hint is told."""

from __future__ import annotations

from typing import Any

import pytest

from cargohold.blocks import ABSENT, READY, extend_hashes, root_hash
from cargohold.cache.grants import Grant
from cargohold.connector.offloading import HintConfig, TenantQuota
from cargohold.errors import ConfigError
from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, simulated_layout
from cargohold.lab.simulation.connectors import live_sides
from cargohold.lab.simulation.faults import VirtualClock
from cargohold.protocol import Hint, HintEnd, HintKind, HintOutcome, HintStatus, Prefix, metrics
from tests.connector.common import alone, evict_everything, finish, prompt
from tests.connector.offloading import ends, keys_of

ACCEPTED, CLIPPED, REJECTED, MISSING = (
    HintStatus.ACCEPTED,
    HintStatus.CLIPPED,
    HintStatus.REJECTED,
    HintStatus.MISSING,
)


def make(num_slots: int = 40, **options: Any) -> tuple[SimulatedEngine, SimulatedOffloading]:
    offloading = SimulatedOffloading(num_slots, **options)
    return SimulatedEngine(simulated_layout(60), offloading), offloading


def serve(engine: SimulatedEngine, name: str, tokens: list[int], max_tokens: int = 4, **options: Any) -> None:
    engine.add(name, tokens, max_tokens, **options)
    finish(engine)
    # With a salt, the simulated model gives other tokens; that they are right is checked in every step.
    assert "salt" in options or engine.tokens(name) == alone(tokens, max_tokens)


def later(engine: SimulatedEngine, seconds: float) -> None:
    assert isinstance(engine.clock, VirtualClock)
    engine.clock.advance(seconds)


def flood(engine: SimulatedEngine, num_requests: int = 20, first: int = 1000) -> None:
    for at in range(num_requests):
        serve(engine, f"flood {first + at}", prompt(first + at, 16))


def prefix(tokens: list[int], salt: str | None = None, tenant: str | None = None) -> Prefix:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, 4, root_hash(salt=salt))
    return Prefix(hashes, tokens, len(tokens), salt, tenant or salt)


def hint(engine: SimulatedEngine, one: Hint, about: str | Prefix) -> HintOutcome:
    (outcome,) = engine.scheduler.hint(about, [one])
    assert outcome.action_id == one.action_id
    return outcome


def present(offloading: SimulatedOffloading, tokens: list[int]) -> list[int]:
    return list(offloading.manager.lookup(keys_of(tokens, len(tokens) // 4)))


def test_a_pinned_prompt_outlives_a_flood_and_its_lease_ends_with_time() -> None:
    engine, offloading = make()
    tokens = prompt(1, 24)
    serve(engine, "first", tokens, hints=[Hint.pin(ttl_s=30, lease="agent")])
    assert engine.requests["first"].hint_outcomes[0].status is ACCEPTED
    flood(engine)
    assert present(offloading, tokens) == [READY] * 6
    later(engine, 60)
    flood(engine, first=2000)
    assert present(offloading, tokens)[-1] == ABSENT
    assert ends(engine) == [HintEnd.EXPIRED]


def test_without_a_hint_the_same_flood_evicts_the_prompt() -> None:
    engine, offloading = make(policy="lru")
    tokens = prompt(1, 24)
    serve(engine, "first", tokens)
    flood(engine)
    assert present(offloading, tokens)[-1] == ABSENT


def test_a_use_renews_a_lease() -> None:
    engine, offloading = make()
    tokens = prompt(1, 24)
    serve(engine, "first", tokens, hints=[Hint.pin(ttl_s=30)])
    later(engine, 20)
    serve(engine, "again", tokens)
    later(engine, 20)
    flood(engine)
    assert present(offloading, tokens) == [READY] * 6
    assert not ends(engine)


def test_what_the_request_generates_is_pinned_too() -> None:
    engine, offloading = make()
    tokens = prompt(1, 8)
    serve(engine, "first", tokens, max_tokens=13, hints=[Hint.pin(ttl_s=1000)])
    whole = tokens + engine.tokens("first")
    flood(engine)
    assert present(offloading, whole)[:5] == [READY] * 5


def test_release_ends_a_lease_by_name_and_only_the_tenant_s_own() -> None:
    engine, offloading = make()
    tokens = prompt(1, 24)
    serve(engine, "first", tokens, hints=[Hint.pin(ttl_s=1000, lease="agent")])
    assert hint(engine, Hint.release("agent"), prefix([], tenant="somebody else")).status is MISSING
    assert hint(engine, Hint.release("agent"), prefix([])).status is ACCEPTED
    assert hint(engine, Hint.release("agent"), prefix([])).status is MISSING
    flood(engine)
    assert present(offloading, tokens)[-1] == ABSENT
    assert ends(engine) == [HintEnd.RELEASED]


def test_leases_cover_no_more_than_their_budget_and_say_so() -> None:
    engine, offloading = make(hints=HintConfig(pin_fraction=0.1))
    tokens = prompt(1, 24)
    serve(engine, "first", tokens, hints=[Hint.pin(ttl_s=1000)])
    (outcome,) = engine.requests["first"].hint_outcomes
    assert outcome.status is CLIPPED
    assert "pin_fraction" in outcome.reason
    assert outcome.num_tokens == 16
    flood(engine)
    assert present(offloading, tokens)[:4] == [READY] * 4
    outcome = hint(engine, Hint.pin(ttl_s=1000), prefix(engine.requests["flood 1019"].all_token_ids[:16]))
    assert outcome.status is CLIPPED, "the budget is used up"
    assert outcome.num_tokens == 0


def test_a_tenant_with_a_name_has_half_of_the_budget() -> None:
    engine, _ = make(hints=HintConfig(pin_fraction=0.2))
    serve(engine, "ann", prompt(1, 24), salt="ann", hints=[Hint.pin(ttl_s=1000)])
    serve(engine, "bob", prompt(1, 24), salt="bob", hints=[Hint.pin(ttl_s=1000)])
    assert [engine.requests[name].hint_outcomes[0].num_tokens for name in ("ann", "bob")] == [16, 16]


def test_a_longer_time_than_allowed_is_clipped() -> None:
    engine, _ = make(hints=HintConfig(max_ttl_s=10))
    serve(engine, "first", prompt(1, 24), hints=[Hint.retain(ttl_s=1e6)])
    (outcome,) = engine.requests["first"].hint_outcomes
    assert outcome.status is CLIPPED
    assert "10 s at most" in outcome.reason


def test_retained_chunks_go_after_others_and_lowered_ones_first() -> None:
    engine, offloading = make(30, policy="lru")
    raised, normal, lowered = prompt(1, 16), prompt(2, 16), prompt(3, 16)
    serve(engine, "raised", raised, hints=[Hint.retain(ttl_s=1000)])
    serve(engine, "normal", normal)
    serve(engine, "lowered", lowered, hints=[Hint.retain(ttl_s=1000, priority=0)])
    flood(engine, 5)
    assert present(offloading, lowered)[-1] == ABSENT
    assert present(offloading, normal) == [READY] * 4
    flood(engine, 20, first=2000)
    assert present(offloading, normal)[-1] == ABSENT
    assert present(offloading, raised) == [READY] * 4


def test_demoted_chunks_go_first_but_a_use_makes_them_normal() -> None:
    engine, offloading = make(30, policy="lru")
    other, tokens = prompt(1, 16), prompt(2, 16)
    serve(engine, "other", other)
    serve(engine, "first", tokens)
    assert hint(engine, Hint.demote("nowhere"), prefix(tokens)).status is ACCEPTED
    serve(engine, "again", tokens)
    flood(engine, 5)
    assert present(offloading, tokens) == [READY] * 4
    assert hint(engine, Hint.demote("nowhere"), prefix(tokens)).status is ACCEPTED
    flood(engine, 1, first=2000)
    assert present(offloading, tokens)[-1] == ABSENT


@pytest.mark.parametrize("one", [Hint.pin(ttl_s=1000), Hint.retain(ttl_s=1000), Hint.demote("lower")])
@pytest.mark.parametrize("fraction", [0.5, 0.05])
def test_a_hint_right_after_an_answer_is_about_chunks_on_their_way_too(one: Hint, fraction: float) -> None:
    """Found by use: an agent pins its conversation when it learns that a tool runs, which is right after the answer."""
    engine, offloading = make(max_inflight_fraction=fraction)
    (transfers,) = offloading.transfers
    transfers.auto = False
    tokens = prompt(1, 25)
    engine.add("first", tokens, 1)
    engine.step()
    assert not engine.scheduler.num_unfinished and not offloading.manager.num_ready
    outcome = hint(engine, one, prefix(tokens))
    assert (outcome.status, outcome.num_tokens) == (ACCEPTED, 24)
    transfers.auto = True
    finish(engine, offloading)
    assert present(offloading, tokens) == [READY] * 6
    flood(engine)
    assert (present(offloading, tokens)[-1] == READY) == (one.kind is HintKind.PIN or one.kind is HintKind.RETAIN)


def test_what_is_demoted_to_nowhere_leaves_at_once_but_for_what_others_use() -> None:
    engine, offloading = make(100)
    shared = prompt(1, 12)
    serve(engine, "first", shared + prompt(2, 13), 1)
    serve(engine, "second", shared + prompt(3, 13), 1)
    outcome = hint(engine, Hint.demote("nowhere"), prefix(shared + prompt(2, 12)))
    assert (outcome.status, outcome.num_tokens) == (ACCEPTED, 24)
    assert present(offloading, shared + prompt(2, 12)) == [READY] * 3 + [ABSENT] * 3
    assert not ends(engine), "three chunks are left"
    assert hint(engine, Hint.demote("nowhere"), prefix(shared + prompt(3, 12))).status is ACCEPTED
    assert present(offloading, shared + prompt(3, 12)) == [ABSENT] * 6
    assert ends(engine) == [HintEnd.DONE]
    serve(engine, "again", shared + prompt(2, 13), 1)
    assert present(offloading, shared + prompt(2, 12)) == [READY] * 6, "a use makes it normal again"


@pytest.mark.parametrize("with_request", [True, False])
def test_what_is_demoted_to_nowhere_and_still_on_its_way_leaves_when_it_has_come(with_request: bool) -> None:
    engine, offloading = make()
    (transfers,) = offloading.transfers
    transfers.auto = False
    engine.add("first", prompt(1, 25), 1, hints=[Hint.demote("nowhere")] if with_request else ())
    engine.step()
    if not with_request:
        assert hint(engine, Hint.demote("nowhere"), prefix(prompt(1, 24))).status is ACCEPTED
    assert not ends(engine)
    transfers.auto = True
    finish(engine, offloading)
    assert offloading.manager.num_ready == 0
    assert ends(engine) == [HintEnd.DONE]


def test_nobody_drops_what_is_read_or_what_others_have_hints_on() -> None:
    engine, offloading = make()
    serve(engine, "first", prompt(1, 25))
    load = offloading.manager.prepare_load(keys_of(prompt(1, 24), 6))
    hint(engine, Hint.demote("nowhere"), prefix(prompt(1, 24)))
    assert present(offloading, prompt(1, 24)) == [READY] * 6
    load.release()
    assert hint(engine, Hint.retain(ttl_s=1000), prefix(prompt(1, 24), tenant="ann")).status is ACCEPTED
    hint(engine, Hint.demote("nowhere"), prefix(prompt(1, 24), tenant="bob"))
    assert present(offloading, prompt(1, 24)) == [READY] * 6


def test_hints_never_cross_a_salt() -> None:
    engine, offloading = make()
    tokens = prompt(1, 16)
    serve(engine, "ann", tokens, salt="ann")
    assert hint(engine, Hint.pin(ttl_s=10), prefix(tokens, "bob")).status is MISSING
    assert hint(engine, Hint.demote("nowhere"), prefix(tokens)).status is MISSING
    assert hint(engine, Hint.pin(ttl_s=10), prefix(tokens, "ann")).status is ACCEPTED
    assert offloading.manager.num_ready


@pytest.mark.parametrize(
    ("allow", "one", "status"),
    [
        ("off", Hint.retain(), REJECTED),
        ("retain", Hint.pin(), REJECTED),
        ("retain", Hint.prefetch(), REJECTED),
        ("retain", Hint.share(), REJECTED),
        ("retain", Hint.retain(), ACCEPTED),
        ("all", Hint.pin(), ACCEPTED),
    ],
)
def test_only_allowed_hints_are_carried_out(allow: str, one: Hint, status: HintStatus) -> None:
    engine, _ = make(hints=HintConfig(allow="all", allow_of={"ann": allow}))
    serve(engine, "first", prompt(1, 16), salt="ann", hints=[one])
    (outcome,) = engine.requests["first"].hint_outcomes
    assert (outcome.status, "this tenant may not" in outcome.reason) == (status, status is REJECTED)


def test_a_reset_voids_leases() -> None:
    engine, offloading = make()
    tokens = prompt(1, 16)
    serve(engine, "first", tokens, hints=[Hint.pin(ttl_s=1000)])
    assert engine.scheduler.reset_cache()
    assert ends(engine) == [HintEnd.VOID]
    serve(engine, "again", tokens)
    flood(engine)
    assert present(offloading, tokens)[-1] == ABSENT


def test_a_lease_on_what_is_not_there_is_missing_and_costs_nothing() -> None:
    engine, _ = make()
    for at in range(50):
        assert hint(engine, Hint.pin(ttl_s=1000), prefix(prompt(at, 16))).status is MISSING
    assert not engine.scheduler.connector.get_kv_connector_stats().get(metrics.PINNED_CHUNKS)


def test_chunks_of_a_lease_that_are_damaged_leave_and_others_stay() -> None:
    engine, offloading = make()
    tokens = prompt(1, 24)
    serve(engine, "first", tokens, hints=[Hint.pin(ttl_s=50)])
    offloading.manager.remove(keys_of(tokens, 6)[3:])
    flood(engine)
    assert present(offloading, tokens) == [READY] * 3 + [ABSENT] * 3
    offloading.manager.remove(keys_of(tokens, 6))
    later(engine, 100)
    flood(engine, 1, first=3000)
    assert ends(engine) == [HintEnd.VOID]


def test_a_flood_of_pins_costs_another_tenant_no_more_than_its_quota_says() -> None:
    quotas = [TenantQuota(tenant="ann", reserved="50%")]
    engine, offloading = make(quotas=quotas, hints=HintConfig(pin_fraction=1.0))
    for at in range(5):
        serve(engine, f"ann {at}", prompt(at, 16), salt="ann")
    before = offloading.manager.usage()["ann"]
    for at in range(30):
        # Each may have half of all leases.
        serve(engine, f"other {at}", prompt(100 + at, 16), salt=("eve", "bob")[at % 2], hints=[Hint.pin(ttl_s=1000)])
    assert sum(len(lease.keys) for lease in grants_of(engine)) <= offloading.manager.capacity // 2
    assert offloading.manager.usage()["ann"] == before
    for at in range(10):
        serve(engine, f"more {at}", prompt(200 + at, 16), salt="ann", hints=[Hint.retain()])
    assert offloading.manager.usage()["ann"] >= 20, "leases of others leave what is reserved"


def test_more_reserved_than_there_is_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="reserved"):
        make(quotas=[TenantQuota(tenant="ann", reserved="60%"), TenantQuota(tenant="bob", reserved="60%")])


def end_before_all_is_stored(num_tokens: int, **options: Any) -> tuple[SimulatedEngine, SimulatedOffloading]:
    """Let a request with a lease end in its first step, while copies take long and may hold six blocks."""
    offloading = SimulatedOffloading(60, max_inflight_fraction=0.1, **options)
    engine = SimulatedEngine(simulated_layout(60), offloading, max_num_batched_tokens=64)
    offloading.transfers[0].auto = False
    engine.add("r", prompt(0, num_tokens), 1, hints=[Hint.pin(ttl_s=30)])
    engine.step()
    assert not engine.scheduler.num_unfinished
    return engine, offloading


def test_what_was_not_stored_at_the_end_of_a_leased_request_is_stored_although_others_want_its_blocks() -> None:
    engine, offloading = end_before_all_is_stored(49)
    assert engine.scheduler.kv.pool.num_free_blocks == 59 - 12, "six are copied, and six wait for that"
    evict_everything(engine)
    offloading.transfers[0].auto = True
    finish(engine, offloading)
    assert present(offloading, prompt(0, 48)) == [READY] * 12
    assert engine.scheduler.kv.pool.num_free_blocks == 59


def test_blocks_of_a_leased_request_are_held_for_no_longer_than_restore_timeout() -> None:
    engine, offloading = end_before_all_is_stored(49, restore_timeout_s=2.0)
    later(engine, 3)
    for _ in range(10):
        engine.step()
    assert engine.scheduler.kv.pool.num_free_blocks == 59 - 6, "only what is being copied"
    evict_everything(engine)
    offloading.transfers[0].auto = True
    finish(engine, offloading)
    assert offloading.manager.num_ready == 6


def test_a_leased_request_whose_blocks_are_too_many_to_be_held_says_so() -> None:
    engine, offloading = end_before_all_is_stored(61)
    assert engine.scheduler.kv.pool.num_free_blocks == 59 - 6
    report = engine.outputs["r"].cache_report
    assert any("its last chunks may be lost" in note for note in report.notes), report.notes
    offloading.transfers[0].auto = True
    finish(engine, offloading)
    assert present(offloading, prompt(0, 60)) == [READY] * 15, "nobody wanted its blocks"


def test_all_tenants_together_pin_no_more_than_the_budget() -> None:
    engine, _ = make(hints=HintConfig(pin_fraction=0.2))
    for name in ("ann", "bob", "eve"):
        serve(engine, name, prompt(1, 24), salt=name, hints=[Hint.pin(ttl_s=1000)])
    pinned = [engine.requests[name].hint_outcomes[0].num_tokens for name in ("ann", "bob", "eve")]
    assert pinned == [16, 16, 0]


@pytest.mark.parametrize("end", [8, 9, 11])
def test_a_hint_covers_the_whole_chunks_of_its_range(end: int) -> None:
    engine, _ = make()
    serve(engine, "first", prompt(1, 24))
    assert hint(engine, Hint.pin(ttl_s=1000, end=end), prefix(prompt(1, 24))).num_tokens == 8
    assert engine.scheduler.connector.get_kv_connector_stats()[metrics.PINNED_CHUNKS] == 2


def test_a_tenant_neither_releases_nor_renews_what_another_has_pinned_of_the_same_prompt() -> None:
    engine, offloading = make(hints=HintConfig(pin_fraction=0.5))
    tokens = prompt(1, 24)
    serve(engine, "first", tokens)
    for name in ("ann", "bob"):
        assert hint(engine, Hint.pin(ttl_s=30, lease=name), prefix(tokens, tenant=name)).status is ACCEPTED
    assert hint(engine, Hint.release(), prefix(tokens, tenant="bob")).status is ACCEPTED
    assert hint(engine, Hint.release(), prefix(tokens, tenant="bob")).status is MISSING
    flood(engine)
    assert present(offloading, tokens) == [READY] * 6, "ann has them still"
    later(engine, 20)
    serve(engine, "bob", tokens, tenant="bob")
    later(engine, 20)
    flood(engine, 1, first=2000)
    assert ends(engine) == [HintEnd.RELEASED, HintEnd.EXPIRED]


def test_a_hint_with_an_end_covers_nothing_that_its_request_generates() -> None:
    engine, _ = make()
    serve(engine, "first", prompt(1, 16), max_tokens=9, hints=[Hint.pin(ttl_s=1000, end=20)])
    assert engine.scheduler.connector.get_kv_connector_stats()[metrics.PINNED_CHUNKS] == 4


def test_where_hints_meet_the_newest_counts_and_the_one_before_counts_again_when_it_ends() -> None:
    engine, offloading = make(12, policy="lru", hints=HintConfig(retain_fraction=1.0))
    tokens = prompt(1, 16)
    serve(engine, "first", tokens, max_tokens=1)
    for one in (Hint.retain(ttl_s=1000, priority=90), Hint.retain(ttl_s=20, priority=10)):
        assert hint(engine, one, prefix(tokens)).status is ACCEPTED
    serve(engine, "other", prompt(2, 28), max_tokens=1)
    serve(engine, "more", prompt(3, 16), max_tokens=1)
    assert present(offloading, tokens)[-1] == ABSENT, "lowered chunks go first"
    assert present(offloading, prompt(2, 28)) == [READY] * 7
    offloading.manager.remove(keys_of(prompt(2, 28), 7))
    serve(engine, "again", tokens, max_tokens=1)
    later(engine, 30)
    flood(engine, 5)
    assert present(offloading, tokens) == [READY] * 4, "what is raised goes last"


def test_a_release_of_a_range_ends_no_hint_about_what_is_before_it() -> None:
    engine, _ = make()
    tokens = prompt(1, 24)
    serve(engine, "first", tokens)
    assert hint(engine, Hint.pin(ttl_s=1000, end=8), prefix(tokens)).status is ACCEPTED
    assert hint(engine, Hint.release(start=8), prefix(tokens)).status is MISSING
    assert hint(engine, Hint.release(start=4), prefix(tokens)).status is ACCEPTED


def share_a_prompt(**options: Any) -> tuple[SimulatedEngine, SimulatedOffloading, list[int]]:
    """Two tenants without salts, one of which has stored a prompt that both use."""
    engine, offloading = make(quotas=[TenantQuota(tenant="ann", hard="50%"), TenantQuota(tenant="bob")], **options)
    tokens = prompt(1, 16)
    engine.add("ann", tokens, 1, tenant="ann")
    finish(engine)
    return engine, offloading, tokens


def test_a_lease_claims_no_chunk_that_counts_for_another_tenant() -> None:
    engine, offloading, tokens = share_a_prompt()
    outcome = hint(engine, Hint.pin(ttl_s=1000), prefix(tokens, tenant="bob"))
    assert (outcome.status, outcome.num_tokens) == (MISSING, 0)
    assert "another tenant" in outcome.reason
    engine.add("bob", [*tokens, *prompt(2, 8)], 1, tenant="bob", hints=[Hint.pin(ttl_s=1000)])
    finish(engine)
    assert engine.requests["bob"].hint_outcomes[0].status is CLIPPED
    assert engine.scheduler.connector.get_kv_connector_stats()[metrics.PINNED_CHUNKS] == 2, "bob's own"
    offloading.manager.check()


def test_a_lease_lets_go_of_a_chunk_that_comes_back_for_another_tenant() -> None:
    engine, offloading, tokens = share_a_prompt()
    assert hint(engine, Hint.pin(ttl_s=1000), prefix(tokens, tenant="ann")).status is ACCEPTED
    offloading.manager.remove(keys_of(tokens, 4))
    engine.add("bob", tokens, 1, tenant="bob")
    finish(engine)
    assert offloading.manager.usage()["bob"] == 4
    assert not engine.scheduler.connector.get_kv_connector_stats().get(metrics.PINNED_CHUNKS), (
        "nobody holds what nobody may"
    )


def test_a_priority_under_a_name_is_replaced_and_released_by_it() -> None:
    """As a front keeps a conversation from turn to turn, until it has been answered."""
    engine, offloading = make()
    tokens = prompt(1, 24)
    for turn in (tokens, [*tokens, *prompt(2, 8)]):
        serve(engine, f"turn {len(turn)}", turn, hints=[Hint.retain(ttl_s=300, lease="turn")])
    flood(engine)
    assert present(offloading, tokens) == [READY] * 6
    assert ends(engine) == [HintEnd.RELEASED], "the second has replaced the first"
    assert hint(engine, Hint.release("turn"), prefix([])).status is ACCEPTED
    flood(engine, first=2000)
    assert present(offloading, tokens)[-1] == ABSENT


def test_a_part_of_a_prompt_is_rounded_down_to_chunks() -> None:
    engine, _ = make()
    tokens = prompt(1, 24)
    parts = (0.01, 0.34, 0.7, 1.0)
    serve(engine, "first", tokens, hints=[Hint.retain(ttl_s=30, part=part, action_id=str(part)) for part in parts])
    assert [outcome.num_tokens for outcome in engine.requests["first"].hint_outcomes] == [0, 8, 16, 24]


def grants_of(engine: SimulatedEngine) -> list[Grant]:
    (side,) = live_sides(engine.scheduler.connector)
    return list(side.hints.grants)


def retained(num_tokens: int, **options: Any) -> Hint:
    return Hint.retain(ttl_s=1000, end=num_tokens, **options)


def test_among_equals_new_hints_displace_the_oldest() -> None:
    engine, offloading = make(40, policy="lru")
    old, new = prompt(1, 64), prompt(2, 64)
    serve(engine, "old", old, hints=[retained(64)])
    serve(engine, "new", new, hints=[retained(64)])
    (outcome,) = engine.requests["new"].hint_outcomes
    assert (outcome.status, outcome.num_tokens) == (ACCEPTED, 64)
    flood(engine, 8)
    assert present(offloading, new) == [READY] * 16
    assert present(offloading, old) == [READY] * 4 + [ABSENT] * 12, "of 20 chunks, four are left for the old hint"
    serve(engine, "newest", prompt(3, 80), hints=[retained(80)])
    assert ends(engine) == [HintEnd.RELEASED] * 2


def test_hints_displace_none_that_ask_for_more_and_no_lease() -> None:
    engine, offloading = make(40, policy="lru")
    raised, pinned = prompt(1, 80), prompt(2, 40)
    serve(engine, "raised", raised, hints=[retained(80, priority=90)])
    serve(engine, "pinned", pinned, hints=[Hint.pin(ttl_s=1000, end=40)])
    serve(engine, "new", prompt(3, 16), hints=[retained(16, priority=80)])
    assert [one.status for one in engine.requests["new"].hint_outcomes] == [CLIPPED]
    assert hint(engine, Hint.pin(ttl_s=1000), prefix(prompt(3, 16))).status is CLIPPED
    flood(engine)
    assert present(offloading, pinned) == [READY] * 10 and present(offloading, raised) == [READY] * 20


def test_a_tenant_displaces_its_own_once_it_has_its_part_and_before_the_largest_other_s() -> None:
    engine, _ = make(80, policy="lru")
    for at in range(4):
        serve(engine, f"ann {at}", prompt(at, 40), salt="ann", hints=[retained(40, priority=90)])
        serve(engine, f"bob {at}", prompt(10 + at, 20), salt="bob", hints=[retained(20)])
    for at in range(3):
        serve(engine, f"eve {at}", prompt(20 + at, 40), salt="eve", hints=[retained(40)])
        assert engine.requests[f"eve {at}"].hint_outcomes[0].status is ACCEPTED
    grants = grants_of(engine)
    own = {name: sum(len(one.keys) for one in grants if one.tenant == name) for name in ("ann", "bob", "eve")}
    assert own == {"ann": 13, "bob": 14, "eve": 13}, "an equal part of the 40 chunks"


def test_a_conversation_that_is_marked_in_each_turn_takes_its_chunks_once() -> None:
    engine, _ = make(80)
    tokens = prompt(1, 16)
    for at in range(6):
        serve(engine, f"turn {at}", tokens, hints=[Hint.retain(ttl_s=1000)])
        tokens = [*tokens, *engine.tokens(f"turn {at}"), *prompt(2 + at, 4)]
    (last,) = grants_of(engine)
    assert len(last.keys) == (len(tokens) - 4) // 4
    assert ends(engine) == [HintEnd.RELEASED] * 5


def test_when_there_are_too_many_hints_the_oldest_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cargohold.cache.grants.MAX_GRANTS", 4)
    engine, _ = make(80)
    serve(engine, "pinned", prompt(0, 16), hints=[Hint.pin(ttl_s=1000)])
    for at in range(1, 5):
        serve(engine, f"{at}", prompt(at, 16), hints=[Hint.retain(ttl_s=1000)])
        assert engine.requests[f"{at}"].hint_outcomes[0].status is ACCEPTED
    assert ends(engine) == [HintEnd.RELEASED] * 3
    assert [one.is_lease for one in grants_of(engine)] == [True, False]
    serve(engine, "second pin", prompt(6, 16), hints=[Hint.pin(ttl_s=1000)])
    serve(engine, "too many", prompt(5, 16), hints=[Hint.retain(ttl_s=1000)])
    assert "too many hints" in engine.requests["too many"].hint_outcomes[0].reason
