"""A model whose KV says which prefix it belongs to.

In place of keys and values, every token's place in every block holds a *fingerprint*: a number derived from exactly the prefix
that ends with that token, from the KV-cache group, and from the worker's rank. A forward pass checks the fingerprints of every
token that its queries would read, and writes those of its own tokens. A block that was overwritten, copied from the wrong
place, or never filled is found at the very step that reads it: a real model would give a wrong token, unless that step's result
is thrown away. A request that has read something wrong also writes garbage, as it would in a real model. Recurrent state has
one fingerprint per block instead: see ``states``.

Fingerprints live in a byte buffer that connectors see as two-dimensional tensors, as the contract says; Python compares slices
of it, because for a handful of tokens that is ten times faster than arrays.

Recurrent state in place of keys and values: a block holds one state, which stands for a whole prefix.

A state has the fingerprint of the prefix that it stands for, length included, all over its block::

    blocks of 4, after 10 tokens    | 4 4 4 4 | 8 8 8 8 | 10 10 10 10 |

The last state is advanced in place as its request goes on, and its former value is lost. So if a forward pass continues from a
block that was stored too late, loaded from the place before, or advanced by another request, that is found at once;
fingerprints of single tokens would still be in such a block.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cargohold.cache.rows import plan_rows
from cargohold.engine.core.kv_cache_manager import max_held_blocks
from cargohold.engine.core.request import ScheduledTokens, SchedulerStep
from cargohold.engine.executor import LayerHooks
from cargohold.lab.simulation.transfers import CopiesInFlight
from cargohold.protocol import NULL_BLOCK_ID, AttentionKind, KVCacheGroup, KVCacheLayout

FINGERPRINT_BYTES = 8
WRONG_TOKEN = 2**31
_MASK = 2**64 - 1
_SPREAD = 0xD1342543DE82EF95
GARBAGE_BYTE = 0xA5
GARBAGE = bytes([GARBAGE_BYTE]) * FINGERPRINT_BYTES


class WrongTokenError(AssertionError):
    """A forward pass would have read KV of another prefix than its block table stands for."""


class PrefixChains:
    """Fingerprints of all prefixes of the requests alive.

    Args:
        tokens_of: the tokens of a request, by id.
        root_of: the number that a request's chain starts from, by id. Requests of different roots must not share KV.

    Attributes:
        version: number of the weights.
        adapter_of: a number for the adapter that a request is computed with, by id; 0 for none.
    """

    def __init__(self, tokens_of: Callable[[str], Sequence[int]], root_of: Callable[[str], int] = lambda _: 1) -> None:
        self._tokens_of = tokens_of
        self._root_of = root_of
        self._chains: dict[str, list[int]] = {}
        self._coded: dict[tuple[str, int], bytearray] = {}
        self._weights = 0
        self.version = 0
        self.adapter_of: Callable[[str], int] = lambda _: 0

    def use_weights(self, version: int) -> None:
        """From now on, give prefixes other fingerprints in ``coded``. Generated tokens stay the same, to be compared."""
        self.version = version
        self._weights = version * _SPREAD & _MASK
        self._coded.clear()

    def chain(self, request_id: str, num_tokens: int) -> list[int]:
        """Fingerprints of the request's prefixes, one per token that a prefix ends with; at least ``num_tokens`` of them."""
        chain = self._chains.get(request_id)
        if chain is None:
            chain = self._chains[request_id] = []
        if len(chain) < num_tokens:
            previous = chain[-1] if chain else self._root_of(request_id)
            for token in self._tokens_of(request_id)[len(chain) : num_tokens]:
                previous = next_fingerprint(previous, token)
                chain.append(previous)
        return chain

    def coded(self, request_id: str, num_tokens: int, salt: int) -> bytearray:
        """The chain as bytes, ``FINGERPRINT_BYTES`` per token; different for each ``salt`` and each version of weights."""
        coded = self._coded.get((request_id, salt))
        if coded is None:
            coded = self._coded[request_id, salt] = bytearray()
        if len(coded) < num_tokens * FINGERPRINT_BYTES:
            num_coded = len(coded) // FINGERPRINT_BYTES
            chain, salt = self.chain(request_id, num_tokens), salt ^ self._weights ^ self.adapter_of(request_id)
            coded += array("Q", [link ^ salt for link in chain[num_coded:num_tokens]]).tobytes()
        return coded

    def forget(self, request_id: str) -> None:
        """Drop the chain of a request that is gone."""
        self._chains.pop(request_id, None)
        for key in [key for key in self._coded if key[0] == request_id]:
            del self._coded[key]


def next_fingerprint(previous: int, token: int) -> int:
    """The fingerprint of a prefix from that of the prefix one token shorter."""
    # hash() of a tuple of integers mixes well and is the same in every process.
    return hash((previous, token)) & _MASK


def tokens_alone(prompt: Sequence[int], max_tokens: int, vocab_size: int, root: int = 1) -> list[int]:
    """The tokens that the model generates for a prompt, whatever other requests it is batched with."""
    last = root
    for token in prompt:
        last = next_fingerprint(last, token)
    tokens = []
    for _ in range(max_tokens):
        tokens.append(last % vocab_size)
        last = next_fingerprint(last, tokens[-1])
    return tokens


def end_of(share: ScheduledTokens) -> int:
    """Number of computed tokens that a request has after its share of a step."""
    return share.num_computed_tokens + len(share.token_ids)


# --- recurrent state in place of keys and values ----------------------------------------------------------------------


class StateBlocks:
    """The blocks of one recurrent group.

    In each block that a step reaches, it leaves the state at the block's end, or at the end of the step if that is earlier.

    Args:
        group: the group.
        blocks: per block, the bytes that hold its state.
        chains: fingerprints of the requests' prefixes.
        salt: makes the fingerprints of this group and worker different from others.
        copies: the worker's copies in flight.
    """

    def __init__(
        self,
        group: KVCacheGroup,
        blocks: Sequence[memoryview],
        chains: PrefixChains,
        salt: int,
        copies: CopiesInFlight,
    ) -> None:
        self._group = group
        self._blocks = blocks
        self._chains = chains
        self._salt = salt
        self._copies = copies

    def read(self, share: ScheduledTokens) -> WrongTokenError | None:
        """Read the state before the tokens that are to be written. Returns an error if it is wrong."""
        if not share.write_from:
            return None
        block_id = self._table(share)[self._source(share)]
        self._copies.check_read([block_id], share.request_id)
        return self._difference(share, block_id, share.write_from)

    def write(self, share: ScheduledTokens, *, is_garbage: bool) -> None:
        """Write the states that the step comes to, or garbage if the request has read something wrong."""
        table = self._table(share)
        for num_tokens, at in self._places(share):
            if table[at] == NULL_BLOCK_ID:
                raise WrongTokenError(
                    f"request {share.request_id} writes a state of group {self._group.index} to the null block"
                )
            self._copies.check_write([table[at]], share.request_id)
            state = GARBAGE * self._group.block_tokens if is_garbage else self._state(share, num_tokens)
            self._blocks[table[at]][:] = state

    def compare(self, share: ScheduledTokens) -> WrongTokenError | None:
        """Check that the states that were written are still there. Returns an error if they are not."""
        table = self._table(share)
        differences = (self._difference(share, table[at], num_tokens) for num_tokens, at in self._places(share))
        return next((error for error in differences if error is not None), None)

    def _source(self, share: ScheduledTokens) -> int:
        """The place in the table where the state before the written tokens is."""
        return (share.write_from - 1) // self._group.block_tokens

    def _places(self, share: ScheduledTokens) -> Iterable[tuple[int, int]]:
        """The states that the step leaves: the number of tokens that each stands for, and its place in the table."""
        end, block_tokens = end_of(share), self._group.block_tokens
        if share.write_from == end:
            return ()  # the last token was hit: its logits come from the state that has it
        places = range(share.write_from // block_tokens, -(-end // block_tokens))
        return [(min(end, (at + 1) * block_tokens), at) for at in places]

    def _table(self, share: ScheduledTokens) -> Sequence[int]:
        return share.block_ids[self._group.index]

    def _state(self, share: ScheduledTokens, num_tokens: int) -> bytes:
        coded = self._chains.coded(share.request_id, num_tokens, self._salt)
        state = coded[(num_tokens - 1) * FINGERPRINT_BYTES : num_tokens * FINGERPRINT_BYTES]
        return bytes(state) * self._group.block_tokens

    def _difference(self, share: ScheduledTokens, block_id: int, num_tokens: int) -> WrongTokenError | None:
        if self._blocks[block_id] == self._state(share, num_tokens):
            return None
        return WrongTokenError(
            f"request {share.request_id}, group {self._group.index}: block {block_id} does not hold the state behind "
            f"{num_tokens} tokens (of {end_of(share)})"
        )


# --- a model whose KV says which prefix it belongs to -----------------------------------------------------------------

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
        rank: the worker's rank; workers of different shards hold different fingerprints.
        copies: the worker's copies in flight, with which forward passes must not conflict.
        as_tensors: whether connectors get the memory as PyTorch tensors, as from a real engine, or as numpy arrays.

    Attributes:
        memory: fingerprints, shape ``(num_blocks, tokens of a block)``.
        wrong: what was read wrongly in the last step, by request id.
        before_forward: called before each forward pass, so that copies can go on meanwhile.
        guards_appends: whether tokens may not even be appended in a block that is being copied. Ours copy full blocks alone;
            where others copy a block that is not full, they mean the tokens that it has, which appending leaves as they are.
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
        self.groups = layout.groups
        self._block_bytes = layout.block_bytes
        self._chains = chains
        self._vocab_size = vocab_size
        salt = (rank // layout.num_replicas + 1) * 0x9E3779B97F4A7C15 & (2**64 - 1)
        self.salts = [salt ^ group.index for group in layout.groups]
        self._copies = copies or CopiesInFlight(rank)
        self._as_tensors = as_tensors
        self._bytes = bytearray(layout.num_blocks * layout.block_bytes)
        # Per group, the bytes of each block that hold its tokens: joining them is faster than slicing the whole.
        self._blocks = [self._views(group.block_tokens) for group in layout.groups]
        self._states = {
            group.index: self._new_states(group) for group in self.groups if group.kind is AttentionKind.RECURRENT
        }
        self.memory: Fingerprints = np.frombuffer(self._bytes, dtype=np.uint64).reshape(layout.num_blocks, block_tokens)
        self.wrong: dict[str, WrongTokenError] = {}
        self.before_forward: Callable[[], None] = lambda: None
        self.guards_appends = True

    def kv_regions(self) -> Sequence[Sequence[Any]]:
        """One region for all groups, as bytes; of groups that say how much of a block they use, that much."""
        region: Any = self.memory.view(np.uint8)
        if self._as_tensors:
            import torch  # noqa: PLC0415  # most simulations do without it

            region = torch.from_numpy(region)
        return [[region[:, : group.block_bytes]] for group in self.groups]

    def execute(self, step: SchedulerStep, hooks: LayerHooks | None) -> Mapping[str, int]:
        """Check the fingerprints that the step reads, and write its own."""
        self.wrong.clear()
        self.before_forward()
        if hooks is None:
            # All reads first: garbage in one group spoils what the others write.
            for share in step.scheduled:
                for group in self.groups:
                    self._read(share, group)
            for share in step.scheduled:
                for group in self.groups:
                    self._write(share, group)
        else:
            self._run_layers(step, hooks)
        if hooks is not None or len(step.scheduled) * len(self.groups) > 1 or len(step.scheduled[0].token_ids) > 1:
            for share in step.scheduled:
                for group in self.groups:
                    self._compare_written(share, group)
        # Otherwise the step wrote a single token, which nothing can have overwritten.
        return {share.request_id: self._next_token(share) for share in step.scheduled if share.sample is not None}

    def _new_states(self, group: KVCacheGroup) -> StateBlocks:
        index = group.index
        return StateBlocks(group, self._blocks[index], self._chains, self.salts[index], self._copies)

    def _views(self, block_tokens: int) -> list[memoryview]:
        memory, used_bytes = memoryview(self._bytes), block_tokens * FINGERPRINT_BYTES
        return [memory[at : at + used_bytes] for at in range(0, len(memory), self._block_bytes)]

    def _run_layers(self, step: SchedulerStep, hooks: LayerHooks) -> None:
        for group in self.groups:
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
            overwritten = first if self.guards_appends else -(-share.write_from // group.block_tokens)
            self._copies.check_write(table[overwritten:], share.request_id)
        if share.request_id in self.wrong:
            coded = bytearray(GARBAGE * end)
        else:
            coded = self._chains.coded(share.request_id, end, self.salts[group.index])
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
        coded = self._chains.coded(share.request_id, end, self.salts[index])
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
        coded = self._chains.coded(share.request_id, positions.stop, self.salts[group.index])
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


# --- layouts of paged KV with fingerprints ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A KV-cache group to be made.

    Attributes:
        kind: how its layers look back.
        block_tokens: tokens per block.
        window_tokens: reach of a window; ``None`` where there is none.
    """

    kind: AttentionKind = AttentionKind.FULL
    block_tokens: int = 4
    window_tokens: int | None = None


def layout_of(plans: Sequence[GroupPlan], num_blocks: int, world_size: int = 1, num_replicas: int = 1) -> KVCacheLayout:
    """A paged KV cache with these groups. They say how much of a block they use if rows then have no padding."""
    groups = tuple(
        KVCacheGroup(index, plan.kind, plan.block_tokens, (f"layers.{index}",), plan.window_tokens, number_type="exact")
        for index, plan in enumerate(plans)
    )
    widest = max(plan.block_tokens for plan in plans)
    layout = KVCacheLayout(
        groups,
        num_blocks,
        widest * FINGERPRINT_BYTES,
        gcd(*(plan.block_tokens for plan in plans)),
        world_size,
        num_replicas=num_replicas,
    )
    sized = replace(
        layout,
        groups=tuple(replace(group, block_bytes=group.block_tokens * FINGERPRINT_BYTES) for group in groups),
    )
    rows = plan_rows(sized)
    is_exact = [count * rows.row_bytes for count in rows.per_block] == list(sized.group_bytes)
    return sized if is_exact and not rows.is_even else layout


def simulated_layout(
    num_blocks: int, block_tokens: int = 4, windows: Sequence[int | None] = (None,), world_size: int = 1
) -> KVCacheLayout:
    """A paged KV cache of full attention and sliding windows.

    Args:
        windows: one per KV-cache group: ``None`` for full attention, or the window in tokens.
    """
    plans = [
        GroupPlan(AttentionKind.FULL if window is None else AttentionKind.SLIDING_WINDOW, block_tokens, window)
        for window in windows
    ]
    return layout_of(plans, num_blocks, world_size)


def num_blocks_needed(plans: Sequence[GroupPlan], num_tokens: int, max_step_tokens: int) -> int:
    """Blocks, the null block included, with which a request of ``num_tokens`` tokens can be served alone."""
    groups = layout_of(plans, 2).groups
    return 1 + sum(max_held_blocks(group, num_tokens, max_step_tokens) for group in groups)
