"""Prefetch inside vLLM: the first token of a prompt on disk, with a hint half a second before, beside host hits and no hint."""

from __future__ import annotations

import os
import random
import tempfile
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from statistics import median
from typing import Any

from benchmarks.environment import NotInstalledError
from cargohold.engine.model.files import locate_model

MODEL = "smollm2"
AHEAD_S = 0.5
BLOCK_TOKENS = 32
NUM_CONTEXTS, IN_HOST, SPARE_BLOCKS = 8, 4, 3
"""Contexts on disk, and how many of them host memory holds; the pool holds one, and a few blocks more."""
SETTLE_S = 1.2
"""Pause before a request that is measured: vLLM's workers spin for a second."""


def run(*, quick: bool) -> dict[str, Any]:
    if find_spec("vllm") is None:
        raise NotInstalledError("vLLM is not installed; run this in an environment that has it")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    context_tokens, repeats = (256, 2) if quick else (1024, 7)
    with tempfile.TemporaryDirectory() as directory:
        visits = _Visits(_engine(directory, context_tokens), context_tokens)
        visits.fill()
        for _ in range(repeats):
            visits.repeat()
    times = visits.times
    return {
        "workload": {
            "model": MODEL,
            "dtype": "float32",
            "context_tokens": context_tokens,
            "block_tokens": BLOCK_TOKENS,
            "hint_before_s": AHEAD_S,
            "repeats": repeats,
        },
        "first_token_ms": {name: round(1000 * median(of), 1) for name, of in times.items()},
        "range_ms": {name: [round(1000 * min(of), 1), round(1000 * max(of), 1)] for name, of in times.items()},
        "prefetched_over_host": _ratio(times["prefetched"], times["host"]),
        "disk_over_host": _ratio(times["disk"], times["host"]),
        "aim": 1.15,
        "identical": visits.are_identical,
    }


def _ratio(times: list[float], of: list[float]) -> float:
    """Median of the quotients, visit by visit."""
    return round(median(a / b for a, b in zip(times, of, strict=True)), 3)


def _engine(directory: str, context_tokens: int) -> Any:
    from vllm import LLM  # noqa: PLC0415  # only where it is installed
    from vllm.config import KVTransferConfig  # noqa: PLC0415  # as above

    model = locate_model(MODEL)
    disk = {"kind": "disk", "directory": directory, "max_bytes": "8GiB", "write": "through"}
    transfer = KVTransferConfig(
        kv_connector="CargoholdConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "host_bytes": IN_HOST * _context_bytes(model, context_tokens),
            "policy": "lru",
            "restore": "always",
            "tiers": [disk],
        },
    )
    return LLM(
        model,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=context_tokens + BLOCK_TOKENS,
        num_gpu_blocks_override=context_tokens // BLOCK_TOKENS + SPARE_BLOCKS,
        kv_transfer_config=transfer,
    )


def _context_bytes(model: str, context_tokens: int) -> int:
    """Bytes of KV of a context and of an answer to it."""
    from transformers import AutoConfig  # noqa: PLC0415  # slow to import

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    head = config.hidden_size // config.num_attention_heads
    return int((context_tokens + 64) * config.num_hidden_layers * 2 * config.num_key_value_heads * head * 4)


@dataclass
class _Visits:
    """Visits contexts in turn, and collects times to the first token by where the context was found.

    Attributes:
        llm: vLLM.
        context_tokens: tokens of a context.
        times: seconds, by ``host``, ``disk`` and ``prefetched``.
        are_identical: whether each context had one answer however it came.
    """

    llm: Any
    context_tokens: int
    times: dict[str, list[float]] = field(default_factory=dict)
    are_identical: bool = True

    def __post_init__(self) -> None:
        generator = random.Random(1)
        self._contexts = [
            [generator.randrange(40_000) for _ in range(self.context_tokens)] for _ in range(NUM_CONTEXTS)
        ]
        self._answers: dict[int, list[int]] = {}
        self._turn = count()
        self._ids = map(str, count())

    def fill(self) -> None:
        """Compute all contexts, and wait until they are on disk."""
        for at, context in enumerate(self._contexts):
            self._answers[at] = self._ask(context)[1]
            time.sleep(SETTLE_S)

    def repeat(self) -> None:
        """One visit of each kind: two contexts from disk, the second with a hint before it, then the first from host memory."""
        first, second = next(self._turn) % NUM_CONTEXTS, next(self._turn) % NUM_CONTEXTS
        self._visit("disk", first)
        self._hint(second)
        self._visit("prefetched", second, pause_s=AHEAD_S)
        self._visit("host", first)

    def _hint(self, at: int) -> None:
        """Give a hint about a context, carried by a short request about something else."""
        time.sleep(SETTLE_S)
        payload = {"token_ids": self._contexts[at], "deadline_s": 5.0}
        action = {"action_id": "soon", "action_type": "prefetch", "action_version": "1", "payload": payload}
        envelope = {"protocol_version": "1", "message_id": "m", "actions": [action]}
        (outcome,) = self._ask([7, 7], 1, cargohold_hints=envelope)[2]["cargohold_hints"]
        assert outcome["status"] == "deferred", outcome

    def _visit(self, name: str, at: int, pause_s: float = SETTLE_S) -> None:
        time.sleep(pause_s)
        first_s, tokens, told = self._ask(self._contexts[at])
        restored = told["cargohold_explain"]["restored_tokens"]
        tier = "disk" if name == "disk" else "host"
        assert restored.get(tier, 0) >= self.context_tokens - (SPARE_BLOCKS + 1) * BLOCK_TOKENS, (name, restored)
        self.times.setdefault(name, []).append(first_s)
        self.are_identical &= tokens == self._answers[at]

    def _ask(self, prompt: list[int], max_tokens: int = 8, **wishes: Any) -> tuple[float, list[int], dict[str, Any]]:
        """Serve one request; returns seconds to its first token, its tokens, and what it is told about KV."""
        from vllm import SamplingParams  # noqa: PLC0415  # only where it is installed

        extra = {"kv_transfer_params": {"cargohold_explain": True, **wishes}}
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra
        )
        engine, first_s, last = self.llm.llm_engine, 0.0, None
        begun = time.perf_counter()
        engine.add_request(next(self._ids), {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for last in engine.step():  # noqa: B007  # the last one is looked at below
                first_s = first_s or time.perf_counter() - begun
        assert last is not None, "vLLM answers every request"
        return first_s, list(last.outputs[0].token_ids), last.kv_transfer_params or {}
