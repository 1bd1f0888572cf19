"""Verification around real models: an attacker who changes KV in host memory or on a disk is found, rounding is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cargohold import LLM, DiskTierConfig, OffloadConfig, SamplingParams
from cargohold.connector.config import VERIFY_OFF
from cargohold.protocol import metrics
from cargohold.tiers import HostMemory, StoreOutcome
from cargohold.tiers.disk.tier import DiskTier
from cargohold.transfer.compare import CLOSE
from tests.liars import kept_memories
from tests.llms import in_engine
from tests.models import VOCAB_SIZE

SAMPLING = SamplingParams(max_tokens=2)
EXPONENTS = {"float32": (3, 0x40), "bfloat16": (1, 0x40)}
"""The byte of a number, and the bit in it, that changes its exponent most."""


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> list[HostMemory]:
    """The host memory of each engine, in order."""
    return kept_memories(monkeypatch)


def prompts(count: int) -> list[list[int]]:
    generator = random.Random(5)
    return [[generator.randrange(3, VOCAB_SIZE) for _ in range(70)] for _ in range(count)]


def options(verify: float | str = 1.0, **more: Any) -> dict[str, Any]:
    offload = OffloadConfig(host_bytes="64MiB", verify=verify, verify_bytes_per_s="1GiB", **more)
    return {"offload": offload, "num_device_blocks": 40, "prefix_caching": False, "max_model_len": 96}


def rows_of(llm: LLM, tokens: list[int]) -> list[int]:
    """Where host memory keeps a prompt that was asked last."""

    def look(engine: Any) -> list[int]:
        manager = engine.scheduler.connector.inner.shared.manager
        keys = [key for key in manager.table.keys if key][-(len(tokens) // 16) :]
        pins = manager.prepare_load(keys)
        pins.release()
        return [int(slot) for slot in pins.slots]

    return in_engine(llm, look)


def outcomes(llm: LLM) -> dict[tuple[str, ...], int]:
    return {of.labels: int(count) for of, count in llm.stats().items() if of.family is metrics.VERIFIED and count}


def flip(rows: Any, at: list[int], dtype: str) -> None:
    byte, bit = EXPONENTS[dtype]
    rows[at[1], 4 * 40 + byte] ^= bit


def exchange(rows: Any, at: list[int], _dtype: str) -> None:
    rows[[at[1], at[2]]] = rows[[at[2], at[1]]]


def shift_by_a_token(rows: Any, at: list[int], _dtype: str) -> None:
    rows[at[1]] = np.roll(rows[at[1]].reshape(4, 16, -1), 1, axis=1).reshape(-1)


def of_other_weights(_rows: Any, _at: list[int], _dtype: str) -> None:
    """Done by the test: it takes the rows of another model."""


ATTACKS = [flip, exchange, shift_by_a_token, of_other_weights]


@pytest.mark.parametrize("dtype", EXPONENTS)
def test_every_attack_on_host_memory_is_found(
    dtype: str, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM], memories: list[HostMemory]
) -> None:
    asked = prompts(2 * len(ATTACKS))
    others = make_llm(tiny_model("qwen2"), dtype=dtype, **options(VERIFY_OFF))
    others.generate(asked[-2:-1], SAMPLING)
    llm = make_llm(tiny_model("llama"), dtype=dtype, **options())
    places = [(llm.generate([tokens], SAMPLING), rows_of(llm, tokens))[1] for tokens in asked]
    rows = memories[1].rows
    for attack, at in zip(ATTACKS, places[::2], strict=True):
        attack(rows, at, dtype)
    rows[places[-2][1]] = memories[0].rows[rows_of(others, asked[-2])[1]]
    lies = []
    for tokens in asked:
        llm.generate([tokens], SAMPLING)
        lies.append(outcomes(llm).get(("different", "host"), 0))
    assert lies == [1, 1, 3, 3, 4, 4, 5, 5], "each attack, and nothing else"


def test_what_lies_on_a_disk_with_good_checksums_is_found_and_removed_there(
    tmp_path: Path, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (tokens,), store = tiny_model("llama"), prompts(1), DiskTier.store
    disk = DiskTierConfig(directory=str(tmp_path), max_bytes="64MiB", reserve_bytes=0)

    def changed(self: DiskTier, key: bytes, chunk: memoryview, parent: bytes | None, *more: Any) -> StoreOutcome:
        if parent is None:
            chunk[3] ^= 0x40
        return store(self, key, chunk, parent, *more)

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "store", changed)
        first = make_llm(model, **options(VERIFY_OFF, tiers=[disk]))
        first.generate([tokens], SAMPLING)
        first.close()
    second = make_llm(model, **options(tiers=[disk], restore="always"))
    second.generate([tokens], SAMPLING)
    assert outcomes(second) == {("equal", "disk"): 3, ("different", "disk"): 1}
    second.close()
    third = make_llm(model, **options(VERIFY_OFF, tiers=[disk], restore="always"))
    (output,) = third.generate([tokens], SAMPLING)
    assert not output.metrics.restored_tokens, "it is not there any more"


@pytest.mark.parametrize("dtype", sorted(CLOSE.keys() - {"exact"}))
def test_rounding_is_no_lie(dtype: str, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]) -> None:
    asked = prompts(4)
    llm = make_llm(
        tiny_model("gemma3"), dtype=dtype, max_num_batched_tokens=32, **options() | {"num_device_blocks": 40}
    )
    continued = [[*tokens, *llm.generate([tokens], SamplingParams(max_tokens=20))[0].token_ids] for tokens in asked]
    llm.generate(continued, SAMPLING)
    found = outcomes(llm)
    assert found.get(("close", "host"), 0) > 0 and ("different", "host") not in found
