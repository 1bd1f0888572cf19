"""Runs benchmarks and keeps their results."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import NotInstalledError, describe_environment

RESULTS = Path(__file__).parent / "results"
NAMES = (
    "engine",
    "restore",
    "in_step",
    "serve",
    "front",
    "soak",
    "transfers",
    "lazy",
    "ranks",
    "bookkeeping",
    "growing",
    "hints",
    "holes",
    "parts",
    "paths",
    "policies",
    "replay",
    "tiers",
    "stores",
    "packed",
    "handoff",
    "gpu",
    "generating",
    "tracing",
    "vllm",
    "vllm_load",
    "vllm_prefetch",
    "found",
    "neighbours",
    "sglang",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks", description="Run benchmarks and write benchmarks/results/NAME.json."
    )
    parser.add_argument("name", nargs="?", choices=NAMES, help="which one; all by default")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where to write results (default: benchmarks/results)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works; nothing is written")
    arguments = parser.parse_args()
    for name in (arguments.name,) if arguments.name else NAMES:
        print(f"== {name}", flush=True)
        try:
            result = run_one(name, quick=arguments.quick)
        except NotInstalledError as error:
            print(f"skipped: {error}")
            continue
        print(json.dumps(result["result"], indent=2))
        if not arguments.quick:
            arguments.results.mkdir(parents=True, exist_ok=True)
            file = arguments.results / f"{name}.json"
            file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
            print(f"written to {file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}")
    return 0


def run_one(name: str, *, quick: bool) -> dict[str, Any]:
    """Run a benchmark. Returns its result, with the machine, versions and workload that it was measured with."""
    module = importlib.import_module(f"benchmarks.{name}")
    started = time.perf_counter()
    result = module.run(quick=quick)
    return {
        "benchmark": name,
        "what": (module.__doc__ or "").strip().split("\n", maxsplit=1)[0],
        "environment": describe_environment(),
        "took_s": round(time.perf_counter() - started, 1),
        "result": result,
    }


if __name__ == "__main__":
    sys.exit(main())
