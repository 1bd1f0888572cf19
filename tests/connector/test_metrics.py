"""What connectors count, as operators see it."""

from __future__ import annotations

import pytest

from cargohold.connector import metrics
from cargohold.connector.metrics import OutageLevels, Series, for_operators, from_the_start, series_of
from cargohold.protocol import Outage, Stats, add_stats, labelled


@pytest.mark.parametrize(
    ("counter", "family", "labels"),
    [
        ("disk_hit_tokens", "cargohold_prompt_tokens", ("disk",)),
        ("device_tokens", "cargohold_prompt_tokens", ("device",)),
        ("stored_chunks", "cargohold_stored_chunks", ("host",)),
        ("disk_stored_chunks", "cargohold_stored_chunks", ("disk",)),
        ("disk_not_stored_chunks", "cargohold_not_stored_chunks", ("disk",)),
        ("disk_loaded_bytes", "cargohold_moved_bytes", ("disk", "out")),
        ("num_disk_bytes", "cargohold_tier_ready_bytes", ("disk",)),
        ("num_disk_capacity_tokens", "cargohold_tier_capacity_tokens", ("disk",)),
        ("host_load_le_50ms", "cargohold_load_seconds", ("host",)),
        ("disk_look_up_sum_le_inf", "cargohold_look_up_seconds", ("disk",)),
        ("wait_le_1ms", "cargohold_wait_seconds", ()),
        ("stored_again_chunks", "cargohold_connector", ("stored_again_chunks",)),
        ("num_ready_chunks", "cargohold_connector_level", ("num_ready_chunks",)),
        ("num_held", "cargohold_connector_level", ("num_held",)),
        ("hints_accepted", "cargohold_hints", ("accepted",)),
        (labelled("num_host_tenant_bytes", "a.b\tc"), "cargohold_tenant_bytes", ("host", "a.b c")),
        (labelled("num_host_quota_tokens", "acme", "soft"), "cargohold_tenant_quota_tokens", ("host", "acme", "soft")),
        ("held_bytes", "cargohold_connector", ("held_bytes",)),
    ],
)
def test_each_counter_has_its_time_series(counter: str, family: str, labels: tuple[str, ...]) -> None:
    series = series_of(counter)
    assert (series.family.name, series.values) == (family, labels)
    assert len(series.family.labels) == len(labels)


def test_several_connectors_are_added_up_and_levels_told_in_tokens_too() -> None:
    stats: Stats = {
        "left.num_host_bytes": 300.0,
        "right.num_host_bytes": 100.0,
        "load_blocks": 3.0,
        "left.loads": 2.0,
        "left.num_host_tenant_bytes\ta.b": 60.0,
        "disk_stored_bytes": 7.0,
    }
    assert for_operators(stats, block_bytes=50, token_bytes=20) == {
        "num_host_bytes": 400,
        "num_host_tokens": 20,
        "num_host_tenant_bytes\ta.b": 60,
        "num_host_tenant_tokens\ta.b": 3,
        "host_loaded_bytes": 150,
        "host_stored_bytes": 0,
        "disk_stored_bytes": 7,
    }


def test_a_token_that_several_devices_hold_is_one_token() -> None:
    stats: Stats = {"num_device_bytes": 800.0, "num_host_bytes": 400.0}
    told = for_operators(stats, block_bytes=50, token_bytes=20, num_replicas=4)
    assert (told["num_device_tokens"], told["num_host_tokens"]) == (10, 20)


def shown(total: Stats) -> dict[Series, float]:
    return {series_of(counter): value for counter, value in total.items() if value}


def test_outages_are_levels_that_come_and_go() -> None:
    levels = OutageLevels(epoch=1000.0)
    total: Stats = {}
    outage = Outage("disk", "loads and writes", "OSError: [Errno 5]\n on /nvme.2", since=1.5, retry_at=3.0)
    labels = ("disk", "loads and writes", "OSError: [Errno 5] on /nvme.2")
    total = add_stats(total, levels.take_changes([outage]))
    assert shown(total) == {
        Series(metrics.OUTAGE_SINCE, labels): 1001.5,
        Series(metrics.OUTAGE_RETRY, labels): 1003.0,
    }
    total = add_stats(total, levels.take_changes([Outage(outage.tier, outage.what, outage.reason, since=1.5)]))
    assert shown(total) == {Series(metrics.OUTAGE_SINCE, labels): 1001.5}, "no trial any more"
    total = add_stats(total, levels.take_changes([]))
    assert shown(total) == {}
    assert levels.take_changes([]) == {}


def test_reasons_that_are_all_different_do_not_make_time_series_without_end() -> None:
    levels = OutageLevels(epoch=0.0)
    counters: set[str] = set()
    for at in range(100):
        counters |= levels.take_changes([Outage("shared", "loads", f"request {at}: {'x' * 500}", since=1.0)]).keys()
    reasons = {series_of(counter).values[2] for counter in counters}
    assert len(reasons) == 17 and max(map(len, reasons)) <= 200


GOLDEN = """
prompt_tokens counter tier
tier_capacity_bytes gauge tier
tier_ready_bytes gauge tier
tier_pinned_bytes gauge tier
tier_in_use_bytes gauge tier
tier_capacity_tokens gauge tier
tier_ready_tokens gauge tier
tier_pinned_tokens gauge tier
tier_in_use_tokens gauge tier
tenant_bytes gauge tier tenant
tenant_tokens gauge tier tenant
tenant_quota_bytes gauge tier tenant limit
tenant_quota_tokens gauge tier tenant limit
hints counter outcome
moved_bytes counter tier direction
stored_chunks counter tier
removed_chunks counter tier
not_stored_chunks counter tier
not_loaded_chunks counter tier
corrupt_chunks counter tier
tier_failures counter tier
suspensions counter tier
failures counter kind
deferred_lookups counter
deferred_stores counter
load_tokens counter
prefill_tokens counter
prefill_seconds counter
time_to_first_token_seconds histogram cache
wait_seconds histogram
reuse_gap_seconds histogram
load_seconds histogram tier
store_seconds histogram tier
fetch_seconds histogram tier
write_seconds histogram tier
look_up_seconds histogram tier
lifetime_seconds histogram tier
outage_since_timestamp_seconds gauge tier what reason
outage_retry_timestamp_seconds gauge tier what reason
connector counter counter
connector_level gauge counter
"""


def test_names_kinds_and_labels_stay_as_dashboards_know_them() -> None:
    told = [f"{family.name} {' '.join((family.kind.value, *family.labels))}" for family in metrics.FAMILIES]
    assert told == [f"cargohold_{line}" for line in GOLDEN.strip().splitlines()]


def test_each_family_that_only_grows_says_what_it_begins_with() -> None:
    for family in metrics.FAMILIES:
        assert family.start or family.kind is metrics.Kind.GAUGE, family.name
        assert {len(values) for values in family.start} <= {len(family.labels)}
    started = set(from_the_start(["disk", "shared"]))
    assert {Series(metrics.CORRUPT, (tier,)) for tier in ("disk", "shared")} < started
    assert set(metrics.NAMED.values()) <= started
    assert Series(metrics.CORRUPT, ("host",)) not in started, "nothing checks chunks in memory"
    assert Series(metrics.MOVED, ("disk", "out")) in started > set(from_the_start([]))


@pytest.mark.parametrize(
    ("restored", "device", "label"), [(50, 0, "hit"), (49, 1, "device"), (0, 100, "device"), (49, 0, "miss")]
)
def test_what_the_device_still_had_is_no_hit_of_ours(restored: int, device: int, label: str) -> None:
    assert metrics.cache_label(restored, device, 100) == label
