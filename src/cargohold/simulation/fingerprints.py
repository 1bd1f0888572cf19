"""A model whose KV says which prefix it belongs to.

In place of keys and values, every token's place in every block holds a *fingerprint*: a number derived from exactly the prefix
that ends with that token, from the KV-cache group, and from the worker's rank. A forward pass checks the fingerprints of every
token that its queries would read, and writes those of its own tokens. A block that was overwritten, copied from the wrong
place, or never filled is found at the very step that reads it: a real model would give a wrong token, unless that step's result
is thrown away. A request that has read something wrong also writes garbage, as it would in a real model. Recurrent state has
one fingerprint per block instead: see ``states``.

Fingerprints live in a byte buffer that connectors see as two-dimensional tensors, as the contract says; Python compares slices
of it, because for a handful of tokens that is ten times faster than arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cargohold.engine.core.step import ScheduledTokens, SchedulerStep
from cargohold.engine.executor.runner import LayerHooks
from cargohold.protocol import NULL_BLOCK_ID, AttentionKind, KVCacheGroup, KVCacheLayout
from cargohold.simulation.chains import FINGERPRINT_BYTES, GARBAGE, WRONG_TOKEN, PrefixChains, WrongTokenError, end_of
from cargohold.simulation.copies import CopiesInFlight
from cargohold.simulation.states import StateBlocks

Fingerprints = npt.NDArray[np.uint64]

_RECURRENT: Final = AttentionKind.RECURRENT


class FingerprintRunner:
    """Computes fingerprints in place of KV. Satisfies ``ModelRunner``.

    The next token is a function of the prefix, so runs can be compared token by token. A request that reads something else
    than its prefix gets ``WRONG_TOKEN``, and ``wrong`` says what it read.

    Args:
        layout: the paged KV cache; its blocks hold as many fingerprints as the widest group has tokens per block.
        chains: fingerprints of the requests' prefixes.
        vocab_size: generated tokens are below it.
        rank: the worker's rank; workers of different ranks hold different fingerprints.
        copies: the worker's copies in flight, with which forward passes must not conflict.
        as_tensors: whether connectors get the memory as PyTorch tensors, as from a real engine, or as numpy arrays.

    Attributes:
        memory: fingerprints, shape ``(num_blocks, tokens of a block)``.
        wrong: what was read wrongly in the last step, by request id.
        before_forward: called before each forward pass, so that copies can go on meanwhile.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        chains: PrefixChains,
        vocab_size: int,
        rank: int = 0,
        *,
        copies: CopiesInFlight | None = None,
        as_tensors: bool = False,
    ) -> None:
        block_tokens = max(group.block_tokens for group in layout.groups)
        assert layout.block_bytes == block_tokens * FINGERPRINT_BYTES
        self._groups = layout.groups
        self._block_bytes = layout.block_bytes
        self._chains = chains
        self._vocab_size = vocab_size
        salt = (rank + 1) * 0x9E3779B97F4A7C15 & (2**64 - 1)
        self._salts = [salt ^ group.index for group in layout.groups]
        self._copies = copies or CopiesInFlight(rank)
        self._as_tensors = as_tensors
        self._bytes = bytearray(layout.num_blocks * layout.block_bytes)
        # Per group, the bytes of each block that hold its tokens: joining them is faster than slicing the whole.
        self._blocks = [self._views(group.block_tokens) for group in layout.groups]
        self._states = {
            group.index: self._new_states(group) for group in self._groups if group.kind is AttentionKind.RECURRENT
        }
        self.memory: Fingerprints = np.frombuffer(self._bytes, dtype=np.uint64).reshape(layout.num_blocks, block_tokens)
        self.wrong: dict[str, WrongTokenError] = {}
        self.before_forward: Callable[[], None] = lambda: None

    def kv_regions(self) -> Sequence[Sequence[Any]]:
        """One region for all groups, as bytes."""
        region: Any = self.memory.view(np.uint8)
        if self._as_tensors:
            import torch  # noqa: PLC0415  # most simulations do without it

            region = torch.from_numpy(region)
        return [[region] for _ in self._groups]

    def execute(self, step: SchedulerStep, hooks: LayerHooks | None) -> Mapping[str, int]:
        """Check the fingerprints that the step reads, and write its own."""
        self.wrong.clear()
        self.before_forward()
        if hooks is None:
            # All reads first: garbage in one group spoils what the others write.
            for share in step.scheduled:
                for group in self._groups:
                    self._read(share, group)
            for share in step.scheduled:
                for group in self._groups:
                    self._write(share, group)
        else:
            self._run_layers(step, hooks)
        if hooks is not None or len(step.scheduled) * len(self._groups) > 1 or len(step.scheduled[0].token_ids) > 1:
            for share in step.scheduled:
                for group in self._groups:
                    self._compare_written(share, group)
        # Otherwise the step wrote a single token, which nothing can have overwritten.
        return {share.request_id: self._next_token(share) for share in step.scheduled if share.sample is not None}

    def _new_states(self, group: KVCacheGroup) -> StateBlocks:
        index = group.index
        return StateBlocks(group, self._blocks[index], self._chains, self._salts[index], self._copies)

    def _views(self, block_tokens: int) -> list[memoryview]:
        memory, used_bytes = memoryview(self._bytes), block_tokens * FINGERPRINT_BYTES
        return [memory[at : at + used_bytes] for at in range(0, len(memory), self._block_bytes)]

    def _run_layers(self, step: SchedulerStep, hooks: LayerHooks) -> None:
        for group in self._groups:
            for name in group.layer_names:
                hooks.wait_for_layer_load(name)
                for share in step.scheduled:
                    self._read(share, group)
                    self._write(share, group)
                hooks.save_kv_layer(name)

    def _next_token(self, share: ScheduledTokens) -> int:
        if share.request_id in self.wrong:
            return WRONG_TOKEN
        end = end_of(share)
        return self._chains.chain(share.request_id, end)[end - 1] % self._vocab_size

    def _read(self, share: ScheduledTokens, group: KVCacheGroup) -> None:
        if group.kind is _RECURRENT:
            self._note(share, self._states[group.index].read(share))
            return
        start = group.num_skipped_tokens(share.num_computed_tokens)
        if start < share.write_from:
            self._compare(share, group, start, share.write_from)
            if self._copies.num_jobs:
                blocks = share.block_ids[group.index][start // group.block_tokens :]
                self._copies.check_read(blocks, share.request_id)

    def _write(self, share: ScheduledTokens, group: KVCacheGroup) -> None:
        """Write the fingerprints of the step's tokens, or garbage if the request has read something wrong."""
        if group.kind is _RECURRENT:
            self._states[group.index].write(share, is_garbage=share.request_id in self.wrong)
            return
        table, end = share.block_ids[group.index], end_of(share)
        first = share.write_from // group.block_tokens
        if NULL_BLOCK_ID in table[first:]:
            raise WrongTokenError(f"request {share.request_id} writes KV of group {group.index} to the null block")
        if self._copies.num_jobs:
            self._copies.check_write(table[first:], share.request_id)
        if share.request_id in self.wrong:
            coded = bytearray(GARBAGE * end)
        else:
            coded = self._chains.coded(share.request_id, end, self._salts[group.index])
        memory, block_tokens = self._bytes, group.block_tokens
        at = share.write_from
        while at < end:
            index, offset = divmod(at, block_tokens)
            stop = min(end, at + block_tokens - offset)
            place = table[index] * self._block_bytes + offset * FINGERPRINT_BYTES
            size = (stop - at) * FINGERPRINT_BYTES
            memory[place : place + size] = coded[at * FINGERPRINT_BYTES : stop * FINGERPRINT_BYTES]
            at = stop

    def _compare_written(self, share: ScheduledTokens, group: KVCacheGroup) -> None:
        """Check that what the step wrote is still there, and that no other request has written to the same blocks."""
        if share.request_id in self.wrong:
            return  # it wrote garbage
        if group.kind is _RECURRENT:
            self._note(share, self._states[group.index].compare(share))
        else:
            self._compare(share, group, share.write_from, end_of(share))

    def _note(self, share: ScheduledTokens, error: WrongTokenError | None) -> None:
        if error is not None:
            self.wrong.setdefault(share.request_id, error)

    def _compare(self, share: ScheduledTokens, group: KVCacheGroup, start: int, end: int) -> None:
        """Compare the memory of tokens ``[start, end)`` with what it should hold."""
        index, blocks = group.index, self._blocks[group.index]
        coded = self._chains.coded(share.request_id, end, self._salts[index])
        first = start // group.block_tokens
        held = b"".join(
            [blocks[block_id] for block_id in share.block_ids[index][first : -(-end // group.block_tokens)]]
        )
        held_from = first * group.block_tokens
        found = held[(start - held_from) * FINGERPRINT_BYTES : (end - held_from) * FINGERPRINT_BYTES]
        if found != coded[start * FINGERPRINT_BYTES : end * FINGERPRINT_BYTES]:
            self._note_wrong(share, group, range(start, end))

    def _note_wrong(self, share: ScheduledTokens, group: KVCacheGroup, positions: range) -> None:
        table, block_tokens = share.block_ids[group.index], group.block_tokens
        coded = self._chains.coded(share.request_id, positions.stop, self._salts[group.index])
        expected = np.frombuffer(bytes(coded), dtype=np.uint64)
        at = next(at for at in positions if self.memory[table[at // block_tokens], at % block_tokens] != expected[at])
        block = table[at // block_tokens]
        self.wrong.setdefault(
            share.request_id,
            WrongTokenError(
                f"request {share.request_id}, group {group.index}: block {block} does not hold the KV of token {at} "
                f"(of {end_of(share)})"
            ),
        )
