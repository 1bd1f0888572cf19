"""What the device pool holds, and what it has just lost.

An engine tells no connector what it evicts. So before blocks are allocated it is noted what the next victims hold, and when the
step is planned, which of them hold it no more. Their bytes are there until this step's forward pass::

    step n planned         next look-ups     blocks allocated      step n + 1 planned            forward pass of n + 1
    | watch next victims   | watch more      | (their KV is lost)  | take_lost: these were       | overwrites them
    |                      |                 |                     | evicted since: copied now   |

Only what was seen unchanged at the last look is known for sure to be there still; everything else counts as gone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from operator import eq

from cargohold.cache.manager import OffloadKey, offload_key
from cargohold.protocol import NULL_BLOCK_ID, SchedulerContext


class DeviceChunks:
    """The chunks of one block each that the device pool holds, as far as the connector has noted them.

    Args:
        context: the engine's block pool.
        num_groups: number of KV-cache groups.
        namespace: the namespace of the chunks' keys.
    """

    def __init__(self, context: SchedulerContext, num_groups: int, namespace: int = 0) -> None:
        self._context = context
        self._block_of: dict[OffloadKey, int] = {}
        self._key_in: dict[int, OffloadKey] = {}
        # What each of the blocks that may be evicted before the next look held at the last one.
        self._watched: dict[int, Hashable] = {}
        self._num_groups = num_groups
        self._suffixes: Sequence[bytes] = ()
        self.clear(namespace)

    def __contains__(self, key: object) -> bool:
        return key in self._block_of

    def note(self, keys: Sequence[OffloadKey], block_ids: Sequence[int]) -> list[OffloadKey]:
        """Note which blocks hold chunks, or will when the step is over; return what they are known to have held before."""
        before = zip(map(self._key_in.get, block_ids), keys, block_ids, strict=True)
        gone = [old for old, key, at in before if old is not None and old != key and self._block_of.get(old) == at]
        gone = list(dict.fromkeys(gone))  # requests may share a block
        for key in gone:
            del self._block_of[key]
        self._block_of.update(zip(keys, block_ids, strict=True))
        self._key_in.update(zip(block_ids, keys, strict=True))
        return gone

    def holds(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return which of the chunks the device holds now."""
        held = self._keys_in([self._block_of.get(key, NULL_BLOCK_ID) for key in keys])
        return list(map(eq, held, keys))

    def blocks_of(self, keys: Sequence[OffloadKey]) -> dict[OffloadKey, int]:
        """Return which blocks hold those of the chunks that the device holds now."""
        return {key: self._block_of[key] for key, is_held in zip(keys, self.holds(keys), strict=True) if is_held}

    def besides(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return all other chunks that have been noted."""
        excepted = set(keys)
        return [key for key in self._block_of if key not in excepted]

    def num_held(self, keys: Sequence[OffloadKey], block_ids: Sequence[int]) -> int:
        """Return how many leading chunks these blocks hold now, one each; null blocks count as if they did."""
        at = 0
        for at, (key, block_id, held) in enumerate(zip(keys, block_ids, self._keys_in(block_ids), strict=False), 1):
            if block_id != NULL_BLOCK_ID and held != key:
                return at - 1
        return at

    def watch(self, num_blocks: int) -> None:
        """Note what so many blocks hold that are evicted next, and nothing else."""
        self._watched.clear()
        self.watch_more(num_blocks)

    def watch_more(self, num_blocks: int) -> None:
        """Note what so many blocks hold that are evicted next, besides those that have been noted."""
        self._watch(self._context.next_victims(num_blocks))

    def watch_ended(self, block_ids: Sequence[int]) -> None:
        """Note what the blocks of a request hold that ends now: where hardly any is free, they may be evicted at once."""
        self._watch(block_ids[::-1])  # the engine evicts the last ones first

    def _watch(self, block_ids: Sequence[int]) -> None:
        noted = zip(block_ids, self._context.contents(block_ids), strict=True)
        self._watched |= {block_id: content for block_id, content in noted if block_id not in self._watched}

    def take_lost(self) -> dict[OffloadKey, int]:
        """Return what was evicted since the last look, in order: by chunk, the block where its bytes still are."""
        watched = self._watched
        now = self._context.contents(tuple(watched))
        if now == [*watched.values()]:
            return {}
        self._watched = {}
        changed = [at for at, content in zip(watched, now, strict=True) if content != watched[at]]
        before = self._keys([watched[at] for at in changed])
        gone = {key: at for key, at in zip(before, changed, strict=True) if key is not None}
        elsewhere = self.blocks_of([key for key, at in gone.items() if self._block_of.get(key, at) != at])
        lost = {key: at for key, at in gone.items() if key not in elsewhere}
        for key in lost:
            self._block_of.pop(key, None)
        return lost

    def next_lost(self, num_blocks: int) -> dict[OffloadKey, int]:
        """Return what so many blocks hold that are evicted next, the first one first, and in which block."""
        victims = self._context.next_victims(num_blocks)
        return {key: block_id for key, block_id in zip(self._keys_in(victims), victims, strict=True) if key is not None}

    def clear(self, namespace: int) -> list[OffloadKey]:
        """Forget all chunks, and return them. Chunks have keys of this namespace from now on."""
        keys, self._block_of, self._key_in = list(self._block_of), {}, {}
        self._watched.clear()
        self._suffixes = [offload_key(b"", group, namespace) for group in range(self._num_groups)]
        return keys

    def _keys_in(self, block_ids: Sequence[int]) -> list[OffloadKey | None]:
        """Return which chunks these blocks hold now."""
        return self._keys(self._context.contents(block_ids))

    def _keys(self, contents: Sequence[Hashable]) -> list[OffloadKey | None]:
        """Return which chunks are held by blocks with these contents."""
        prefixes, suffixes = self._context.prefixes_of(contents), self._suffixes
        return [None if prefix is None else prefix[0] + suffixes[prefix[1]] for prefix in prefixes]
