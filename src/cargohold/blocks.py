"""Fixed-size blocks: a pool of them, the hashes that name their contents, and how much of a prefix can be reused.

The pool has reference counts, a hash index and an eviction order. Used for the device and for host memory.

A *unit* is present or absent as a whole: a block of the device pool, or a chunk of a tier. A prefix of ``n`` tokens is usable
for a group when every unit that a later query will read is present::

    full attention      |#########################|           all units before n
    sliding window      |.................########|           units that reach into the window before n
    chunked local       |....................#####|           units since the last multiple of ``window_tokens``
    recurrent state     |........................#|           the last unit
                        0                         n

The longest hit is the longest prefix that is usable for every group. Each group can only shorten it, and shortening may move
the window of another group, so the groups take turns until a full round changes nothing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import lcm
from typing import Final, NamedTuple, Protocol

from cargohold.errors import BlockNotHeldError, NullBlockError, OutOfBlocksError, StaleCursorError
from cargohold.protocol import AttentionKind, KVCacheBlockView, KVCacheGroup


class KVCacheBlock:
    """A block's bookkeeping; its bytes live elsewhere, in the row ``block_id`` of the KV tensors.

    A plain class with slots: pools hold many, and the free queue links them in place.

    Attributes:
        block_id: index in the pool and in the KV tensors.
        ref_cnt: number of references held. Zero means that the block is in the free queue, unless it is the null block.
        is_null: whether it is the null block, block 0 of a device pool.
        block_hash: digest of the prefix that it holds; ``None`` unless it is in the prefix cache.
        group_id: KV-cache group whose KV it holds; ``None`` unless it is in the prefix cache.
        prev_free, next_free: neighbours in the free queue, owned by ``FreeQueue``.
    """

    __slots__ = ("block_hash", "block_id", "group_id", "is_null", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int, *, is_null: bool = False) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.is_null = is_null
        self.block_hash: bytes | None = None
        self.group_id: int | None = None
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        cached = "" if self.block_hash is None else f", {self.block_hash.hex()[:8]} of group {self.group_id}"
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}{cached})"


# --- the free queue ---------------------------------------------------------------------------------------------------


class FreeQueue:
    """A doubly linked list through the blocks themselves.

    ``head <-> first victim <-> ... <-> last victim <-> head``: the sentinel closes the ring, so no end is special.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._head = KVCacheBlock(-1)
        self._head.prev_free = self._head.next_free = self._head
        self._len = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._len

    def append(self, block: KVCacheBlock) -> None:
        """Put ``block`` at the tail, so that it is evicted last of all free blocks."""
        last = self._head.prev_free
        assert last is not None and block.next_free is None, "the block is in the queue already"
        last.next_free = block
        block.prev_free, block.next_free = last, self._head
        self._head.prev_free = block
        self._len += 1

    def prepend(self, block: KVCacheBlock) -> None:
        """Put ``block`` at the head, so that it is evicted first of all free blocks."""
        first = self._head.next_free
        assert first is not None and block.next_free is None, "the block is in the queue already"
        first.prev_free = block
        block.prev_free, block.next_free = self._head, first
        self._head.next_free = block
        self._len += 1

    def remove(self, block: KVCacheBlock) -> None:
        """Take ``block`` out of the queue, from any position."""
        before, behind = block.prev_free, block.next_free
        assert before is not None and behind is not None, "the block is not in the queue"
        before.next_free, behind.prev_free = behind, before
        block.prev_free = block.next_free = None
        self._len -= 1

    def popleft(self) -> KVCacheBlock:
        """Take out and return the next victim. The queue must not be empty."""
        block = self._head.next_free
        assert block is not None and block is not self._head, "the queue is empty"
        self.remove(block)
        return block

    def walk(self, after: KVCacheBlock | None = None) -> Iterator[KVCacheBlock]:
        """Yield blocks in eviction order, behind ``after`` if given.

        Raises:
            StaleCursorError: from this call if ``after`` is not in the queue; from the walk if the block to come next has
                left the queue since the last one was yielded.
        """
        start = self._head if after is None else after
        if start.next_free is None:
            raise StaleCursorError(start.block_id)
        return self._walk_from(start)

    def _walk_from(self, start: KVCacheBlock) -> Iterator[KVCacheBlock]:
        block = start.next_free
        while block is not self._head:
            if block is None or block.next_free is None:
                raise StaleCursorError(-1 if block is None else block.block_id)
            # The caller may take this block out of the queue before asking for the next one.
            behind = block.next_free
            yield block
            block = behind


# --- a pool of fixed-size blocks --------------------------------------------------------------------------------------

RemovedCallback = Callable[[bytes, int], None]


class BlockPool:
    """Blocks ``0 .. num_blocks - 1``, each free or referenced, each in the prefix cache or not.

    ::

                     allocate                     free_blocks (last reference)
        free, empty ----------> referenced  -------------------------------------> free, cached: tail of the queue
             ^                      |  ^                                             |      |
             |                      |  +---------------------- touch ----------------+      |
             |                      +-- cache_block: its prefix can be found by hash        |
             +------------------------------------ allocate evicts from the head -----------+

    All operations are O(1) per block. Several blocks may hold the same prefix (two requests computed it at the same time);
    the index keeps all of them, and ``lookup`` returns the one cached first.

    Args:
        num_blocks: size of the pool, the null block included.
        has_null_block: whether block 0 is the null block, which is never allocated, touched or freed.
        on_removed: called with the hash and group of a prefix when the last block that holds it leaves the prefix cache.
    """

    def __init__(
        self, num_blocks: int, *, has_null_block: bool = True, on_removed: RemovedCallback | None = None
    ) -> None:
        if num_blocks < 1 + has_null_block:
            raise ValueError(f"a pool of {num_blocks} blocks has none to give")
        self._blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self._blocks[0].is_null = has_null_block
        self._free = FreeQueue(block for block in self._blocks if not block.is_null)
        # Prefix -> the blocks that hold it, oldest first. A dict serves as an ordered set.
        self._index: dict[tuple[bytes, int], dict[int, KVCacheBlock]] = {}
        self._on_removed = on_removed

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool, the null block included."""
        return len(self._blocks)

    @property
    def num_usable_blocks(self) -> int:
        """Number of blocks that can be allocated when none is referenced."""
        return len(self._blocks) - self._blocks[0].is_null

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks without references, cached ones included."""
        return len(self._free)

    @property
    def num_cached_prefixes(self) -> int:
        """Number of different prefixes that ``lookup`` can find."""
        return len(self._index)

    @property
    def null_block(self) -> KVCacheBlock:
        """The null block: the placeholder for positions whose KV is not kept."""
        assert self._blocks[0].is_null, "this pool was made without a null block"
        return self._blocks[0]

    def get_block(self, block_id: int) -> KVCacheBlock:
        """Return the block with that id. Raises ``IndexError`` if there is none."""
        if block_id < 0:
            raise IndexError(f"block {block_id} does not exist")
        return self._blocks[block_id]

    def allocate(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take ``num_blocks`` blocks from the head of the free queue, each with one reference; their KV is evicted.

        Raises:
            OutOfBlocksError: fewer are free; nothing was changed.
        """
        if num_blocks > len(self._free):
            raise OutOfBlocksError(num_blocks, len(self._free))
        taken = [self._free.popleft() for _ in range(num_blocks)]
        for block in taken:
            if block.block_hash is not None:
                self._forget(block)
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Iterable[KVCacheBlockView]) -> None:
        """Take one reference on each block; free ones leave the free queue.

        Raises:
            NullBlockError: the null block is among them; nothing was changed.
        """
        own = self._own(blocks, "touch")
        for block in own:
            if block.ref_cnt == 0:
                self._free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[KVCacheBlockView], *, evict_first: bool = False) -> None:
        """Give back one reference on each block, in order.

        Blocks whose count reaches zero go to the tail of the free queue in the order given, so the first is evicted first;
        with ``evict_first`` to its head, in the same order.

        Raises:
            BlockNotHeldError: a block is given back more often than it is referenced; nothing was changed.
            NullBlockError: the null block is among them; nothing was changed.
        """
        own = self._own(blocks, "free")
        self._check_held(own)
        for block in reversed(own) if evict_first else own:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if evict_first:
                    self._free.prepend(block)
                else:
                    self._free.append(block)

    def touch_ids(self, block_ids: Sequence[int]) -> None:
        """Do ``touch`` for the blocks with these ids. Raises ``IndexError`` if there is none with one of them."""
        self.touch([self.get_block(block_id) for block_id in block_ids])

    def free_ids(self, block_ids: Sequence[int]) -> None:
        """Do ``free_blocks`` for the blocks with these ids. Raises ``IndexError`` if there is none with one of them."""
        self.free_blocks([self.get_block(block_id) for block_id in block_ids])

    def lookup(self, block_hash: bytes, group_id: int) -> KVCacheBlock | None:
        """Return a block that holds the prefix ``block_hash`` for a group, or ``None``. Takes no reference."""
        holders = self._index.get((block_hash, group_id))
        return None if holders is None else next(iter(holders.values()))

    def contains(self, block_hash: bytes, group_id: int) -> bool:
        """Whether ``lookup`` would find a block."""
        return (block_hash, group_id) in self._index

    def cache_block(self, block: KVCacheBlock, block_hash: bytes, group_id: int) -> bool:
        """Let ``block``, which must be full and referenced, be found by its prefix from now on.

        Returns:
            ``True`` if the prefix is new to the cache; ``False`` if another block holds it already.
        """
        if block.is_null:
            raise NullBlockError("cache")
        assert block.ref_cnt > 0 and block.block_hash is None, f"{block} cannot enter the cache"
        block.block_hash, block.group_id = block_hash, group_id
        holders = self._index.setdefault((block_hash, group_id), {})
        holders[block.block_id] = block
        return len(holders) == 1

    def uncache_block(self, block: KVCacheBlock) -> None:
        """Take ``block`` out of the prefix cache, for instance because its KV is not what its hash says. No-op if not in it."""
        if block.block_hash is not None:
            self._forget(block)

    def iter_free_blocks(self, after_block: KVCacheBlockView | None = None) -> Iterator[KVCacheBlock]:
        """Walk the free queue in eviction order; see ``SchedulerContext.iter_free_blocks``."""
        return self._free.walk(None if after_block is None else self._blocks[after_block.block_id])

    def reset_cache(self) -> bool:
        """Forget every cached prefix. Return ``False``, and forget none, while a block is referenced."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        for block in self._blocks:
            if block.block_hash is not None:
                self._forget(block)
        return True

    def check(self) -> None:
        """Verify that nothing is lost or counted twice. Raises ``AssertionError`` naming the first block that is wrong.

        Walks the whole pool: for tests, simulations and idle moments.
        """
        free = {block.block_id for block in self._free.walk()}
        assert len(free) == len(self._free), "the free queue's length is wrong"
        for block in self._blocks:
            expected = block.ref_cnt == 0 and not block.is_null
            assert (block.block_id in free) == expected, f"{block} is {'' if expected else 'not '}meant to be free"
            assert block.ref_cnt >= 0, f"{block} has a negative count"
            if block.block_hash is not None:
                assert block.group_id is not None, f"{block} is cached without a group"
                holders = self._index.get((block.block_hash, block.group_id), {})
                assert holders.get(block.block_id) is block, f"{block} is cached but cannot be found"
        indexed = sum(len(holders) for holders in self._index.values())
        cached = sum(block.block_hash is not None for block in self._blocks)
        assert indexed == cached, f"{indexed} blocks indexed, {cached} cached"

    def _own(self, blocks: Iterable[KVCacheBlockView], operation: str) -> Sequence[KVCacheBlock]:
        own = [self._blocks[block.block_id] for block in blocks]
        if any(block.is_null for block in own):
            raise NullBlockError(operation)
        return own

    def _check_held(self, blocks: Sequence[KVCacheBlock]) -> None:
        if all(block.ref_cnt > 0 for block in blocks) and len(set(blocks)) == len(blocks):
            return
        for block, given_back in Counter(blocks).items():
            if given_back > block.ref_cnt:
                raise BlockNotHeldError(block.block_id, block.ref_cnt, given_back)

    def _forget(self, block: KVCacheBlock) -> None:
        assert block.block_hash is not None and block.group_id is not None
        key = (block.block_hash, block.group_id)
        holders = self._index[key]
        del holders[block.block_id]
        block.block_hash = block.group_id = None
        if not holders:
            del self._index[key]
            if self._on_removed is not None:
                self._on_removed(*key)


# --- prefixes in blocks -----------------------------------------------------------------------------------------------


DIGEST_BYTES = hashlib.sha256().digest_size
_ROOT_TAG = b"cargohold.prefix.v1"


def root_hash(*, salt: str | None = None, adapter: str | None = None) -> bytes:
    """Return the root hash, with which the chain of a prompt's hashes starts.

    Args:
        salt: separates prompts that must not share KV, such as those of different tenants.
        adapter: identity of the adapter that is added to the weights (a LoRA adapter's digest, say).

    ``None`` and the empty string are different.
    """
    digest = hashlib.sha256(_ROOT_TAG)
    for part in (salt, adapter):
        digest.update(b"\0" if part is None else _framed(part.encode()))
    return digest.digest()


def hash_block(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """Return the hash of one block: a digest of its parent's hash, its tokens, and ``extra``.

    Args:
        parent: hash of the block before, or the root hash.
        token_ids: the block's tokens, each in ``[0, 2**32)``.
        extra: anything else that changes this block's KV.

    Raises:
        OverflowError: a token id does not fit.
    """
    digest = hashlib.sha256(parent)
    digest.update(array("I", token_ids).tobytes())
    if extra:
        digest.update(_framed(extra))
    return digest.digest()


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], block_tokens: int, root: bytes) -> None:
    """Append to ``hashes`` the hash of every full block of ``token_ids`` that is not in it yet.

    Mutates ``hashes`` only. ``token_ids`` are all tokens from the start of the prompt.
    """
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_tokens, len(token_ids) - block_tokens + 1, block_tokens):
        parent = hash_block(parent, token_ids[start : start + block_tokens])
        hashes.append(parent)


def _framed(data: bytes) -> bytes:
    # A length in front keeps ("ab", "c") and ("a", "bc") apart.
    return b"\1" + len(data).to_bytes(8, "little") + data


ABSENT: Final = 0
READY: Final = 1
NOT_YET: Final = 2
"""State of a unit that was asked for and of which it is not known yet whether it is present."""

_ABSENT = bytes([ABSENT])
_READY = bytes([READY])
_NOT_YET = bytes([NOT_YET])
_NOT_YET_IS_ABSENT = bytes.maketrans(_NOT_YET, _ABSENT)


class UnitStates(Protocol):
    """Which units of one group are present."""

    def run(self, first: int, end: int) -> bytes:
        """Return one state byte per unit in ``[first, end)``, up to the first ``ABSENT`` one, which may be left out."""
        ...

    def window(self, first: int, end: int) -> bytes:
        """Return one state byte for each unit in ``[first, end)``."""
        ...


class GroupUnits(NamedTuple):
    """One group's units.

    Attributes:
        group: the group.
        unit_tokens: tokens per unit; a multiple of ``group.block_tokens``.
        states: tells which of them are present.
    """

    group: KVCacheGroup
    unit_tokens: int
    states: UnitStates


class PrefixHit(NamedTuple):
    """How far a prefix can be reused.

    Attributes:
        num_tokens: length of the usable prefix, computed tokens included; never less than these.
        undecided: whether a unit answered ``NOT_YET``: then the length may still change, so ask again.
    """

    num_tokens: int
    undecided: bool


def longest_hit(
    groups: Sequence[GroupUnits], num_tokens: int, num_computed_tokens: int = 0, limit_tokens: int | None = None
) -> PrefixHit:
    """Return the longest prefix of a request that is usable for all groups.

    Units that end at or before ``num_computed_tokens`` are taken as present without being asked for. If nothing beyond them
    is usable, the length is ``num_computed_tokens``, which need not be a multiple of any unit.

    A prefix of which nothing is present is none, also where no later query reads any of it: so it is at some places if chunked
    local attention is alone.

    Args:
        groups: the groups' units.
        num_tokens: number of tokens of the request. The last token is computed even if all are present, for its logits, so
            the units that it reads are always required.
        num_computed_tokens: number of leading tokens that are present already.
        limit_tokens: maximum length of the prefix; ``num_tokens`` if ``None``.
    """
    step_tokens = lcm(*[lcm(units.unit_tokens, units.group.hit_tokens) for units in groups])
    needs_end = not any(_always_reads_back(units.group) for units in groups)
    prefixes = [
        _FullAttention(units, num_computed_tokens)
        if units.group.kind is AttentionKind.FULL
        else _Windowed(units, step_tokens, num_tokens - 1, num_computed_tokens, needs_end=needs_end)
        for units in groups
    ]
    length = num_tokens if limit_tokens is None else limit_tokens
    if len(prefixes) == 1 and step_tokens == groups[0].unit_tokens and length > num_computed_tokens:
        length = prefixes[0].shorten(length)  # what one group can use, nobody makes shorter
        return PrefixHit(max(length, num_computed_tokens), prefixes[0].undecided)
    while length > num_computed_tokens:
        before = length
        for prefix in prefixes:
            length = prefix.shorten(length)
        length -= length % step_tokens
        if length == before:
            break
    return PrefixHit(max(length, num_computed_tokens), any(prefix.undecided for prefix in prefixes))


def _always_reads_back(group: KVCacheGroup) -> bool:
    """Whether each query but the first reads what the token before it has left."""
    return group.kind is not AttentionKind.CHUNKED_LOCAL and group.window_tokens != 1


class _FullAttention:
    """The usable prefix of a group whose queries read all units before them."""

    def __init__(self, units: GroupUnits, num_computed_tokens: int) -> None:
        self._units = units
        self._num_local = num_computed_tokens // units.unit_tokens
        self._longest: int | None = None
        self.undecided = False

    def shorten(self, length: int) -> int:
        """Return the length of the longest prefix of at most ``length`` tokens usable for this group, in whole units."""
        unit_tokens = self._units.unit_tokens
        if self._longest is None:
            run = self._units.states.run(self._num_local, length // unit_tokens)
            absent_at = run.find(_ABSENT)
            num_present = len(run) if absent_at < 0 else absent_at
            # A "not yet" counts as present for now, so that units behind it are asked for as well.
            self.undecided = _NOT_YET in run[:num_present]
            self._longest = (self._num_local + num_present) * unit_tokens
        return min(length, self._longest) // unit_tokens * unit_tokens


class _Windowed:
    """The usable prefix of a group whose queries read the last units only. No unit is asked for twice.

    It ends at a multiple of ``step_tokens``. With ``needs_end``, its last unit must be there even if no query reads it.
    """

    def __init__(
        self, units: GroupUnits, step_tokens: int, last_query: int, num_computed_tokens: int, *, needs_end: bool
    ) -> None:
        self._units = units
        self._step = step_tokens // units.unit_tokens
        self._needs_end = needs_end
        self._last_query = last_query
        self._num_local = num_computed_tokens // units.unit_tokens
        # States of consecutive units from _known_from on, asked for from the right.
        self._known = b""
        self._known_from = 0
        self.undecided = False

    def shorten(self, length: int) -> int:
        """Return the length of the longest prefix of at most ``length`` tokens usable for this group, in whole units."""
        unit_tokens = self._units.unit_tokens
        end = length // unit_tokens // self._step * self._step
        while end > 0:
            next_query = min(end * unit_tokens, self._last_query)
            first = self._units.group.num_skipped_tokens(next_query) // unit_tokens
            if self._needs_end:
                first = min(first, end - 1)
            absent_at = self._last_absent(max(first, self._num_local), end)
            if absent_at is None:
                return end * unit_tokens
            # Any shorter prefix that still reaches beyond the absent unit needs it as well: the first unit that a prefix needs
            # never moves right when the prefix gets shorter.
            end = absent_at // self._step * self._step
        return 0

    def _last_absent(self, first: int, end: int) -> int | None:
        if first >= end:
            return None
        if not self._known:
            self._known_from = end
        if first < self._known_from:
            states = self._units.states.window(first, self._known_from)
            self.undecided |= _NOT_YET in states
            self._known = states.translate(_NOT_YET_IS_ABSENT) + self._known
            self._known_from = first
        at = self._known.rfind(_ABSENT, first - self._known_from, end - self._known_from)
        return None if at < 0 else at + self._known_from
