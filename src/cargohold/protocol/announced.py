"""Which blocks a connector has announced as stored, so that they can be announced as removed when it is turned off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cargohold.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, Locality


class AnnouncedBlocks:
    """The index that a follower of a connector's events has built: how often each block hash is stored, and where."""

    def __init__(self) -> None:
        # Counts per block hash, by medium, locality and group.
        self._held: dict[tuple[str, Locality | None, int], Counter[bytes]] = {}

    def follow(self, events: Iterable[KVEvent]) -> None:
        """Update the index with events that the connector's guard passes on."""
        for event in events:
            match event:
                case AllBlocksCleared():
                    self._held = {place: held for place, held in self._held.items() if place[0] != event.medium}
                case BlockStored():
                    self._held.setdefault((event.medium, event.locality, event.group), Counter()).update(
                        event.block_hashes
                    )
                case BlockRemoved():
                    held = self._held.setdefault((event.medium, event.locality, event.group), Counter())
                    for block_hash in event.block_hashes:
                        if held[block_hash] > 1:
                            held[block_hash] -= 1
                        else:
                            del held[block_hash]

    def withdraw(self) -> list[BlockRemoved]:
        """Empty the index; return the events that remove everything in it from a follower's index."""
        held, self._held = self._held, {}
        return [
            BlockRemoved(tuple(blocks.elements()), group, medium, locality)
            for (medium, locality, group), blocks in held.items()
            if blocks
        ]
