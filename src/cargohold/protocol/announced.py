"""What a connector has announced of its tiers, so that it can be taken back when the connector is turned off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cargohold.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, Locality


class AnnouncedBlocks:
    """The index that somebody has who follows a connector's events: of each place, how often each block is there."""

    def __init__(self) -> None:
        # By medium, whose it is, and group.
        self._held: dict[tuple[str, Locality | None, int], Counter[bytes]] = {}

    def follow(self, events: Iterable[KVEvent]) -> None:
        """Take in events that are passed on."""
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
        """Events after which nothing is left of what was announced."""
        held, self._held = self._held, {}
        return [
            BlockRemoved(tuple(blocks.elements()), group, medium, locality)
            for (medium, locality, group), blocks in held.items()
            if blocks
        ]
