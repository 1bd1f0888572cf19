"""What the device pool holds, and what it has just lost.

An engine tells no connector what it evicts. So before blocks are allocated it is noted what the next victims hold, and when the
step is planned, which of them hold it no more. Their bytes are there until this step's forward pass::

    step n planned         next look-ups     blocks allocated      step n + 1 planned            forward pass of n + 1
    | watch next victims   | watch more      | (their KV is lost)  | take_lost: these were       | overwrites them
    |                      |                 |                     | evicted since: copied now   |

Only what was seen unchanged at the last look is known for sure to be there still; everything else counts as gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeAlias

from cargohold.cache.manager import OffloadKey, offload_key, split_key
from cargohold.protocol import NULL_BLOCK_ID, KVCacheBlockView, SchedulerContext

_Content: TypeAlias = tuple[bytes | None, int | None]


class DeviceChunks:
    """The chunks of one block each that the device pool holds, as far as the connector has noted them.

    Args:
        context: the engine's block pool.
    """

    def __init__(self, context: SchedulerContext) -> None:
        self._context = context
        self._block_of: dict[OffloadKey, int] = {}
        self._key_in: dict[int, OffloadKey] = {}
        # What each of the next victims held when it was looked at; how many blocks of the queue that were, if they are still
        # the next ones.
        self._watched: dict[int, tuple[KVCacheBlockView, _Content]] = {}
        self._num_watched = 0
        self.namespace = 0

    def __contains__(self, key: object) -> bool:
        return key in self._block_of

    def note(self, keys: Sequence[OffloadKey], block_ids: Sequence[int]) -> list[OffloadKey]:
        """Note which blocks hold chunks, or will when the step is over; return what they are known to have held before."""
        before = zip(map(self._key_in.get, block_ids), keys, block_ids, strict=True)
        gone = [old for old, key, at in before if old is not None and old != key and self._block_of.get(old) == at]
        for key in gone:
            del self._block_of[key]
        self._block_of.update(zip(keys, block_ids, strict=True))
        self._key_in.update(zip(block_ids, keys, strict=True))
        return gone

    def holds(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return which of the chunks the device holds now."""
        return [self._holds(key) for key in keys]

    def blocks_of(self, keys: Iterable[OffloadKey]) -> dict[OffloadKey, int]:
        """Return which blocks hold those of the chunks that the device holds now."""
        return {key: self._block_of[key] for key in keys if self._holds(key)}

    def besides(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return all other chunks that have been noted."""
        excepted = set(keys)
        return [key for key in self._block_of if key not in excepted]

    def num_held(self, keys: Sequence[OffloadKey], block_ids: Sequence[int]) -> int:
        """Return how many leading chunks these blocks hold now, one each; null blocks count as if they did."""
        at, contents = 0, map(self._content, map(self._context.get_block, block_ids))
        for at, (key, block_id, content) in enumerate(zip(keys, block_ids, contents, strict=False), 1):
            if block_id != NULL_BLOCK_ID and content != split_key(key):
                return at - 1
        return at

    def _holds(self, key: OffloadKey) -> bool:
        block_id = self._block_of.get(key)
        return block_id is not None and self._content(self._context.get_block(block_id)) == split_key(key)

    def watch(self, num_blocks: int) -> None:
        """Note what so many blocks hold that are evicted next."""
        # Another connector may have put blocks back in front.
        if num_blocks > self._num_watched or (
            (first := next(self._context.iter_free_blocks(), None)) and first.block_id not in self._watched
        ):
            blocks = list(islice(self._context.iter_free_blocks(), num_blocks))
            # Fewer if no more are free: those that are given back next are to be seen, too.
            self._num_watched = len(blocks)
            self._watch(blocks)

    def watch_more(self, num_blocks: int) -> None:
        """Note what so many blocks hold that are evicted next, besides those that have been noted."""
        self._num_watched = 0
        self._watch(islice(self._context.iter_free_blocks(), num_blocks))

    def watch_ended(self, block_ids: Sequence[int]) -> None:
        """Note what the blocks of a request hold that ends now: where hardly any is free, they may be evicted at once."""
        self._num_watched = 0  # blocks that it has hit are no next ones any more
        self._watch(map(self._context.get_block, block_ids))

    def _watch(self, blocks: Iterable[KVCacheBlockView]) -> None:
        """Note what blocks hold; even if that is nothing, because then the victims after them are next once they are used."""
        watched = self._watched
        for block in blocks:
            if block.block_id not in watched:
                watched[block.block_id] = block, (block.block_hash, block.group_id)

    def take_lost(self) -> dict[OffloadKey, int]:
        """Return what was evicted since the last look, in order: by chunk, the block where its bytes still are."""
        watched = self._watched
        changed = [at for at, (of, content) in watched.items() if (of.block_hash, of.group_id) != content]
        if not changed and not sum([block.ref_cnt for block, _ in watched.values()]):
            return {}
        self._watched, self._num_watched = {}, 0
        gone = {key: at for at in changed if (key := self._key(watched[at][1])) is not None}
        lost = {key: at for key, at in gone.items() if self._block_of.get(key) == at or not self._holds(key)}
        for key in lost:
            self._block_of.pop(key, None)
        return lost

    def next_lost(self, num_blocks: int) -> Iterator[tuple[OffloadKey, int]]:
        """Yield what so many blocks hold that are evicted next, the first one first."""
        for block in islice(self._context.iter_free_blocks(), num_blocks):
            if (key := self._key(self._content(block))) is not None:
                yield key, block.block_id

    def clear(self, namespace: int) -> list[OffloadKey]:
        """Forget all chunks, and return them. Chunks have keys of this namespace from now on."""
        keys, self._block_of, self._key_in = list(self._block_of), {}, {}
        self._watched.clear()
        self._num_watched, self.namespace = 0, namespace
        return keys

    def _key(self, content: _Content) -> OffloadKey | None:
        block_hash, group = content
        return None if block_hash is None or group is None else offload_key(block_hash, group, self.namespace)

    @staticmethod
    def _content(block: KVCacheBlockView) -> _Content:
        return block.block_hash, block.group_id
