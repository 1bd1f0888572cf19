"""What can be seen from outside: time series, KV events; and what outlives an engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.protocol import Tally, TransferOutcome, metrics
from cargohold.protocol.metrics import counter, gauge
from cargohold.transfer import Direction
from tests.counting import ENDED, CountsEnds
from tests.vllm.faults import Faults

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.lora.request import LoRARequest

from cargohold.connector import tracing
from cargohold.integrations.vllm.metrics import PromMetrics, TransferStats
from cargohold.integrations.vllm.request_view import SeenRequest
from tests.vllm.common import EAGER, EVENTS, ask_twice, follow_events, forget, make_prompts, restored, tokens, with_disk
from tests.vllm.engine import BLOCK_TOKENS
from tests.vllm.models import save_adapter

TYPES: dict[Any, Any] = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
CONFIG = SimpleNamespace(kv_transfer_config=None)


def series(name: str) -> dict[str, float]:
    """Values of a time series of ours, by the value of its own label."""
    return {
        "".join(value for key, value in sample.labels.items() if key not in ("model_name", "engine")): sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_counters_reach_prometheus(vllm_model: Callable[[str], str], start: Callable[..., Any]) -> None:
    engine = start(vllm_model("llama"), {"host_bytes": "4MiB"})
    prompts = make_prompts(3, 330)
    assert restored(ask_twice(engine, prompts)) == 960
    engine.ask(make_prompts(30, 92, seed=5), 1)  # more than host memory has room for
    engine.settle()
    engine.ask(make_prompts(1, 40, seed=6), 1)  # vLLM passes counters on with answers
    tiers = series("cargohold_prompt_tokens_total")
    assert tiers["host"] == 960
    assert tiers["device"] == 0
    asked = 2 * 3 * 330 + (22 + 30) * 92 + 40
    assert tiers["computed"] == asked - 960
    block_bytes = engine.side.layout.block_bytes
    assert series("cargohold_moved_bytes_total")["hostout"] == 30 * block_bytes
    assert series("cargohold_load_seconds_count")["host"] == 3 == series("cargohold_load_seconds_bucket")["host+Inf"]
    assert series("cargohold_load_seconds_sum")["host"] > 0
    assert series("cargohold_load_tokens_total")[""] == 960
    assert series("cargohold_prefill_tokens_total")[""] > 0 < series("cargohold_prefill_seconds_total")[""]
    layout = engine.side.layout
    capacity = series("cargohold_tier_capacity_tokens")
    assert capacity["host"] == (4 * 2**20 // block_bytes - 1) * BLOCK_TOKENS, "a block is spare to verify what is kept"
    assert capacity["device"] == (layout.num_blocks - 1) * BLOCK_TOKENS
    stored, gone = (
        series("cargohold_stored_chunks_total")["host"],
        series("cargohold_removed_chunks_total")["hostevicted"],
    )
    num_ready = engine.side.guard.inner.shared.manager.num_ready
    assert gone > 0
    assert series("cargohold_connector_level")["num_ready_chunks"] == stored - gone == num_ready
    assert series("cargohold_tier_ready_bytes")["host"] == num_ready * block_bytes
    assert series("cargohold_tier_in_use_bytes").get("host", 0) == 0
    assert series("cargohold_failures_total") == {"load": 0, "store": 0, "connector_off": 0, "promise": 0}


def test_prompts_that_nothing_is_restored_for_are_counted_too(
    vllm_model: Callable[[str], str], start: Callable[..., Any]
) -> None:
    """Found by adding up: the counters said less than vLLM's own, by all prompts that were served without offloading."""
    engine = start(vllm_model("llama"), EAGER)
    prompt, other = make_prompts(2, 330)
    engine.ask([prompt], 1)
    engine.ask_for([{"prompt_token_ids": prompt}], 1, prompt_logprobs=0)
    engine.ask([other], 1, wishes={"max_load_tokens": "all"})
    engine.ask(make_prompts(1, 40, seed=6), 1)
    tiers = series("cargohold_prompt_tokens_total")
    assert sum(tiers.values()) == engine.metric("prompt_tokens") == 3 * 330 + 40
    assert (tiers["bypassed"], tiers["computed"]) == (330 + (330 - tiers["device"]), 330 + 40), "these are no misses"


def test_tokens_whose_load_failed_are_counted_as_computed(
    vllm_model: Callable[[str], str], start: Callable[..., Any], faults: Faults
) -> None:
    engine = start(vllm_model("llama"), EAGER)
    prompts = make_prompts(2, 330)
    engine.ask(prompts, 1)
    forget(engine)
    faults.outcome = lambda job: TransferOutcome.FAILED if job.direction is Direction.LOAD else TransferOutcome.DONE
    assert restored(engine.ask(prompts, 1)) == 0
    engine.settle()
    engine.ask(make_prompts(1, 40, seed=6), 1)
    tiers = series("cargohold_prompt_tokens_total")
    assert tiers.get("host", 0) == tiers["device"] == 0
    assert tiers["computed"] == 2 * 2 * 330 + 22 * 92 + 40, "as many as were asked"


def test_prompts_are_counted_once_however_often_their_requests_start_over(
    vllm_model: Callable[[str], str], start: Callable[..., Any], faults: Faults
) -> None:
    """Found by simulation: what was restored for a request that vLLM had preempted was counted beyond its prompt."""
    engine = start(vllm_model("llama"), EAGER, num_blocks=16, max_model_len=256)
    prompts = make_prompts(3, 100)
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, 120)
    while engine.is_busy:
        engine.step()
    engine.settle()
    faults.outcome = lambda job: TransferOutcome.FAILED if job.direction is Direction.LOAD else TransferOutcome.DONE
    engine.ask(prompts, 120)
    engine.settle()
    engine.ask(make_prompts(1, 40, seed=6), 1)
    assert engine.metric("num_preemptions") > 0
    assert series("cargohold_load_tokens_total")[""] > 0
    assert sum(series("cargohold_prompt_tokens_total").values()) == engine.metric("prompt_tokens") == 2 * 300 + 40


def test_a_connector_that_is_turned_off_holds_nothing_any_more(
    vllm_model: Callable[[str], str], start: Callable[..., Any]
) -> None:
    engine = start(vllm_model("llama"), EAGER)
    ask_twice(engine, make_prompts(2, 330))
    engine.ask(make_prompts(1, 40, seed=6), 1)
    assert series("cargohold_tier_ready_tokens")["host"] > 0
    engine.side.guard.break_off("made for this test")
    engine.ask(make_prompts(1, 40, seed=7), 3)
    assert series("cargohold_tier_ready_tokens")["host"] == series("cargohold_tier_capacity_tokens")["host"] == 0
    assert series("cargohold_failures_total")["connector_off"] == 1
    ((label, since),) = series("cargohold_outage_since_timestamp_seconds").items()
    assert "everything" in label and "made for this test" in label and since == pytest.approx(time.time(), abs=300)


def test_a_metric_of_a_guest_of_ones_own_is_shown_from_the_start(
    vllm_model: Callable[[str], str], start: Callable[..., Any]
) -> None:
    engine = start(vllm_model("llama"), {**EAGER, "guests": [f"{CountsEnds.__module__}:{CountsEnds.__name__}"]})
    assert series("cargohold_ended_requests_total") == {"quietly": 0}
    ask_twice(engine, make_prompts(2, 330))
    engine.settle()
    engine.ask(make_prompts(1, 40, seed=6), 1)
    assert series("cargohold_ended_requests_total")["quietly"] >= 4
    assert TransferStats.of({ENDED.of("quietly"): 1}).reduce() == {'ended_requests{how="quietly"}': 1}, "vLLM's log"


def test_levels_of_a_connector_of_ones_own_can_go_down() -> None:
    held, now = counter("held", "blocks", "Were held.").of(), gauge("held_now", "blocks", "Are held.").of()
    shown = PromMetrics(CONFIG, TYPES, ["model_name", "engine"], {0: ["tiny", "0"]})
    for more, level in ((5, 3), (1, -1)):
        shown.observe(TransferStats.of({held: more, now: level}).data)
    assert series("cargohold_held_total") == {"": 6}
    assert series("cargohold_held_now") == {"": 2}


@given(st.lists(st.lists(st.floats(0, 100), max_size=10), max_size=4))
def test_histograms_are_what_was_measured(intervals: list[list[float]]) -> None:
    shown = PromMetrics(CONFIG, TYPES, ["model_name", "engine"], {0: ["tiny", "0"]})
    for interval in intervals:
        counted = Tally()
        for seconds in interval:
            metrics.LOAD.of("host").note(seconds, counted)
        shown.observe(TransferStats.of(counted).data)
    values = [seconds for interval in intervals for seconds in interval]
    buckets = series("cargohold_load_seconds_bucket")
    for bound in metrics.LOAD.bounds_s[:-1]:
        assert buckets[f"host{bound}"] == sum(value <= bound for value in values)
    assert series("cargohold_load_seconds_count")["host"] == len(values)
    assert series("cargohold_load_seconds_sum")["host"] == pytest.approx(sum(values))


def test_the_log_shows_what_an_interval_brought_and_no_levels() -> None:
    """Found by reading: as so many chunks in host memory it showed by how many there were more, or less."""
    stats = TransferStats.of({metrics.STORED.of("host"): 2, metrics.READY_CHUNKS: 1})
    more = {metrics.REMOVED.of("host", "evicted"): 4, metrics.PREFILL_SECONDS.of(): 0.12345, metrics.READY_CHUNKS: -4}
    assert stats.aggregate(TransferStats.of(more)).reduce() == {
        "prefill_seconds": 0.123,
        'removed_chunks{tier="host", reason="evicted"}': 4,
        'stored_chunks{tier="host"}': 2,
    }


def test_what_is_done_for_a_request_is_in_its_trace(
    vllm_model: Callable[[str], str], start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    exports = pytest.importorskip("opentelemetry.sdk.trace.export", reason="traces need the extra otel")
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415  # may be absent
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: PLC0415  # likewise

    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(exports.SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_open_tracer", lambda: (provider.get_tracer("test"), lambda: None))
    trace, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace}-{span_id}-01"}
    # vLLM gives a request this attribute if it traces itself.
    monkeypatch.setattr(SeenRequest, "trace_headers", property(lambda _: headers))
    engine = start(vllm_model("llama"), {**EAGER, "traces": True})
    assert restored(ask_twice(engine, make_prompts(1, 330))) == 320
    engine.settle()
    spans = exporter.get_finished_spans()
    assert {span.name for span in spans} >= {f"cargohold.{what}" for what in ("request", "look_up", "load", "store")}
    assert {format(span.context.trace_id, "032x") for span in spans} == {trace}
    (load,) = (span for span in spans if span.name == "cargohold.load")
    assert dict(load.attributes or {})["cargohold.tokens"] == 320


def test_levels_are_shown_in_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by reading: of Ray's gauges vLLM knows ``set`` alone, and with the first chunk stored all requests ended."""
    ray_metrics = pytest.importorskip("ray.util.metrics")
    from vllm.v1.metrics import ray_wrappers  # noqa: PLC0415  # imports Ray

    shown: dict[str, list[float]] = {}

    def note(metric: Any, value: float, **_: Any) -> None:
        shown.setdefault(metric.info["name"], []).append(value)

    monkeypatch.setattr(ray_wrappers, "ray_metrics", ray_metrics)  # nothing, where Ray Serve is not
    monkeypatch.setattr(ray_metrics.Gauge, "set", note)
    monkeypatch.setattr(ray_metrics.Counter, "inc", note)
    types = {Gauge: ray_wrappers.RayGaugeWrapper, Counter: ray_wrappers.RayCounterWrapper}
    types[Histogram] = ray_wrappers.RayHistogramWrapper
    shown_by_vllm = PromMetrics(CONFIG, types, ["model_name", "engine"], {0: ["tiny", "0"]})
    for stored, removed in ((5, 0), (3, 4)):
        change = {
            metrics.STORED.of("host"): stored,
            metrics.REMOVED.of("host", "evicted"): removed,
            metrics.TIER_READY.of("host"): stored - removed,
        }
        shown_by_vllm.observe(TransferStats.of({series: value for series, value in change.items() if value}).data)
    assert shown["cargohold_stored_chunks"] == [5, 3]
    assert shown["cargohold_tier_ready_bytes"] == [5, 4]


def test_an_index_built_from_events_is_what_the_tier_holds(
    vllm_model: Callable[[str], str], start: Callable[..., Any]
) -> None:
    engine = start(
        vllm_model("llama"),
        {"host_bytes": "1MiB"},
        **EVENTS,
    )
    held: set[Any] = set()
    removed = 0

    def follow(batch: Any) -> None:
        nonlocal removed
        for event in batch.events:
            if event.medium != "CPU":
                continue
            if type(event).__name__ == "BlockStored":
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                held.update(event.block_hashes)
            else:
                held.difference_update(event.block_hashes)
                removed += len(event.block_hashes)

    engine.scheduler.kv_event_publisher.publish = follow
    ask_twice(engine, make_prompts(3, 330))
    engine.settle()
    engine.ask(make_prompts(1, 20), 1)
    assert removed > 0
    assert len(held) == engine.side.guard.inner.shared.manager.num_ready


def test_events_say_of_adapters_and_salts_what_vllm_says(
    vllm_model: Callable[[str], str], start: Callable[..., Any]
) -> None:
    model = vllm_model("llama")
    salted = {**EAGER, "kv_events_salted": True}
    engine = start(model, salted, **EVENTS, enable_lora=True, max_loras=2, max_lora_rank=8)
    adapter = LoRARequest("french", 7, save_adapter(model, "french"))
    prompt = {"prompt_token_ids": make_prompts(1, 330)[0]}

    def ask() -> None:
        engine.ask_for([prompt])
        engine.ask_for([prompt], adapter=adapter)
        engine.ask_for([{**prompt, "cache_salt": "mine"}])

    told = follow_events(engine, ask)
    assert len(told["CPU"]) == 3 * (330 // BLOCK_TOKENS)
    assert told["CPU"].items() <= told["GPU"].items()
    first = [block for block in told["CPU"].values() if block["parent"] is None]
    assert [block["adapter"] for block in first] == [(None, None), (7, "french"), (None, None)]
    assert first[0]["extra_keys"] is None
    assert first[2]["extra_keys"] == ("mine",)


def test_prompts_of_numpys_numbers_are_told_of(vllm_model: Callable[[str], str], start: Callable[..., Any]) -> None:
    engine = start(vllm_model("llama"), EAGER, **EVENTS)
    prompt = list(np.array(make_prompts(1, 330)[0]))
    told = follow_events(engine, lambda: engine.ask_for([{"prompt_token_ids": prompt}]))
    assert len(told["CPU"]) == 330 // BLOCK_TOKENS
    assert {type(token) for block in told["CPU"].values() for token in block["tokens"]} == {int}


def test_events_say_of_windows_what_vllm_says(vllm_model: Callable[[str], str], start: Callable[..., Any]) -> None:
    engine = start(vllm_model("gemma3"), EAGER, num_blocks=150, **EVENTS)
    told = follow_events(engine, lambda: engine.ask(make_prompts(1, 330)))
    # Of a window vLLM's cache has its last blocks alone, and its events the tokens of others beside their hashes.
    kinds = {medium: {group: block["kind"] for (group, _), block in blocks.items()} for medium, blocks in told.items()}
    assert kinds["CPU"] == kinds["GPU"]
    assert set(kinds["CPU"].values()) == {("full_attention", None), ("sliding_window", 64)}


def test_a_directory_outlives_the_engine_but_not_the_weights(
    vllm_model: Callable[[str], str], start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # vLLM 0.28 hashes differently in every process without it
    extra = with_disk(tmp_path)
    prompts = make_prompts(2, 330)
    engine = start(vllm_model("llama"), extra)
    expected = tokens(ask_twice(engine, prompts))
    engine.settle()
    engine = start(vllm_model("llama"), extra)
    answers = [engine.ask([prompt], 6)[0] for prompt in prompts]
    assert tokens(answers) == expected
    assert restored(answers) == 640
    engine.settle()
    engine.ask(make_prompts(1, 40, seed=6), 1)
    assert series("cargohold_prompt_tokens_total")["disk"] == 640
    told = series("vllm:prompt_tokens_cached_by_source_total")  # since vLLM 0.32
    assert not told or (told["host"], told["external_unspecified"]) == (0, 640)
    forget(engine)
    engine = start(vllm_model("llama-retrained"), extra)
    assert restored(engine.ask(prompts, 6)) == 0


def test_states_that_are_arranged_otherwise_are_not_found_again(
    vllm_model: Callable[[str], str], start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: after a restart with another ``VLLM_SSM_CONV_STATE_LAYOUT`` a disk gave other tokens."""
    model = vllm_model("lfm2")
    extra = with_disk(tmp_path)
    options = {"mamba_cache_mode": "align", "enable_prefix_caching": True}
    prompts = make_prompts(4, 322)  # two tokens behind the last state
    engine = start(model, extra, **options)
    # One at a time: those of several at once do not even agree without a connector.
    expected = tokens([engine.ask([prompt])[0] for prompt in prompts])
    for layout, num_restored in (("SD", 4 * 320), ("DS", 0)):
        engine.settle()
        monkeypatch.setattr("vllm.model_executor.layers.mamba.mamba_utils.get_conv_state_layout", lambda it=layout: it)
        engine = start(model, extra, **options)
        answers = [engine.ask([prompt])[0] for prompt in prompts]
        assert tokens(answers) == expected
        assert restored(answers) == num_restored
