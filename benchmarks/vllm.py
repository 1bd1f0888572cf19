"""Long contexts that come back to vLLM: without a connector, with a pool that holds all, with ours, vLLM's own and LMCache.

Twelve conversations come back in turn to a pool for three, and prompts that share nothing are asked in series, two a series.
Contenders take turns at each request, in rotated order, with a pause of ``SETTLE_S``; host memory holds all, so no policy is
measured. Ratios are of requests that were measured side by side: median and quartiles. In bfloat16, an answer may differ when
other blocks are computed anew, so what is counted as identical is what restored exactly what the device had. vLLM's own
connector refuses the CPU and takes part through ``benchmarks/vllm_cpu_spec.py``; LMCache's server runs beside the engine.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.environment import NotInstalledError
from benchmarks.vllm_contenders import (
    CARGOHOLD,
    DEVICE_HIT,
    LMCACHE,
    NO_CONNECTOR,
    VLLM,
    Answer,
    Contender,
    Engine,
    contenders,
    running,
)
from benchmarks.vllm_figures import Workload, compare, random_tokens, ratio, rotated
from cargohold.engine.model.files import locate_model

MODEL = "smollm2"
HOST_BYTES = 3 * 2**29
"""Room for all prompts, so that nothing is evicted and no policy is measured."""
SETTLE_S = 1.2
"""Pause between turns: copies of one contender must not slow the next one, and vLLM's workers spin for a second."""

QUICK = Workload(
    conversations=4, in_pool=1, context_tokens=420, question_tokens=24, answer_tokens=8, revisits=1, bursts=1
)


def run(*, quick: bool) -> dict[str, Any]:
    workload = QUICK if quick else Workload()
    all_of_them = contenders(HOST_BYTES, workload.block_tokens)
    if quick:
        all_of_them.pop()  # the second LMCache
    taking_part = [contender for contender in all_of_them if contender.obstacle is None]
    skipped = {contender.name: contender.obstacle for contender in all_of_them if contender.obstacle is not None}
    if NO_CONNECTOR in skipped:
        raise NotInstalledError(skipped[NO_CONNECTOR])
    for name, reason in skipped.items():
        progress(f"without {name}: {reason}")
    with comparison(taking_part, workload, "bfloat16") as compared:
        return {
            "workload": describe(workload, "bfloat16"),
            "versions": compared.versions,
            "skipped": skipped,
            **compared.run(),
        }


@contextmanager
def comparison(
    taking_part: Sequence[Contender], workload: Workload, dtype: str, environment: Mapping[str, str] | None = None
) -> Iterator[Comparison]:
    """A comparison of contenders that run until the end of the ``with`` block.

    Args:
        taking_part: the contenders.
        workload: numbers and lengths of prompts.
        dtype: data type of weights and KV.
        environment: environment variables for all contenders.
    """
    progress(f"starting vLLM {len(taking_part)} times")
    with tempfile.TemporaryDirectory(prefix="cargohold-") as directory, ExitStack() as stack:
        stack.enter_context(_ended_by_sigterm())
        engines = {
            contender.name: stack.enter_context(
                running(
                    contender, _options(contender, workload, dtype), Path(directory, f"{at}.log"), environment or {}
                )
            )
            for at, contender in enumerate(taking_part)
        }
        versions: dict[str, str] = {}
        for engine in engines.values():
            versions |= engine.await_start()
        yield Comparison(workload, engines, {contender.name: contender for contender in taking_part}, versions)


class Comparison:
    """Measures all contenders with the same requests, in turns.

    Args:
        workload: numbers and lengths of prompts.
        engines: the running contenders, by name.
        contenders: descriptions of the contenders, by name.
        versions: versions of packages that matter, by name.
    """

    def __init__(
        self,
        workload: Workload,
        engines: Mapping[str, Engine],
        contenders: Mapping[str, Contender],
        versions: Mapping[str, str],
    ) -> None:
        self._workload = workload
        self._engines = engines
        self._contenders = contenders
        self.versions = versions
        self._turn = 0

    def run(self) -> dict[str, Any]:
        """Measure everything with pauses: first prompts that never come back, then conversations."""
        self.warm_up()
        without_reuse = self._measure_bursts()
        revisits, ttft = self.measure_revisits(in_a_row=1)
        return {
            "revisits": revisits,
            "without_reuse": compare(without_reuse, NO_CONNECTOR, "request_ms", "over_no_connector"),
            "aims": self._aims(ttft, without_reuse),
        }

    def warm_up(self) -> None:
        """Ask a prompt that is not counted."""
        self._ask_all([random_tokens("warm up", self._workload.context_tokens)])

    def _measure_bursts(self) -> dict[str, list[float]]:
        """Seconds per request for prompts that share nothing, asked one right after the other."""
        times: dict[str, list[float]] = {name: [] for name in self._engines}
        for burst in range(self._workload.bursts):
            progress(f"without reuse, {burst + 1} of {self._workload.bursts}")
            prompts = [
                random_tokens(f"burst {burst} {at}", self._workload.context_tokens)
                for at in range(self._workload.burst_prompts)
            ]
            for name, answers in self._ask_all(prompts).items():
                assert not any(answer.cached_tokens for answer in answers), f"{name} had seen a new prompt before"
                times[name].append(sum(answer.total_s for answer in answers) / len(answers))
        return times

    def measure_revisits(self, in_a_row: int) -> tuple[dict[str, Any], dict[str, list[float]]]:
        """Measure all visits to conversations but the first ones. Returns the figures, and seconds to the first token.

        Args:
            in_a_row: number of conversations that each contender continues in its turn, one right after the other.
        """
        visits = self._measure_visits(in_a_row)
        ttft = {name: [answer.ttft_s for answer in of] for name, of in visits.items()}
        rows = compare(ttft, DEVICE_HIT, "ttft_ms", "over_device_hit")
        for row in rows:
            of = visits[row["contender"]]
            row["cached_tokens"] = sum(answer.cached_tokens for answer in of) // len(of)
            row["identical"] = sum(a.tokens == b.tokens for a, b in zip(of, visits[DEVICE_HIT], strict=True))
        figures = {
            "requests": len(visits[DEVICE_HIT]),
            "different_answers": len({answer.tokens for answer in visits[DEVICE_HIT]}),
            "rows": rows,
        }
        return figures, ttft

    def _measure_visits(self, in_a_row: int) -> dict[str, list[Answer]]:
        """Answers to all visits but the first ones."""
        workload = self._workload
        visits: dict[str, list[Answer]] = {name: [] for name in self._engines}
        texts = [random_tokens(f"context {at}", workload.context_tokens) for at in range(workload.conversations)]
        for turn in range(workload.revisits + 1):
            progress(f"conversations, turn {turn + 1} of {workload.revisits + 1}")
            for start in range(0, len(texts), in_a_row):
                asked = texts[start : start + in_a_row]
                answers = self._ask_all(asked)
                for at, text in enumerate(asked):
                    if turn > 0:
                        self._check({name: of[at] for name, of in answers.items()}, len(text))
                        for name, of in answers.items():
                            visits[name].append(of[at])
                    # One history for all contenders, so that all get the same prompts, whatever they answered.
                    text += [
                        *answers[DEVICE_HIT][at].tokens,
                        *random_tokens(f"question {start + at} {turn}", workload.question_tokens),
                    ]
        return visits

    def _check(self, answers: Mapping[str, Answer], prompt_tokens: int) -> None:
        """Assert that each contender found as much of the prompt as it should, so that its row measures what its name says."""
        for name, answer in answers.items():
            contender = self._contenders[name]
            chunk_tokens = contender.chunk_tokens or self._workload.block_tokens
            least = self._workload.cacheable(prompt_tokens, chunk_tokens) if contender.restores else 0
            is_right = answer.cached_tokens >= least if contender.restores else answer.cached_tokens == 0
            assert is_right, f"{name} found {answer.cached_tokens} of {prompt_tokens} tokens, and not {least}"

    def _ask_all(self, prompts: list[list[int]]) -> dict[str, list[Answer]]:
        """Ask all contenders one after the other, each time beginning with another one, so that disturbances hit all."""
        answers = {}
        for name in rotated(list(self._engines), self._turn):
            time.sleep(SETTLE_S)
            answers[name] = self._engines[name].ask(prompts, self._workload.answer_tokens)
        self._turn += 1
        return answers

    def _aims(self, ttft: Mapping[str, list[float]], without_reuse: Mapping[str, list[float]]) -> list[dict[str, Any]]:
        """The bounds that are aimed at, with the measured ratios."""
        aims = [
            aim("first token, over a device hit", 1.1, ttft[CARGOHOLD], ttft[DEVICE_HIT]),
            aim("first token, over vLLM's own", 1.0, ttft[CARGOHOLD], ttft[VLLM]),
            aim(
                "request without reuse, over no connector", 1.02, without_reuse[CARGOHOLD], without_reuse[NO_CONNECTOR]
            ),
        ]
        if LMCACHE in ttft:
            aims.append(aim("first token, over LMCache", round(1 / 1.3, 3), ttft[CARGOHOLD], ttft[LMCACHE]))
        return aims


def aim(what: str, at_most: float, times: Sequence[float], reference: Sequence[float]) -> dict[str, Any]:
    """A bound that is aimed at, with the measured ratio."""
    return {"aim": what, "at_most": at_most, "measured": ratio(times, reference)}


def _options(contender: Contender, workload: Workload, dtype: str) -> dict[str, Any]:
    return {
        "model": str(locate_model(MODEL)),
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "enforce_eager": True,
        "block_size": workload.block_tokens,
        "num_gpu_blocks_override": workload.pool_blocks(is_large=contender.has_large_pool),
        "max_model_len": workload.longest,
        "max_num_seqs": 4,
    }


def describe(workload: Workload, dtype: str) -> dict[str, Any]:
    """The workload's part of a result."""
    return {
        "model": MODEL,
        "dtype": dtype,
        "host_bytes": HOST_BYTES,
        **{name: getattr(workload, name) for name in workload.__dataclass_fields__},
        "device_blocks": workload.pool_blocks(is_large=False),
        "device_blocks_large": workload.pool_blocks(is_large=True),
    }


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Exit by an exception on SIGTERM within the ``with`` block, so that no engine is left behind."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def progress(what: str) -> None:
    """Say what is being measured."""
    print(what, file=sys.stderr, flush=True)
