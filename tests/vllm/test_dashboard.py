"""The page of ``cargohold dashboard`` beside vLLM: everything on it comes from vLLM's own ``/metrics``."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
pytest.importorskip("fastapi", reason="vLLM's own server needs it, too")

from unittest.mock import ANY

from prometheus_client import REGISTRY, generate_latest

from cargohold.integrations.vllm.metrics import FirstTokens
from cargohold.integrations.vllm.records import RequestRecord
from cargohold.integrations.vllm.request_view import SeenRequest
from cargohold.protocol import Tally, metrics
from cargohold.protocol.metrics import Bucket
from cargohold.serve.dashboard import Engine
from cargohold.serve.scrape import Scrape
from tests.vllm.common import forget, make_prompts, restored


def scrape(_url: str) -> Scrape:
    """What ``/metrics`` says: vLLM serves this registry."""
    return Scrape.parse(0.0, generate_latest(REGISTRY).decode())


def rising() -> dict[tuple[str, ...], float]:
    """All counters and histograms of ours, by name and labels."""
    return {
        (
            sample.name,
            *(value for key, value in sample.labels.items() if key not in ("model_name", "engine")),
        ): sample.value
        for family in REGISTRY.collect()
        if family.name.startswith("cargohold_") and family.type in {"counter", "histogram"}
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_the_page_has_every_vessel_and_every_figure(
    vllm_model: Callable[[str], str], start: Callable[..., Any], tmp_path: Path
) -> None:
    disk = {"kind": "disk", "directory": str(tmp_path), "max_bytes": "64MiB", "reserve_bytes": 0}
    engine = start(vllm_model("llama"), {"host_bytes": "4MiB", "restore": "always", "tiers": [disk]})
    page = Engine("vllm", "", scrape)
    page.look()
    before = rising()
    assert ("cargohold_corrupt_chunks_total", "disk") in before and set(before.values()) == {0}
    prompts = make_prompts(3, 330)
    engine.ask(prompts, 2)
    forget(engine)
    assert restored(engine.ask(prompts, 2)) == 960
    engine.ask(make_prompts(20, 92, seed=5), 1)  # more than host memory has room for
    engine.settle()
    engine.ask(make_prompts(1, 40, seed=6), 2)  # vLLM passes counters on with answers
    page.look()
    assert rising().keys() == before.keys(), "all that is counted was there from the start"
    shown = page.as_json()
    assert (shown["state"], shown["log"]) == ("serving", [])
    device, host, below = shown["tiers"]
    assert [tier["name"] for tier in (device, host, below)] == ["device", "host", "disk"]
    for tier in shown["tiers"]:
        assert 0 < tier["held_bytes"] <= tier["capacity_bytes"], tier
        assert (tier["suspended"], tier["is_off"]) == (0, False)
    assert 0 <= device["used_bytes"] < device["capacity_bytes"]
    assert host["in_bytes"] > 0 < host["out_bytes"] and host["evicted_chunks"] > 0 < below["in_bytes"]
    totals, (bucket, *later) = shown["totals"], shown["history"]
    assert totals["tokens"]["host"] == 960 and totals["tokens"]["computed"] > 0
    assert totals["requests"] > 23 and totals["ttft_s"] > 0
    assert totals["restored_tokens"] == 960 and totals["restore_s"] > 0
    assert totals["prefill_tokens"] > 0 < totals["prefill_s"]
    assert not later and bucket == {**totals, "start": bucket["start"]}, "all of it has happened between the two looks"
    assert shown["engine"] == {"running": 0, "waiting": 0, "loading": None, "refused": None, "connector_error": None}


def test_parts_of_several_replicas_are_no_part_of_the_whole(tmp_path: Path) -> None:
    """vLLM tells of each replica which part of its device is used; the sum of parts says nothing."""
    text = "".join(
        f'vllm:kv_cache_usage_perc{{engine="{engine}"}} {part}\n'
        f'cargohold_tier_capacity_bytes{{engine="{engine}",tier="device"}} 1000\n'
        for engine, part in enumerate((0.5, 0.3))
    )
    page = Engine("vllm", "", lambda _: Scrape.parse(0.0, text))
    page.look()
    (device,) = page.as_json()["tiers"]
    assert (device["capacity_bytes"], device["used_bytes"]) == (2000, pytest.approx(800))


def test_a_request_is_counted_once_and_only_if_it_has_a_token() -> None:
    now, stats = [100.0], Tally()
    first_tokens = FirstTokens(lambda: now[0])
    arrived = time.time()
    served, aborted, quick = (
        RequestRecord(
            SeenRequest(SimpleNamespace(request_id=name, arrival_time=arrived, num_prompt_tokens=100, num_tokens=100))
        )
        for name in ("served", "aborted", "quick")
    )
    first_tokens.note_admitted(served, 0, 50)
    first_tokens.note_admitted(aborted, 0, 0)
    first_tokens.note_admitted(quick, 0, 49)
    first_tokens.look(stats)
    first_tokens.note_ended(aborted, stats)
    assert not stats
    now[0] += 3
    served.own.num_tokens = quick.own.num_tokens = 101
    first_tokens.note_ended(quick, stats)
    for _ in range(2):
        first_tokens.look(stats)
    first_tokens.note_ended(served, stats)
    hit, miss = (metrics.TTFT.of(label)._replace(bucket=Bucket(5.0, is_sum=False)) for label in ("hit", "miss"))
    total = hit._replace(bucket=Bucket(5.0, is_sum=True))
    assert stats == {hit: 1, miss: 1, total: pytest.approx(3, abs=1), total._replace(labels=("miss",)): ANY}
