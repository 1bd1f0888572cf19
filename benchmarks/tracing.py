"""What traces and metrics cost the thread that makes steps, per step and per request, beside a step of a real small model.

Spans go to OpenTelemetry's own batch processor and exporter, over HTTP, to a sink in a process of its own. The exporter's
thread shares Python's lock with the engine's: its processor time is counted, too.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.environment import NotInstalledError
from benchmarks.generating import OURS, OURS_TRACED
from benchmarks.generating import Engine as VllmEngine
from benchmarks.generating import Workload as VllmWorkload
from benchmarks.vllm_contenders import ROOT, VLLM_PYTHON
from cargohold import LLM, SamplingParams
from cargohold.connector.tracing import TracingFactory
from cargohold.engine.core.request import Request
from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, simulated_layout
from cargohold.protocol import Hint, KVConnectorFactory

OFF, UNSAMPLED, ON = "off", "on, traces not sampled", "on"
WAYS = (OFF, UNSAMPLED, ON)
BLOCK_TOKENS = 16
STEP_TOKENS = 2048
MODEL = "smollm2"
HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
UNSAMPLED_HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}
TYPICAL_STEP_S = 0.01
"""About a step of a model of 8 billion parameters on a GPU, for comparison: nobody's steps are much shorter."""

SCRAPED_EVERY_S = 15.0
"""As in ``dashboards/prometheus.yml``."""


@dataclass(frozen=True)
class Workload:
    """Requests of which as many as possible run at the same time; half of each prompt is found in host memory.

    Attributes:
        requests: number of requests per round.
        running: number of requests that run at the same time.
        prompt_tokens: tokens of each prompt.
        max_tokens: tokens of each answer.
        rounds: how often all are served; the first round is not counted.
    """

    requests: int = 64
    running: int = 16
    prompt_tokens: int = 512
    max_tokens: int = 64
    rounds: int = 21


QUICK = Workload(requests=3, running=2, prompt_tokens=64, max_tokens=4, rounds=2)


def run(*, quick: bool, model: str = MODEL) -> dict[str, Any]:
    if importlib.util.find_spec("opentelemetry.exporter") is None:
        raise NotInstalledError("it needs OpenTelemetry: pip install 'cargohold[otel]'")
    workload = QUICK if quick else Workload()
    embedded = _embedded(workload)
    real = _model_step(model, workload, repeats=1 if quick else 3)
    rows = {"embedded engine": embedded} | ({} if quick else _inside_vllm())
    for row in rows.values():
        row["percent_of_a_step"] = {
            f"of {real['name']}, {real['step_ms']} ms": _percents(row, real["step_ms"] / 1e3),
            f"of {TYPICAL_STEP_S * 1e3:g} ms": _percents(row, TYPICAL_STEP_S),
        }
    return {
        "workload": {
            **asdict(workload),
            "clock": "processor time of the thread that makes steps, without the workers; and of the exporter's thread",
            "spans": "OpenTelemetry's BatchSpanProcessor and OTLP exporter over HTTP, to a process on the same machine",
            "rounds_taken": "their lower quartile",
            "ratio": "beyond no traces, both threads together, as if they never ran at the same time",
        },
        "model": real,
        **rows,
    }


def _percents(row: dict[str, Any], step_s: float) -> dict[str, float]:
    spent = {name: beyond["us_per_step"] for name, beyond in row["beyond_no_traces"].items()}
    spent["metrics"] = row["metrics"]["us_per_step"]
    return {name: round(us / 1e6 / step_s * 100, 3) for name, us in spent.items()}


# --- where spans go ---------------------------------------------------------------------------------------------------


@contextmanager
def _collector() -> Iterator[None]:
    """A collector for what is exported within the ``with`` block."""
    command = [sys.executable, str(Path(__file__).with_name("span_sink.py"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sink:  # noqa: S603  # our own
        assert sink.stdout is not None
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{int(sink.stdout.readline())}"
        try:
            yield
        finally:
            del os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"]
            sink.kill()


def _exporting_s(wait_s: float = 6.0) -> float:
    """Processor time of the threads that export, once they have exported all: they do every 5 s, and whenever there is much."""
    time.sleep(wait_s)
    idents = [thread.ident for thread in threading.enumerate() if thread.name.startswith("Otel")]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents if ident is not None)


@dataclass(frozen=True, slots=True)
class _Spent:
    """What some steps took.

    Attributes:
        steps: number of steps.
        requests: number of requests that they have served.
        stepping_s: processor time of the thread that makes steps.
    """

    steps: int
    requests: int
    stepping_s: float


def _row(spent: dict[str, list[_Spent]], exporting_s: float) -> dict[str, Any]:
    """Figures of rounds that took turns; the first is not counted, except for the export, which lags behind."""
    exporting_us = exporting_s / sum(each.steps for each in spent[ON]) * 1e6
    us = {
        way: _undisturbed([each.stepping_s / each.steps * 1e6 for each in rounds[1:]]) for way, rounds in spent.items()
    }
    steps_per_request = spent[OFF][-1].steps / spent[OFF][-1].requests
    row: dict[str, Any] = {
        "us_per_step": {way: round(each, 1) for way, each in us.items()},
        "steps_per_request": round(steps_per_request, 2),
        "beyond_no_traces": {},
    }
    for way in [way for way in us if way != OFF]:
        exported = exporting_us if way == ON else 0.0
        beyond = max(0.0, us[way] - us[OFF]) + exported
        row["beyond_no_traces"][way] = {
            "us_per_step": round(beyond, 1),
            "of_that_exporting_us": round(exported, 1),
            "us_per_request": round(beyond * steps_per_request, 1),
        }
    return row


def _undisturbed(values: list[float]) -> float:
    """The lower quartile: on a machine with other work, half of the rounds take longer for reasons that are not ours."""
    return quantiles(values, n=4)[0] if len(values) > 1 else values[0]


# --- the embedded engine ----------------------------------------------------------------------------------------------


def _embedded(workload: Workload) -> dict[str, Any]:
    """Rounds of the embedded engine's scheduler and connector, in turns, around a model that computes nothing."""
    with _collector():
        engines = {name: _Embedded(name, workload) for name in WAYS}
        spent: dict[str, list[_Spent]] = {name: [] for name in WAYS}
        scrapes: list[float] = []
        for _ in range(workload.rounds):
            for name, engine in engines.items():
                spent[name].append(engine.serve())
            start = time.thread_time()
            engines[OFF].scheduler.connector.get_kv_connector_stats()
            scrapes.append(time.thread_time() - start)
        exporting_s = _exporting_s(0.0 if workload is QUICK else 6.0)
        for engine in engines.values():
            engine.shutdown()
    scrape_us = median(scrapes) * 1e6
    # Counting is a part of every step. Beyond that, a scrape asks for all counters.
    per_step = scrape_us * TYPICAL_STEP_S / SCRAPED_EVERY_S
    return _row(spent, exporting_s) | {
        "metrics": {"us_per_scrape": round(scrape_us, 1), "us_per_step": round(per_step, 3)}
    }


class _Embedded(SimulatedEngine):
    """The embedded engine's scheduler, and our connector with host memory; the model and the copies take no time.

    Args:
        name: whether it traces.
        workload: what it serves.
    """

    def __init__(self, name: str, workload: Workload) -> None:
        self._workload = workload
        self._headers = UNSAMPLED_HEADERS if name == UNSAMPLED else HEADERS
        per_request = -(-(workload.prompt_tokens + workload.max_tokens) // BLOCK_TOKENS)
        factory: KVConnectorFactory = SimulatedOffloading(2 * workload.requests * per_request, record_events=False)
        super().__init__(
            simulated_layout((workload.running + 1) * per_request, BLOCK_TOKENS),
            factory if name == OFF else TracingFactory(factory),
            clock=time.monotonic,
            max_num_seqs=workload.running,
            max_num_batched_tokens=STEP_TOKENS,
        )
        self._rng = random.Random(0)
        self._contexts = [self._tokens(workload.prompt_tokens // 2) for _ in range(workload.requests)]

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1000) for _ in range(count)]

    def _queue(self, request: Request, hints: Sequence[Hint]) -> None:
        request.trace_headers = self._headers
        super()._queue(request, hints)

    def serve(self) -> _Spent:
        """Serve all requests once, with prompts that continue as none has before."""
        for at, context in enumerate(self._contexts):
            rest = self._tokens(self._workload.prompt_tokens - len(context))
            self.add(f"{at}", [*context, *rest], self._workload.max_tokens)
        gc.collect()
        num_steps, stepping = 0, 0.0
        while self.scheduler.has_work():
            start = time.thread_time()
            step = self.scheduler.schedule()
            scheduled = time.thread_time()
            output = self.executor.execute(step)
            executed = time.thread_time()
            self.scheduler.update_from_output(output)
            stepping += scheduled - start + time.thread_time() - executed
            num_steps += 1
        return _Spent(num_steps, len(self._contexts), stepping)


def _model_step(model: str, workload: Workload, repeats: int) -> dict[str, Any]:
    """How long a step of a real small model takes on one core, with as many requests as run at the same time above."""
    rng = random.Random(0)
    num_steps = max(2, workload.max_tokens // 8)
    short, long = (SamplingParams(max_tokens=count, ignore_eos=True) for count in (2, 2 + num_steps))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with LLM(model, prefix_caching=False, num_device_blocks=16 * workload.running) as llm:
            vocab = llm.plan.info.vocab_size
            prompts = [[rng.randrange(vocab) for _ in range(32)] for _ in range(workload.running)]
            llm.generate(prompts, long)  # the first is slower
            seconds = []
            for _ in range(repeats):
                started = time.process_time()
                llm.generate(prompts, short)
                between = time.process_time()
                llm.generate(prompts, long)
                seconds.append(time.process_time() - between - (between - started))
    finally:
        torch.set_num_threads(threads)
    return {"name": model, "requests": workload.running, "step_ms": round(min(seconds) / num_steps * 1e3, 1)}


# --- inside vLLM, whose scheduler runs in an environment of its own ---------------------------------------------------

INSIDE_VLLM = VllmWorkload(requests=16, prompt_tokens=512, steps=64, tier_chunks=4096)
"""Without hits: nothing is loaded."""


def _inside_vllm() -> dict[str, Any]:
    """Figures of vLLM's scheduler; none where it is not installed."""
    if not VLLM_PYTHON.exists():
        return {}
    done = subprocess.run(  # noqa: S603  # our own benchmark, in the other environment
        [str(VLLM_PYTHON), "-m", "benchmarks.tracing"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "VLLM_LOGGING_LEVEL": "ERROR"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=900,
    )
    return {"inside vLLM": json.loads(done.stdout.splitlines()[-1])}


def measure_vllm(workload: VllmWorkload, num_rounds: int, num_requests: int) -> dict[str, Any]:
    """Rounds of vLLM's scheduler with our connector, in turns."""
    with _collector():
        engines = {way: VllmEngine(name, workload) for way, name in ((OFF, OURS), (ON, OURS_TRACED))}
        for engine in engines.values():
            engine.fill()
        metrics = _Metrics(engines[OFF].scheduler.connector)
        rounds: dict[str, list[_Spent]] = {way: [] for way in engines}
        for at in range(num_rounds):
            for way, engine in engines.items():
                rounds[way].append(
                    _serve_in_vllm(engine, workload, [f"{at} {number}" for number in range(num_requests)])
                )
        exporting_s = _exporting_s()
        for engine in engines.values():
            engine.scheduler.connector.shutdown()
    return _row(rounds, exporting_s) | {"metrics": metrics.figures()}


def _serve_in_vllm(engine: VllmEngine, workload: VllmWorkload, request_ids: list[str]) -> _Spent:
    for request_id in request_ids:
        engine.add(request_id, workload.prompt_tokens, workload.steps)
    gc.collect()
    seconds = []
    while engine.scheduler.has_requests():
        seconds.append(engine.step())
    return _Spent(len(seconds), len(request_ids), sum(seconds))


class _Metrics:
    """How long counters take that vLLM asks a connector for in every step. They are told ten times a second.

    Args:
        connector: the connector; it is changed.
    """

    def __init__(self, connector: Any) -> None:
        self._ask = connector.get_kv_connector_stats
        self._told: list[float] = []
        self._not_told: list[float] = []
        connector.get_kv_connector_stats = self._timed

    def _timed(self) -> Any:
        start = time.thread_time()
        stats = self._ask()
        (self._told if stats else self._not_told).append(time.thread_time() - start)
        return stats

    def figures(self) -> dict[str, float]:
        """As JSON."""
        told_us, not_told_us = (median(seconds) * 1e6 for seconds in (self._told, self._not_told))
        per_step = not_told_us + told_us * TYPICAL_STEP_S / STATS_EVERY_S
        return {
            "us_when_told": round(told_us, 1),
            "us_otherwise": round(not_told_us, 1),
            "us_per_step": round(per_step, 1),
        }


STATS_EVERY_S = 0.1
"""As in ``cargohold.integrations.vllm.scheduler``, which only vLLM's environment can import."""


if __name__ == "__main__":
    print(json.dumps(measure_vllm(INSIDE_VLLM, num_rounds=7, num_requests=32)))
