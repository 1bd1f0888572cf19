"""What connectors count, as operators see it."""

from __future__ import annotations

import pytest

from cargohold.connector.metrics import OutageLevels, cache_label, for_operators
from cargohold.protocol import Kind, Outage, Series, Stats, Tally, metrics
from cargohold.protocol.metrics import counter


def test_several_connectors_are_added_up_and_levels_told_in_tokens_too() -> None:
    ready, of_tenant = metrics.TIER_READY.of("host"), metrics.OF_TENANT.of("host", "a.b")
    stats: Stats = {
        ready._replace(connector="left"): 300.0,
        ready._replace(connector="right"): 100.0,
        metrics.COPIED_BLOCKS.of("load"): 3.0,
        metrics.PLANNED.of("load")._replace(connector="left"): 2.0,
        of_tenant._replace(connector="left"): 60.0,
        metrics.MOVED.of("disk", "in"): 7.0,
    }
    assert for_operators(stats, block_bytes=50, token_bytes=20) == {
        ready: 400,
        metrics.IN_TOKENS[metrics.TIER_READY].of("host"): 20,
        of_tenant: 60,
        metrics.IN_TOKENS[metrics.OF_TENANT].of("host", "a.b"): 3,
        metrics.MOVED.of("host", "out"): 150,
        metrics.MOVED.of("host", "in"): 0,
        metrics.MOVED.of("disk", "in"): 7,
    }


def test_a_token_that_several_devices_hold_is_one_token() -> None:
    stats: Stats = {metrics.TIER_READY.of("device"): 800.0, metrics.TIER_READY.of("host"): 400.0}
    told = for_operators(stats, block_bytes=50, token_bytes=20, device_token_bytes=80)
    in_tokens = metrics.IN_TOKENS[metrics.TIER_READY]
    assert (told[in_tokens.of("device")], told[in_tokens.of("host")]) == (10, 20)


def test_a_counter_is_what_it_was_declared_as_whatever_its_name() -> None:
    """Names used to be a language: a counter that ended with ``_bytes`` was shown as bytes of a tier."""
    named = counter("saved_tier_ready_bytes", "bytes", "Made for this test.").of()
    assert for_operators({named: 5.0}, block_bytes=50, token_bytes=20)[named] == 5
    assert {series.family for series in for_operators({named: 5.0}, 50, 20)} == {named.family, metrics.MOVED}


def shown(total: Stats) -> Stats:
    return {series: value for series, value in total.items() if value}


def test_outages_are_levels_that_come_and_go() -> None:
    levels, total = OutageLevels(epoch=1000.0), Tally()
    outage = Outage("disk", "loads and writes", "OSError: [Errno 5]\n on /nvme.2", since=1.5, retry_at=3.0)
    labels = ("disk", "loads and writes", "OSError: [Errno 5] on /nvme.2")
    total.add(levels.take_changes([outage]))
    assert shown(total) == {metrics.OUTAGE_SINCE.of(*labels): 1001.5, metrics.OUTAGE_RETRY.of(*labels): 1003.0}
    total.add(levels.take_changes([Outage(outage.tier, outage.what, outage.reason, since=1.5)]))
    assert shown(total) == {metrics.OUTAGE_SINCE.of(*labels): 1001.5}, "no trial any more"
    total.add(levels.take_changes([]))
    assert shown(total) == {}
    assert levels.take_changes([]) == {}


def test_reasons_that_are_all_different_do_not_make_time_series_without_end() -> None:
    levels, found = OutageLevels(epoch=0.0), set[Series]()
    for at in range(100):
        found |= levels.take_changes([Outage("shared", "loads", f"request {at}: {'x' * 500}", since=1.0)]).keys()
    reasons = {series.labels[2] for series in found}
    assert len(reasons) == 17 and max(map(len, reasons)) <= 200


GOLDEN = """
prompt_tokens counter tier
tier_capacity_bytes gauge tier
tier_ready_bytes gauge tier
tier_plain_bytes gauge tier
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
tokens_per_gib gauge what
hints counter outcome
moved_bytes counter tier direction
stored_chunks counter tier
removed_chunks counter tier reason
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
time_to_first_token_seconds histogram cache le 0.01,0.025,0.05,0.1,0.25,0.5,1,2.5,5,10,30,60,300
wait_seconds histogram le 0.001,0.002,0.005,0.01,0.02,0.05,0.1,0.2,0.5,1,2,5,10,30
reuse_gap_seconds histogram le 1,10,60,300,900,3600,10800,43200,86400,604800
load_seconds histogram tier le 0.001,0.002,0.005,0.01,0.02,0.05,0.1,0.2,0.5,1,2,5,10,30
store_seconds histogram tier le 0.001,0.002,0.005,0.01,0.02,0.05,0.1,0.2,0.5,1,2,5,10,30
fetch_seconds histogram tier le 0.001,0.002,0.005,0.01,0.02,0.05,0.1,0.2,0.5,1,2,5,10,30
write_seconds histogram tier le 0.001,0.002,0.005,0.01,0.02,0.05,0.1,0.2,0.5,1,2,5,10,30
look_up_seconds histogram tier le 0.001,0.002,0.005,0.01,0.02,0.05,0.1,0.2,0.5,1,2,5,10,30
lifetime_seconds histogram tier le 1,10,60,300,900,3600,10800,43200,86400,604800
verified_chunks counter outcome tier
verified_distance histogram le 1e-07,1e-06,1e-05,0.0001,0.001,0.01,0.1,1
outage_since_timestamp_seconds gauge tier what reason
outage_retry_timestamp_seconds gauge tier what reason
connector counter counter
connector_level gauge counter
"""
STARTED = """
prompt_tokens device|prompt_tokens host|prompt_tokens disk|prompt_tokens computed|prompt_tokens bypassed
hints accepted|hints clipped|hints deferred|hints done|hints expired|hints failed
hints missing|hints rejected|hints released|hints void
moved_bytes host in|moved_bytes host out|moved_bytes disk in|moved_bytes disk out
stored_chunks host|stored_chunks disk|not_stored_chunks disk|not_loaded_chunks disk
removed_chunks host evicted|removed_chunks host damaged|removed_chunks host reset
corrupt_chunks disk
tier_failures disk|suspensions disk|failures load|failures store|failures connector_off|failures promise
deferred_lookups|deferred_stores|load_tokens|prefill_tokens|prefill_seconds
time_to_first_token_seconds hit|time_to_first_token_seconds device|time_to_first_token_seconds miss
wait_seconds|reuse_gap_seconds
load_seconds host|store_seconds host|fetch_seconds disk|write_seconds disk|look_up_seconds disk|lifetime_seconds host
verified_chunks equal host|verified_chunks close host|verified_chunks different host
verified_chunks equal disk|verified_chunks close disk|verified_chunks different disk|verified_distance
connector loads_in_step|connector stored_again_chunks|connector disk_loaded_chunks|connector disk_off
"""


def test_names_kinds_labels_and_buckets_stay_as_dashboards_know_them() -> None:
    told = set()
    for family in metrics.FAMILIES:
        bounds = [" le " + ",".join(f"{bound:g}" for bound in family.bounds_s[:-1])] if family.bounds_s else []
        if family.is_exported:
            assert family.full_name == f"cargohold_{family.name}"
            told.add(" ".join((family.name, family.kind.value, *family.labels)) + "".join(bounds))
    assert told == set(GOLDEN.strip().splitlines())


def test_what_is_there_from_the_start_stays_there() -> None:
    ours = [series for series in metrics.from_the_start(["disk"]) if series.family in metrics.FAMILIES]
    assert sorted(" ".join((series.family.name, *series.labels)) for series in ours) == sorted(
        STARTED.strip().replace("\n", "|").split("|")
    )


def test_each_family_that_only_grows_says_what_it_begins_with() -> None:
    for family in metrics.FAMILIES:
        assert family.start or family.kind is Kind.GAUGE or not family.is_exported, family.name
        assert {len(values) for values in family.start} <= {len(family.labels)}


@pytest.mark.parametrize(
    ("restored", "device", "label"), [(50, 0, "hit"), (49, 1, "device"), (0, 100, "device"), (49, 0, "miss")]
)
def test_what_the_device_still_had_is_no_hit_of_ours(restored: int, device: int, label: str) -> None:
    assert cache_label(restored, device, 100) == label
