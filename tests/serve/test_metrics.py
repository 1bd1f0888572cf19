"""What Prometheus reads, and who is told what is out of use; and that the manual for operators lists all of it."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from cargohold import DiskTierConfig, OffloadConfig, SharedTierConfig, TenantQuota
from cargohold.protocol import metrics
from cargohold.serve.scrape import OWN_FAMILIES
from cargohold.serve.server import Server
from cargohold.serve.settings import ServeConfig
from tests.serve.running import call, running, settle, wait_until

KEY = "for metrics"
Labelled = tuple[str, frozenset[tuple[str, str]]]
PROMPT = "The ship sails on. " * 40
MANUAL = (Path(__file__).parents[2] / "docs" / "api" / "metrics.md").read_text(encoding="utf-8")


def listed() -> dict[str, tuple[set[str], str]]:
    """Labels and exporters of each metric in the manual's table."""
    found: dict[str, tuple[set[str], str]] = {}
    for names, labels, where in re.findall(r"(?m)^\| (`cargohold_.*?) \|(.*?)\|.*?\| (\w+) \|", MANUAL):
        for name in re.findall(r"`(\w+)`", names):
            assert name not in found, f"{name} is listed twice"
            found[name] = set(re.findall(r"`(\w+)`", labels)), where
    return found


def complete(server: Server, prompt: str) -> None:
    body = {"model": "chat", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    assert call(server, "/v1/completions", body).status == 200


def scrape(server: Server) -> dict[str, Metric]:
    reply = call(server, "/metrics", headers={"authorization": f"Bearer {KEY}"})
    families = text_string_to_metric_families(reply.body.decode())
    return {family.name + "_total" * (family.type == "counter"): family for family in families}


STARTED: dict[str, dict[Labelled, float]] = {}
"""What servers counted before their first request, by URL."""


def rising(server: Server) -> dict[Labelled, float]:
    """All time series of counters and histograms."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in scrape(server).values()
        if family.type in {"counter", "histogram"}
        for sample in family.samples
    }


def value(server: Server, name: str, **labels: str) -> float:
    found = told(server, name, **labels)
    assert found is not None, (name, labels)
    return found


def told(server: Server, name: str, **labels: str) -> float | None:
    """The value; ``None`` as long as nobody has told it."""
    samples = [sample for family in scrape(server).values() for sample in family.samples]
    return next((sample.value for sample in samples if (sample.name, sample.labels) == (name, labels)), None)


@pytest.fixture(scope="module")
def server(chat_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a disk, whose device and host memory hold less than two prompts."""
    disk = DiskTierConfig(directory=tmp_path_factory.mktemp("disk"), max_bytes="64MiB", reserve_bytes=0)
    offload = OffloadConfig(host_bytes="512KiB", tiers=[disk], restore="always")
    with running(chat_model, offload=offload, num_device_blocks=30, max_model_len=350) as server:
        STARTED[server.url] = rising(server)
        for prompt in [f"{at}. " for at in range(8)] * 2:
            complete(server, prompt + PROMPT)
        wait_until(lambda: told(server, "cargohold_tier_ready_bytes", tier="disk"))
        settle(server)
        yield server


def test_the_manual_lists_every_metric() -> None:
    """The table is made by ``tools/texts.py``."""
    expected = {family.sample: set(family.labels) for family in (*metrics.FAMILIES, *OWN_FAMILIES)}
    assert {name: labels for name, (labels, _) in listed().items()} == expected
    assert {name for name, (_, where) in listed().items() if where == "stats"} == {
        family.sample for family in metrics.FAMILIES if not family.is_exported
    }


def test_every_metric_of_a_server_is_listed_with_its_labels(server: Server) -> None:
    expected = listed()
    of_other_tests = {family.sample for family in metrics._declared.values()} - {f.sample for f in metrics.FAMILIES}
    families = {
        name: family
        for name, family in scrape(server).items()
        if not name.endswith("_created") and name not in of_other_tests
    }
    assert families.keys() <= expected.keys()
    for name, family in families.items():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert not family.samples or labels == expected[name][0], name
    never_seen = {name for name, (_, where) in expected.items() if where == "server"} - families.keys()
    assert not never_seen


def test_all_that_is_counted_is_there_from_the_start_as_0(server: Server) -> None:
    """``rate`` never sees the first damaged chunk of a time series that begins with it."""
    before = STARTED[server.url]
    assert rising(server).keys() == before.keys()
    assert {sample for sample, number in before.items() if number} == set()
    for name in ("corrupt_chunks", "tier_failures", "suspensions", "not_loaded_chunks", "not_stored_chunks"):
        assert (f"cargohold_{name}_total", frozenset({("tier", "disk")})) in before
    assert ("cargohold_hints_total", frozenset({("outcome", "rejected")})) in before


def test_a_server_with_a_disk_shows_most_of_them(server: Server) -> None:
    rare = {"cargohold_outage_since_timestamp_seconds", "cargohold_outage_retry_timestamp_seconds"}
    rare |= {f"cargohold_tenant_{what}{unit}" for what in ("", "quota_") for unit in ("bytes", "tokens")}
    shown = {name for name, (_, where) in listed().items() if where != "stats"}
    assert shown - scrape(server).keys() <= rare


def test_capacity_and_use_are_told_in_bytes_and_in_tokens(server: Server) -> None:
    layout = server.admission.llm.plan.layout
    assert value(server, "cargohold_tier_capacity_bytes", tier="device") == (layout.num_blocks - 1) * layout.block_bytes
    assert 60 * 2**20 < value(server, "cargohold_tier_capacity_bytes", tier="disk") <= 64 * 2**20
    for kind in ("capacity", "ready", "in_use"):
        for tier in ("device", "host"):
            told = value(server, f"cargohold_tier_{kind}_bytes", tier=tier)
            assert value(server, f"cargohold_tier_{kind}_tokens", tier=tier) == told / layout.token_bytes
    for tier in ("device", "host", "disk"):
        held = value(server, "cargohold_tier_ready_tokens", tier=tier)
        assert 0 < held <= value(server, "cargohold_tier_capacity_tokens", tier=tier)


def test_quotas_and_what_tenants_have_are_told_by_tenant(chat_model: str) -> None:
    quotas = (TenantQuota(tenant="a salt", reserved="25%", hard="50%", label="acme"),)
    offload = OffloadConfig(host_bytes="1MiB", quotas=quotas, verify="off")
    with running(chat_model, ServeConfig(port=0, metrics_key=KEY), offload=offload, num_device_blocks=60) as server:
        body = {"model": "chat", "prompt": PROMPT, "max_tokens": 1, "cache_salt": "a salt"}
        assert call(server, "/v1/completions", body).status == 200
        wait_until(lambda: told(server, "cargohold_tenant_tokens", tier="host", tenant="acme"))
        assert value(server, "cargohold_tenant_bytes", tier="host", tenant="others") == 0
        limits = {
            limit: value(server, "cargohold_tenant_quota_bytes", tier="host", tenant="acme", limit=limit)
            for limit in ("reserved", "hard")
        }
        assert limits == {"reserved": 2**18, "hard": 2**19}


def test_histograms_are_as_prometheus_has_them(server: Server) -> None:
    for name, family in scrape(server).items():
        if family.type == "histogram" and family.samples:
            buckets = [sample.value for sample in family.samples if sample.name == f"{name}_bucket"]
            count = sum(sample.value for sample in family.samples if sample.name == f"{name}_count")
            if family.samples[0].labels.keys() == {"le"}:
                assert buckets == sorted(buckets) and buckets[-1] == count, name


def test_loads_and_prompts_have_a_speed(server: Server) -> None:
    loaded = value(server, "cargohold_load_tokens_total")
    assert loaded > 0 and all(sample.value > 0 for sample in scrape(server)["cargohold_load_seconds"].samples[-3:])
    assert value(server, "cargohold_prefill_tokens_total") > 0 < value(server, "cargohold_prefill_seconds_total")


def test_a_tier_that_is_out_of_use_is_told_with_why_since_when_and_when_it_is_tried_again(
    chat_model: str, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    offload = OffloadConfig(host_bytes="4MiB", tiers=[SharedTierConfig(url=f"file://{shared}")])
    began = time.time()
    with running(chat_model, offload=offload, num_device_blocks=60, max_model_len=350) as server:
        complete(server, "First. " + PROMPT)
        assert call(server, "/health").json == {"status": "serving", "outages": []}
        wait_until(lambda: told(server, "cargohold_tier_ready_bytes", tier="shared"))
        shutil.rmtree(shared)
        shared.write_text("no directory any more")

        def outages() -> list[dict[str, object]]:
            complete(server, f"{time.monotonic()} {PROMPT}")
            return call(server, "/health").json["outages"]  # type: ignore[no-any-return]  # JSON

        wait_until(outages)
        health = call(server, "/health")
        assert health.status == 200, "it still serves"
        (outage,) = health.json["outages"]
        assert outage["tier"] == "shared" and "writes" in outage["what"] and "irectory" in outage["reason"]
        assert began < outage["since"] < outage["retry_at"] < time.time() + 60
        (sample,) = scrape(server)["cargohold_outage_since_timestamp_seconds"].samples
        assert sample.value == pytest.approx(outage["since"], abs=1.0)
        assert sample.labels == {name: outage[name] for name in ("tier", "what", "reason")}
