"""Long contexts that come back to vLLM one right after the other: a pool that holds all, ours, and vLLM's own connector.

Servers under load do not pause between requests: OpenMP's threads still spin when the next load begins. ``benchmarks.vllm``
waits before each request until they have stopped. This is measured with an engine process of vLLM's own, and with the engine in
the client's process, where vLLM makes empty steps as fast as it can while a request waits for its load.
"""

from __future__ import annotations

from typing import Any

from benchmarks.environment import NotInstalledError
from benchmarks.vllm import HOST_BYTES, aim, comparison, describe, progress
from benchmarks.vllm_contenders import CARGOHOLD, DEVICE_HIT, VLLM, contenders
from benchmarks.vllm_figures import Workload

DTYPE = "float32"
"""The largest KV that the model can have, so that the most is copied."""
ENGINES = {"own process": "1", "in process": "0"}
"""Where vLLM's engine runs, and the value of ``VLLM_ENABLE_V1_MULTIPROCESSING`` for it."""

QUICK = Workload(conversations=4, in_pool=1, context_tokens=420, question_tokens=24, answer_tokens=8, revisits=1)
FULL = Workload(conversations=8)


def run(*, quick: bool) -> dict[str, Any]:
    workload = QUICK if quick else FULL
    names = (DEVICE_HIT, CARGOHOLD, VLLM)
    taking_part = [one for one in contenders(HOST_BYTES, workload.block_tokens) if one.name in names]
    for contender in taking_part:
        if contender.obstacle is not None:
            raise NotInstalledError(contender.obstacle)
    result: dict[str, Any] = {"workload": describe(workload, DTYPE), "revisits": {}, "aims": []}
    for where, value in ENGINES.items():
        progress(f"engine: {where}")
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": value}
        with comparison(taking_part, workload, DTYPE, environment) as compared:
            compared.warm_up()
            result["revisits"][where], ttft = compared.measure_revisits(in_a_row=workload.conversations)
            result["versions"] = compared.versions
        result["aims"] += [
            aim(f"{where}: first token, over a device hit", 1.1, ttft[CARGOHOLD], ttft[DEVICE_HIT]),
            aim(f"{where}: first token, over vLLM's own", 1.05, ttft[CARGOHOLD], ttft[VLLM]),
        ]
    return result
