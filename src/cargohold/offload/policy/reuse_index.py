"""The policy made for prefixes: evicts the leaf that is worth least, and admits only chunks that are worth no less."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cargohold.offload.policy.absent_chunks import AbsentChunks, Tags, Times, Uses
from cargohold.offload.policy.base import NO_SLOT, BusyCounts, Offer, ReplacementPolicy, Room, Slots, joined
from cargohold.offload.policy.key_hash import KeyHash
from cargohold.offload.policy.leaf_queue import NEVER, LeafQueue
from cargohold.offload.policy.prefix_tree import PrefixTree
from cargohold.offload.policy.reuse_model import ReuseModel

Classes = npt.NDArray[np.uint8]

_MAX_USES: Final = 255

# A class combines a level (1, 2-3, 4-7, 8 or more uses), whether the chunk was the last of its request, and a detail: for a new
# chunk, how often the prefix that it continues was used; for others, the time between the last two uses, by powers of four.
_NUM_LEVELS: Final = 4
_DETAILS: Final = 10
_LAST: Final = _DETAILS
_PER_LEVEL: Final = 2 * _DETAILS
_LEVEL_OF_USES: Final = np.minimum(np.log2(np.maximum(np.arange(_MAX_USES + 1), 1)), _NUM_LEVELS - 1).astype(np.uint8)
_CONTINUES_OFTEN: Final = 3

_FEW: Final = 8
"""Maximum number of offers of one chunk each that are looked at one by one, which is faster for so few."""


class _Newcomers(NamedTuple):
    """What is known about chunks on offer; the arrays have all offers' chunks in order.

    Attributes:
        offers: the offers.
        tags: tags of the chunks.
        uses: number of uses of each, this one included.
        classes: class of each if it gets in.
    """

    offers: Sequence[Offer]
    tags: Tags
    uses: Uses
    classes: Classes


_NOBODY: Final = _Newcomers((), np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.uint8))


class ReuseIndexPolicy(ReplacementPolicy):
    """Keeps the chunks that bring most reuse for the time that they take a slot.

    Each chunk's worth is its reuse index, learned from the traffic (see ``ReuseModel``). It depends on how often the chunk was
    used, whether it was the last of its request, how its use continues others, and its age. Only leaves are evicted: chunks
    that no other chunk in the tier follows. So there are never holes, and a prefix is worth at least as much as its best
    continuation. A chunk that is worth less than the victim that it needs is not stored, nor are those that follow it: one-shot
    prompts do not flush the tier, and are not written. The uses of evicted and refused chunks are remembered for a while. After
    ``admit_all`` the policy refuses no chunk, and only chooses victims.

    Until it has learned something, it behaves like LRU.

    Args:
        capacity: number of slots of the tier.
    """

    name: ClassVar[str] = "reuse-index"
    evicts_ends_alone: ClassVar[bool] = True

    def __init__(self, capacity: int) -> None:
        self._now = 0
        self._admits_all = False
        self._last_uses: Times = np.full(capacity, NEVER, dtype=np.int64)
        self._uses: Uses = np.full(capacity, 0, dtype=np.uint8)
        self._classes: Classes = np.full(capacity, 0, dtype=np.uint8)
        self._tags: Tags = np.full(capacity, 0, dtype=np.uint32)
        # The same memory: single elements are read and written three times faster this way.
        self._uses_of, self._class_of = self._uses.data, self._classes.data
        self._tag_of = KeyHash(seed=0)
        self._tree = PrefixTree(capacity)
        self._model = ReuseModel(_NUM_LEVELS * _PER_LEVEL, _DETAILS, capacity)
        self._leaves = LeafQueue(self._last_uses, self._classes, self._tree, self._model.index)
        self._absent = AbsentChunks(capacity)
        # The chunks for which room was made last: they come in next.
        self._newcomers = _NOBODY

    def admit_all(self) -> None:  # noqa: D102
        self._admits_all = True

    def touch(self, slots: Slots, *, is_whole: bool) -> None:  # noqa: D102
        if not len(slots):
            return
        uses = _one_more(self._uses[slots])
        classes = _classes_of_known(uses, self._now - self._last_uses[slots])
        if is_whole:
            classes[-1] += _LAST
        self._uses[slots] = uses
        self._classes[slots] = classes
        self._last_uses[slots] = self._now
        self._observe(self._tags[slots], classes)

    def make_room(self, offers: Sequence[Offer], num_slots: Sequence[int], busy: BusyCounts) -> list[Room]:  # noqa: D102
        self._learn()
        newcomers = self._newcomers = self._meet(offers)
        worth = self._model.index[newcomers.classes, 0]
        if self._admits_all:
            worth = np.full(len(worth), np.inf)
        ends = accumulate(len(offer.keys) for offer in offers)
        missing = (slice(end - count, end) for end, count in zip(ends, num_slots, strict=True))
        rooms, victims, last_uses = self._leaves.take(worth, missing, self._now, busy)
        self._absent.remember(self._tags[victims], self._uses[victims], last_uses)
        return rooms

    def add(self, offers: Sequence[Offer], slots: Sequence[Slots]) -> None:  # noqa: D102
        newcomers = self._newcomers
        if newcomers.offers is not offers:
            newcomers = self._meet(offers)
        for offer, of_offer in zip(offers, slots, strict=True):
            if len(of_offer):
                self._tree.link(of_offer, offer.parent)
        self._settle(slots, newcomers)
        for offer in offers:
            self._go_on(offer.parent)
        self._observe(newcomers.tags, newcomers.classes)

    def drop(self, slots: Slots) -> None:  # noqa: D102
        self._tree.cut(slots)
        self._last_uses[slots] = NEVER

    def clear(self) -> None:  # noqa: D102
        self._tree.clear()
        self._last_uses[:] = NEVER

    def check(self, slots: Slots) -> None:  # noqa: D102
        assert np.array_equal((self._last_uses != NEVER).nonzero()[0], np.sort(slots)), "not the slots in use"
        self._tree.check(slots)

    def _learn(self) -> None:
        """Update the model and the worth of leaves from the traffic, if it is time to. Mutates the model and the queue."""
        if self._model.fit(self._now):
            self._leaves.use_index(self._model.index)

    def _settle(self, slots: Sequence[Slots], newcomers: _Newcomers) -> None:
        """Set what is known about the leading chunks of each offer, which got ``slots``; remember the others as absent."""
        _, tags, uses, classes = newcomers
        places = joined(slots)
        if len(places) < len(tags):
            is_placed = np.concatenate(
                [
                    np.arange(len(offer.keys)) < len(of_offer)
                    for offer, of_offer in zip(newcomers.offers, slots, strict=True)
                ]
            )
            self._absent.remember(tags[~is_placed], uses[~is_placed], np.array([self._now]))
            tags, uses, classes = tags[is_placed], uses[is_placed], classes[is_placed]
        self._last_uses[places] = self._now
        self._uses[places] = uses
        self._classes[places] = classes
        self._tags[places] = tags

    def _go_on(self, parent: int) -> None:
        """Change the class of the chunk in ``parent``: it is not its request's last any more, because the request goes on."""
        if parent != NO_SLOT and self._class_of[parent] % _PER_LEVEL >= _LAST:
            self._class_of[parent] -= _LAST

    def _meet(self, offers: Sequence[Offer]) -> _Newcomers:
        """Find out what is known about chunks on offer. Changes nothing."""
        if len(offers) <= _FEW and all(len(offer.keys) == 1 for offer in offers):
            return self._meet_few(offers)
        return self._meet_many(offers)

    def _meet_many(self, offers: Sequence[Offer]) -> _Newcomers:
        if len(offers) == 1:  # while a prompt is computed; in half of the time
            ((keys, parent, _),) = offers
            classes: Classes = np.full(len(keys), self._detail_behind(parent), dtype=np.uint8)
            tags, uses, classes = self._recognise(keys, classes)
            classes[-1] += _LAST
            return _Newcomers(offers, tags, uses, classes)
        keys = [key for offer in offers for key in offer.keys]
        lengths = [len(offer.keys) for offer in offers]
        details = np.array([self._detail_behind(offer.parent) for offer in offers], dtype=np.uint8)
        tags, uses, classes = self._recognise(keys, details.repeat(lengths))
        classes[np.cumsum(lengths) - 1] += np.uint8(_LAST)
        return _Newcomers(offers, tags, uses, classes)

    def _recognise(self, keys: Sequence[bytes], classes: Classes) -> tuple[Tags, Uses, Classes]:
        """Return tags, uses and future classes of chunks. Mutates ``classes``, which are those of chunks never seen."""
        tags = self._tag_of(keys)
        uses: Uses = np.full(len(keys), 1, dtype=np.uint8)
        if not self._absent.is_empty:
            known, uses_before, ages = self._absent.recall(tags, self._now)
            if len(known):
                uses[known] = _one_more(uses_before)
                classes[known] = _classes_of_known(uses[known], ages)
        return tags, uses, classes

    def _meet_few(self, offers: Sequence[Offer]) -> _Newcomers:
        """Do the same as ``_meet_many`` for a few offers of one chunk each, in a third of the time.

        Such offers are usual while requests generate.
        """
        tags = [self._tag_of.of(offer.keys[0]) for offer in offers]
        uses, classes = [], []
        for offer, tag in zip(offers, tags, strict=True):
            uses_before, age = (0, 0) if self._absent.is_empty else self._absent.recall_one(tag, self._now)
            uses.append(min(uses_before + 1, _MAX_USES))
            if uses_before:
                detail = min((max(age, 1).bit_length() + 1) // 2, _DETAILS - 1)
                chunk_class = int(_LEVEL_OF_USES[uses[-1]]) * _PER_LEVEL + detail
            else:
                chunk_class = self._detail_behind(offer.parent)
            classes.append(chunk_class + _LAST)
        return _Newcomers(offers, np.array(tags, np.uint32), np.array(uses, np.uint8), np.array(classes, np.uint8))

    def _detail_behind(self, parent: int) -> int:
        """Return the detail of the class of new chunks behind the chunk in slot ``parent``."""
        if parent == NO_SLOT:
            return 0
        uses = self._uses_of[parent]
        if uses == 1:  # the same request goes on, whose chunks come in parts
            return self._class_of[parent] % _DETAILS
        return min((uses.bit_length() + 1) // 2, _CONTINUES_OFTEN)

    def _observe(self, tags: Tags, classes: Classes) -> None:
        """Record uses of chunks in the model, and advance the time by their number."""
        sampled = (tags < self._model.sample_end).nonzero()[0]
        if len(sampled):
            self._model.observe(tags[sampled], classes[sampled], self._now)
        self._now += len(tags)


def _one_more(uses: Uses) -> Uses:
    more: Uses = np.minimum(uses, _MAX_USES - 1) + np.uint8(1)
    return more


def _classes_of_known(uses: Uses, ages: Times) -> Classes:
    """Return classes of chunks with ``uses`` uses, the last but one ``ages`` ago, that are not the last of a request."""
    # frexp gives the number of bits of an integer.
    details = np.minimum((np.frexp(np.maximum(ages, 1))[1] + 1) // 2, _DETAILS - 1)
    classes: Classes = _LEVEL_OF_USES[uses] * np.uint8(_PER_LEVEL) + details.astype(np.uint8)
    return classes
