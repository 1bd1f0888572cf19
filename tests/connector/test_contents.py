"""What the connector tells people of what it keeps: pins, tenants, and the prefixes of the last requests."""

from __future__ import annotations

import pytest

from cargohold.connector.guests.meters import MAX_MARKS, MAX_PREFIXES
from cargohold.connector.offloading import HintConfig, TenantQuota
from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, simulated_layout
from cargohold.protocol import Hint, TierContents, metrics
from tests.connector.common import prompt
from tests.connector.test_hints import flood, hint, later, make, prefix, serve


def contents(engine: SimulatedEngine) -> TierContents:
    (of_tier,) = engine.scheduler.connector.get_contents()
    assert of_tier.tier == "host"
    return of_tier


def kept(engine: SimulatedEngine) -> list[tuple[int, int]]:
    """Tokens and uses of each prefix, the longest first."""
    return [(one.num_tokens, one.num_uses) for one in contents(engine).prefixes]


def test_a_pin_is_told_with_what_it_covers_until_it_ends() -> None:
    engine, _ = make()
    tokens = prompt(1, 12)
    serve(engine, "first", tokens, 1, hints=[Hint.pin(20, "mine")], salt="acme")
    (pin,) = contents(engine).pins
    assert (pin.lease, pin.tenant, pin.num_chunks, pin.num_tokens) == ("mine", "acme", 3, 12)
    assert 0 < pin.left_s <= 20
    later(engine, 10)
    assert contents(engine).pins[0].left_s == pytest.approx(pin.left_s - 10)
    serve(engine, "again", tokens, salt="acme")
    assert contents(engine).pins[0].left_s > pin.left_s - 5, "a use renews it"
    later(engine, 30)
    assert not contents(engine).pins, "its time is over, whether or not the engine has stepped since"


def test_the_pin_that_ends_first_is_in_front_and_a_released_one_is_gone() -> None:
    engine, _ = make()
    tokens = prompt(1, 8)
    serve(engine, "first", tokens)
    for ttl_s in (50, 20, 90):
        hint(engine, Hint.pin(ttl_s, f"for {ttl_s}"), prefix(tokens))
    assert [pin.lease for pin in contents(engine).pins] == ["for 20", "for 50", "for 90"]
    hint(engine, Hint.release("for 50"), prefix(tokens))
    assert [pin.lease for pin in contents(engine).pins] == ["for 20", "for 90"]
    assert sum(pin.num_chunks for pin in contents(engine).pins) <= contents(engine).max_pinned_chunks


def test_a_pin_covers_what_the_request_generates() -> None:
    engine, _ = make()
    serve(engine, "first", prompt(1, 24), 12, hints=[Hint.pin(20, "mine")])
    assert contents(engine).pins[0].num_tokens == 36


def test_each_tenant_with_a_quota_is_counted() -> None:
    engine, offloading = make(quotas=(TenantQuota(tenant="acme"),))
    serve(engine, "one", prompt(1, 24), salt="acme")
    serve(engine, "two", prompt(2, 16), salt="zebra")
    uses = {use.tenant: use for use in contents(engine).tenants}
    assert {name: use.num_chunks for name, use in uses.items()} == offloading.manager.usage()
    assert uses["acme"].num_chunks == 6 and uses["others"].num_chunks == 4
    chunk_bytes = engine.scheduler.connector.get_kv_connector_stats()[metrics.TIER_READY.of("host")] / 10
    assert all(use.num_bytes == use.num_chunks * chunk_bytes for use in uses.values())


def test_a_prefix_is_told_for_each_tenant_that_uses_it() -> None:
    engine, _ = make()
    for number, tenant in enumerate(("ann", "bob", "ann")):
        serve(engine, str(number), prompt(1, 24), 1, tenant=tenant)
    assert {(one.tenant, one.num_tokens, one.num_uses) for one in contents(engine).prefixes} == {
        ("ann", 24, 2),
        ("bob", 24, 1),
    }


def test_a_tenant_with_a_name_may_pin_half_of_what_all_may() -> None:
    engine, _ = make(hints=HintConfig(pin_fraction=0.25))
    assert (contents(engine).max_pinned_chunks, contents(engine).max_pinned_chunks_each) == (10, 5)


def test_turns_of_a_conversation_are_one_prefix() -> None:
    engine, _ = make()
    tokens = prompt(1, 48)
    for number, length in enumerate((16, 32, 48)):
        serve(engine, f"turn {number}", tokens[:length], 1)
    serve(engine, "other", prompt(2, 24), 1, salt="acme")
    assert kept(engine) == [(48, 3), (24, 1)]
    assert [one.tenant for one in contents(engine).prefixes] == [None, "acme"]


def test_questions_about_one_document_are_one_prefix_and_a_long_conversation_is_another() -> None:
    engine, _ = make(80)
    document, conversation = prompt(1, 24), prompt(2, 60)
    for number in range(4):
        serve(engine, f"question {number}", [*document, *prompt(10 + number, 8)], 1)
    assert kept(engine) == [(24, 4)]
    for number, length in enumerate((36, 60)):
        serve(engine, f"turn {number}", [*document, *conversation[:length]], 1)
    assert kept(engine) == [(84, 2), (24, 6)], "it begins with the document, too"
    serve(engine, "other", [*document[:8], *prompt(3, 24)], 1)
    assert kept(engine) == [(84, 2), (32, 1), (24, 6)], "what is alike at the very beginning only is not shared"


def test_the_same_prompt_again_is_the_same_prefix() -> None:
    engine, _ = make()
    for number in range(3):
        serve(engine, f"request {number}", prompt(1, 24), 1)
    assert kept(engine) == [(24, 3)]


def test_how_long_a_prefix_was_not_used_is_told() -> None:
    engine, _ = make()
    serve(engine, "first", prompt(1, 24))
    later(engine, 40)
    assert contents(engine).prefixes[0].idle_s == pytest.approx(40, abs=5)


def test_of_what_is_evicted_nothing_is_told() -> None:
    engine, _ = make()
    serve(engine, "first", prompt(1, 48), 1)
    left = [48]
    for number in range(20):
        flood(engine, 1, first=number)
        left.append(max([tokens for tokens, _ in kept(engine) if tokens > 20], default=0))  # those of the flood have 20
    assert left == sorted(left, reverse=True), "it goes from its end"
    assert {48, 0} < set(left), "it goes by and by"


def test_a_reset_forgets_all_prefixes_and_pins() -> None:
    engine, _ = make()
    serve(engine, "first", prompt(1, 24), hints=[Hint.pin(20, "mine")])
    assert engine.scheduler.reset_cache()
    assert (contents(engine).pins, contents(engine).prefixes) == ([], [])
    serve(engine, "again", prompt(1, 24))
    assert kept(engine) == [(24, 1)]


def test_no_more_prefixes_are_remembered_than_may_be() -> None:
    engine, _ = make(2 * MAX_PREFIXES)
    for number in range(MAX_PREFIXES + 5):
        serve(engine, f"request {number}", prompt(number, 5), 1)
    assert kept(engine) == [(4, 1)] * MAX_PREFIXES


@pytest.mark.parametrize("num_chunks", [MAX_MARKS - 1, MAX_MARKS, MAX_MARKS + 1, 3 * MAX_MARKS + 2])
def test_a_long_prefix_is_told_as_a_whole(num_chunks: int) -> None:
    engine = SimulatedEngine(simulated_layout(num_chunks + 20), SimulatedOffloading(num_chunks + 10))
    serve(engine, "long", prompt(1, 4 * num_chunks), 1)
    assert kept(engine) == [(4 * num_chunks, 1)]
