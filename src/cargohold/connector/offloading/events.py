"""KV events of a tier: the manager's events, completed with what a follower needs to know about each chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from cargohold.offload.keys import ChunkKeys, split_key
from cargohold.offload.manager.base import ChunksStored, ManagerEvent, OffloadKey
from cargohold.protocol import BlockRemoved, BlockStored, KVEvent, Locality, RequestView


class EventSource(Protocol):
    """A manager, or anything else that knows which chunks a tier holds."""

    def take_events(self) -> Sequence[ManagerEvent]:
        """Return the events of chunks that became ready or were removed since the last call, in order."""
        ...


class TierEvents:
    """Translates a manager's events into KV events.

    A manager knows only keys. A chunk's tokens, parent and extra keys are remembered here from the moment its store begins
    until it is announced. The same chunk may come and go several times between two calls of ``take``, so the manager's events
    are translated before a store begins or fails.

    Args:
        source: the manager whose events are translated; it must record them.
        medium: name of the medium.
        chunk_tokens: tokens per chunk, per group.
        locality: whether the medium is local or shared; ``None`` if its name implies it.
    """

    def __init__(
        self, source: EventSource, medium: str, chunk_tokens: Sequence[int], locality: Locality | None = None
    ) -> None:
        self._source = source
        self._translated: list[KVEvent] = []
        self._medium = medium
        self._locality = locality
        self._chunk_tokens = chunk_tokens
        # Chunks that are being stored, each with the event that will announce it.
        self._pending: dict[OffloadKey, BlockStored] = {}

    def note_store(self, request: RequestView, keys: ChunkKeys, stored: Sequence[OffloadKey], first_chunk: int) -> None:
        """Remember the contents of chunks whose store begins.

        Args:
            request: the request whose chunks they are.
            keys: its keys in the group.
            stored: the chunks being stored, in prefix order.
            first_chunk: number of the chunk at which to begin to search for them: at or before the first of them.
        """
        self._translate()
        size = keys.chunk_tokens
        at = first_chunk
        for key in stored:
            while keys.keys[at] != key:
                at += 1
            start, end = at * size, (at + 1) * size
            self._pending[key] = BlockStored(
                block_hashes=(split_key(key)[0],),
                parent_block_hash=split_key(keys.keys[at - 1])[0] if at else None,
                # Token ids may be numpy integers, which no publisher can encode.
                token_ids=tuple(map(int, request.all_token_ids[start:end])),
                block_tokens=size,
                group=keys.group.index,
                medium=self._medium,
                adapter=request.adapter,
                extra_keys=(request.extra_keys(start, end),),
                locality=self._locality,
            )

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Forget chunks whose store has failed."""
        self._translate()
        for key in keys:
            self._pending.pop(key, None)

    def take(self) -> list[KVEvent]:
        """Return the KV events since the last call, in order."""
        self._translate()
        events, self._translated = self._translated, []
        return events

    def _translate(self) -> None:
        for event in self._source.take_events():
            self._translated += (
                self._stored(event.keys) if isinstance(event, ChunksStored) else self._removed(event.keys)
            )

    def _stored(self, keys: Sequence[OffloadKey]) -> Iterator[BlockStored]:
        for key in keys:
            block_hash, group = split_key(key)
            size = self._chunk_tokens[group]
            unknown = BlockStored((block_hash,), None, (), size, group, self._medium, locality=self._locality)
            yield self._pending.pop(key, unknown)

    def _removed(self, keys: Sequence[OffloadKey]) -> Iterator[BlockRemoved]:
        # One event per group: a tier whose loads are suspended withdraws all its chunks at once.
        of_group: dict[int, list[bytes]] = {}
        for key in keys:
            block_hash, group = split_key(key)
            of_group.setdefault(group, []).append(block_hash)
        for group, hashes in of_group.items():
            yield BlockRemoved(tuple(hashes), group, self._medium, self._locality)
