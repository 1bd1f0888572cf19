"""A model whose KV says what it is.

In place of keys and values, every token's slot in every block holds a *fingerprint*: a number derived from exactly the prefix
that ends with that token, and from the KV-cache group. A forward pass writes the fingerprints of its tokens and checks those of
every token that its queries would read. A block that was overwritten, copied from the wrong place, or never filled is found at
the very step that reads it: it would have been a wrong token, unless that step's result is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cargohold.engine.core.step import ScheduledTokens, SchedulerStep
from cargohold.engine.executor.runner import LayerHooks
from cargohold.protocol import KVCacheGroup, KVCacheLayout

Fingerprints = npt.NDArray[np.uint64]

FINGERPRINT_BYTES = 8
WRONG_TOKEN = 2**31
_MASK = 2**64 - 1


class WrongTokenError(AssertionError):
    """A forward pass would have read KV that is not what the block table says."""


class PrefixChains:
    """Fingerprints of all prefixes of the requests alive.

    Args:
        tokens_of: the tokens of a request, by id.
    """

    def __init__(self, tokens_of: Callable[[str], Sequence[int]]) -> None:
        self._tokens_of = tokens_of
        self._chains: dict[str, list[int]] = {}

    def chain(self, request_id: str, num_tokens: int) -> list[int]:
        """One number per token, for the prefix that ends with it; at least ``num_tokens`` of them."""
        chain = self._chains.setdefault(request_id, [])
        if len(chain) < num_tokens:
            tokens = self._tokens_of(request_id)
            previous = chain[-1] if chain else 1
            for token in tokens[len(chain) : num_tokens]:
                # hash() of a tuple of integers mixes well and is the same in every process.
                previous = hash((previous, token)) & _MASK
                chain.append(previous)
        return chain

    def forget(self, request_id: str) -> None:
        """The request is gone."""
        self._chains.pop(request_id, None)


class FingerprintRunner:
    """Satisfies ``ModelRunner``. The next token is a function of the prefix, so runs can be compared token by token.

    A request that reads something else than its prefix gets ``WRONG_TOKEN``, and ``wrong`` says what it read.

    Args:
        layout: the paged KV cache; its blocks are ``block_tokens * FINGERPRINT_BYTES`` long.
        chains: fingerprints of the requests' prefixes.
        vocab_size: tokens are below it.
        rank: workers of different rank hold different fingerprints.

    Attributes:
        memory: fingerprints, shape ``(num_blocks, block_tokens)``.
        wrong: what went wrong in the last step, by request.
    """

    def __init__(self, layout: KVCacheLayout, chains: PrefixChains, vocab_size: int, rank: int = 0) -> None:
        block_tokens = layout.groups[0].block_tokens
        assert layout.block_bytes == block_tokens * FINGERPRINT_BYTES
        self._layout = layout
        self._chains = chains
        self._vocab_size = vocab_size
        self._salt = (rank + 1) * 0x9E3779B97F4A7C15 & _MASK
        self.wrong: dict[str, WrongTokenError] = {}
        self.memory: Fingerprints = np.zeros((layout.num_blocks, block_tokens), dtype=np.uint64)

    def kv_regions(self) -> Sequence[Sequence[Any]]:
        """One region for all groups, as bytes."""
        region = self.memory.view(np.uint8)
        return [[region] for _ in self._layout.groups]

    def execute(self, step: SchedulerStep, hooks: LayerHooks | None) -> Mapping[str, int]:
        """Write the step's fingerprints and check those it reads."""
        sampled = {}
        self.wrong.clear()
        for group in self._layout.groups:
            for name in group.layer_names:
                if hooks is not None:
                    hooks.wait_for_layer_load(name)
                for share in step.scheduled:
                    self._write(share, group)
                if hooks is not None:
                    hooks.save_kv_layer(name)
        for share in step.scheduled:
            for group in self._layout.groups:
                self._check(share, group)
            if share.sample is not None:
                sampled[share.request_id] = self._next_token(share)
        return sampled

    def _next_token(self, share: ScheduledTokens) -> int:
        if share.request_id in self.wrong:
            return WRONG_TOKEN
        end = share.num_computed_tokens + share.num_scheduled_tokens
        return self._chains.chain(share.request_id, end)[end - 1] % self._vocab_size

    def _expected(self, share: ScheduledTokens, group: KVCacheGroup, start: int, end: int) -> Fingerprints:
        chain = self._chains.chain(share.request_id, end)
        salt = np.uint64(self._salt ^ group.index)
        return np.array(chain[start:end], dtype=np.uint64) ^ salt

    def _places(self, share: ScheduledTokens, group: KVCacheGroup, positions: Any) -> tuple[Any, Any]:
        table = np.asarray(share.block_ids[group.index])
        return table[positions // group.block_tokens], positions % group.block_tokens

    def _write(self, share: ScheduledTokens, group: KVCacheGroup) -> None:
        end = share.num_computed_tokens + share.num_scheduled_tokens
        positions = np.arange(share.write_from, end)
        blocks, offsets = self._places(share, group, positions)
        if not blocks.all():
            raise WrongTokenError(f"request {share.request_id} writes KV of group {group.index} to the null block")
        self.memory[blocks, offsets] = self._expected(share, group, share.write_from, end)

    def _check(self, share: ScheduledTokens, group: KVCacheGroup) -> None:
        end = share.num_computed_tokens + share.num_scheduled_tokens
        start = group.num_skipped_tokens(share.num_computed_tokens)
        positions = np.arange(start, end)
        blocks, offsets = self._places(share, group, positions)
        wrong = np.flatnonzero(self.memory[blocks, offsets] != self._expected(share, group, start, end))
        if len(wrong):
            at = int(positions[wrong[0]])
            self.wrong[share.request_id] = WrongTokenError(
                f"request {share.request_id}, group {group.index}: block {int(blocks[wrong[0]])} does not hold the KV of "
                f"token {at} ({len(wrong)} of {len(positions)} tokens are wrong)"
            )
