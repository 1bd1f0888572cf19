"""Chunks larger than any request: they could never be filled, so they are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cargohold import LLM, ConfigError, OffloadConfig
from cargohold.connector.factory import Offload, check_chunks
from cargohold.protocol import NULL_CONNECTOR, AttentionKind, KVCacheGroup, KVCacheLayout

FULL, WINDOW, STATE = AttentionKind.FULL, AttentionKind.SLIDING_WINDOW, AttentionKind.RECURRENT


def check(kind: AttentionKind, blocks_per_chunk: int, max_model_len: int, *others: Offload) -> None:
    """Check the chunks of an engine with a pool of 20 blocks of 16 tokens."""
    group = KVCacheGroup(0, kind, 16, ("layer",), window_tokens=64 if kind is WINDOW else None)
    layout = KVCacheLayout((group,), num_blocks=21, block_bytes=1024, hash_block_tokens=16)
    offload = [*others, OffloadConfig(host_bytes="1MiB", blocks_per_chunk=blocks_per_chunk)]
    check_chunks(offload, layout, max_model_len)


@pytest.mark.parametrize(
    ("kind", "max_model_len", "most"),
    [
        (FULL, 1000, 20),
        (FULL, 161, 10),
        (FULL, 160, 9),  # the KV of the last token is never computed
        (WINDOW, 161, 10),
    ],
)
def test_a_chunk_longer_than_any_request_is_refused(kind: AttentionKind, max_model_len: int, most: int) -> None:
    check(kind, most, max_model_len)
    for others in ((), (NULL_CONNECTOR, OffloadConfig(mode="lazy", host_bytes="1MiB"))):
        with pytest.raises(ConfigError, match=f"nothing would be stored; use at most {most}$") as raised:
            check(kind, most + 1, max_model_len, *others)
        assert raised.value.key == f"connectors[{len(others)}].blocks_per_chunk" and raised.value.value == most + 1


@pytest.mark.parametrize(
    ("kind", "blocks_per_chunk", "max_model_len"),
    [
        (WINDOW, 30, 1000),  # the pool holds only windows
        (STATE, 30, 161),  # of a state, a block may stand for any number of tokens
        (FULL, 1, 9),  # with requests this short, no size of chunks would help
    ],
)
def test_what_may_be_filled_is_not_refused(kind: AttentionKind, blocks_per_chunk: int, max_model_len: int) -> None:
    check(kind, blocks_per_chunk, max_model_len)


def test_an_engine_refuses_it_before_the_weights_are_loaded(
    tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cargohold.base_llm.make_executor", lambda *_: pytest.fail("it is too late"))
    offload = OffloadConfig(host_bytes="64MiB", blocks_per_chunk=32)
    with pytest.raises(ConfigError, match=r"blocks_per_chunk=32 .* use at most 30"):
        LLM(tiny_model("llama"), num_device_blocks=32, offload=offload)
