"""The policy made for prefixes: evict the leaf that is worth least, and admit only what is worth more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cargohold.offload.policy.absent_chunks import AbsentChunks, Tags, Times, Uses
from cargohold.offload.policy.base import NO_SLOT, BusyCounts, Offer, ReplacementPolicy, Room, Slots
from cargohold.offload.policy.key_hash import KeyHash
from cargohold.offload.policy.leaf_queue import NEVER, LeafQueue
from cargohold.offload.policy.prefix_tree import PrefixTree
from cargohold.offload.policy.reuse_model import ReuseModel

Classes = npt.NDArray[np.uint8]

_MAX_USES: Final = 255

# A class is a level (1, 2-3, 4-7, 8 or more uses), whether it was the last chunk of its request, and a detail: for a new
# chunk, how often the prefix was used that it continues; for others, the time between the last two uses, by powers of four.
_NUM_LEVELS: Final = 4
_DETAILS: Final = 10
_LAST: Final = _DETAILS
_PER_LEVEL: Final = 2 * _DETAILS
_LEVEL_OF_USES: Final = np.minimum(np.log2(np.maximum(np.arange(_MAX_USES + 1), 1)), _NUM_LEVELS - 1).astype(np.uint8)
_CONTINUES_OFTEN: Final = 3


class _Newcomers(NamedTuple):
    """What is known of chunks on offer.

    Attributes:
        keys: the offer's.
        tags: theirs.
        uses: theirs, this one included.
        classes: what they will be if they get in.
    """

    keys: Sequence[bytes]
    tags: Tags
    uses: Uses
    classes: Classes


class ReuseIndexPolicy(ReplacementPolicy):
    """Keeps the chunks that bring most reuse for the time they take a slot.

    Each chunk's worth is its reuse index, learned from the traffic (see ``ReuseModel``), by how often it was used, whether it
    was the last of its request, how its use continues others, and its age. Only leaves are evicted: chunks that no other in
    the tier follows. So there are never holes, and a prefix is worth at least what its best continuation is. A chunk that is
    worth less than the victim it needs is not stored, nor what follows it: one-shot prompts do not flush the tier, and are
    not written. What is known of evicted and refused chunks is remembered for a while. After ``admit_all`` it only chooses what
    is evicted.

    Until it has learned something it behaves like LRU.

    Args:
        capacity: slots of the tier.
    """

    name: ClassVar[str] = "reuse-index"

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
        self._newcomers = self._meet((), NO_SLOT)
        # What make_room_for_each was asked for last.
        self._met_each: tuple[list[Offer], _Newcomers] = ([], self._newcomers)

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

    def make_room(self, offer: Offer, num_slots: int, busy: BusyCounts) -> Room:  # noqa: D102
        self._learn()
        newcomers = self._newcomers = self._meet(offer.keys, offer.parent)
        worth = self._model.index[newcomers.classes[-num_slots:], 0]
        if self._admits_all:
            worth = np.full(num_slots, np.inf)
        victims, last_uses, is_refused = self._leaves.take(worth, self._now, busy)
        self._absent.remember(self._tags[victims], self._uses[victims], last_uses)
        return Room(victims, is_refused)

    def add(self, offer: Offer, slots: Slots) -> None:  # noqa: D102
        newcomers = self._newcomers
        if newcomers.keys is not offer.keys:
            newcomers = self._meet(offer.keys, offer.parent)
        if len(slots):
            self._tree.link(slots, offer.parent)
        self._settle(slots, newcomers)
        self._go_on(offer.parent)
        self._observe(newcomers.tags, newcomers.classes)

    def make_room_for_each(self, offers: Sequence[Offer], num_slots: int, busy: BusyCounts) -> list[int]:  # noqa: D102
        self._learn()
        offers = list(offers[-num_slots:])
        newcomers = self._meet_each(offers)
        self._met_each = offers, newcomers
        worth = self._model.index[newcomers.classes, 0]
        if self._admits_all:
            worth = np.full(num_slots, np.inf)
        answers, last_uses = self._leaves.take_each(worth.tolist(), self._now, busy)
        victims = np.array([answer for answer in answers if answer >= 0], dtype=np.intp)
        self._absent.remember(self._tags[victims], self._uses[victims], np.array(last_uses, dtype=np.int64))
        return answers

    def add_each(self, offers: Sequence[Offer], slots: Slots) -> None:  # noqa: D102
        if not offers:
            return
        met, newcomers = self._met_each
        if met != offers:  # nearly always the same ones, as all got in
            newcomers = self._meet_each(offers)
        num_placed = len(slots)
        parents = np.array([offer.parent for offer in offers], dtype=np.intp)
        if num_placed:
            self._tree.link_each(slots, parents[:num_placed])
        self._settle(slots, newcomers)
        for parent in parents.tolist():
            self._go_on(parent)
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
        """Take up what was learned of the traffic, if it is time to. Mutates the model and the queue."""
        if self._model.fit(self._now):
            self._leaves.use_index(self._model.index)

    def _settle(self, slots: Slots, newcomers: _Newcomers) -> None:
        """The first newcomers have these slots, the others none. Mutates what is known of chunks."""
        num_placed = len(slots)
        if num_placed:
            self._last_uses[slots] = self._now
            self._uses[slots] = newcomers.uses[:num_placed]
            self._classes[slots] = newcomers.classes[:num_placed]
            self._tags[slots] = newcomers.tags[:num_placed]
        if num_placed < len(newcomers.tags):
            refused = slice(num_placed, None)
            self._absent.remember(newcomers.tags[refused], newcomers.uses[refused], np.array([self._now]))

    def _go_on(self, parent: int) -> None:
        """The request goes on whose last chunk this was. Mutates its class."""
        if parent != NO_SLOT and self._class_of[parent] % _PER_LEVEL >= _LAST:
            self._class_of[parent] -= _LAST

    def _meet(self, keys: Sequence[bytes], parent: int) -> _Newcomers:
        """What is known of chunks on offer. Changes nothing."""
        if len(keys) == 1:
            return self._meet_one(keys, parent)
        return self._meet_many(keys, parent)

    def _meet_many(self, keys: Sequence[bytes], parent: int) -> _Newcomers:
        newcomers = self._recognise(keys, np.full(len(keys), self._detail_behind(parent), dtype=np.uint8))
        newcomers.classes[-1:] += np.uint8(_LAST)
        return newcomers

    def _meet_each(self, offers: Sequence[Offer]) -> _Newcomers:
        """The same for chunks of several prefixes."""
        details = np.array([self._detail_behind(offer.parent) for offer in offers], dtype=np.uint8)
        newcomers = self._recognise([offer.keys[0] for offer in offers], details)
        newcomers.classes[:] += np.uint8(_LAST)
        return newcomers

    def _recognise(self, keys: Sequence[bytes], classes: Classes) -> _Newcomers:
        """What is known of chunks, and the classes they will be of; ``classes`` are those of new ones. Changes nothing."""
        tags = self._tag_of(keys)
        uses: Uses = np.full(len(keys), 1, dtype=np.uint8)
        if not self._absent.is_empty:
            uses_before, ages = self._absent.recall(tags, self._now)
            is_known = uses_before > 0
            if np.count_nonzero(is_known):
                uses = _one_more(uses_before)
                classes = np.where(is_known, _classes_of_known(uses, ages), classes)
        return _Newcomers(keys, tags, uses, classes)

    def _meet_one(self, keys: Sequence[bytes], parent: int) -> _Newcomers:
        """The same, in a third of the time: while a request generates, chunks come one by one."""
        tag = self._tag_of.of(keys[0])
        uses_before, age = (0, 0) if self._absent.is_empty else self._absent.recall_one(tag, self._now)
        uses = min(uses_before + 1, _MAX_USES)
        if uses_before:
            detail = min((max(age, 1).bit_length() + 1) // 2, _DETAILS - 1)
            chunk_class = int(_LEVEL_OF_USES[uses]) * _PER_LEVEL + detail
        else:
            chunk_class = self._detail_behind(parent)
        classes = np.array([chunk_class + _LAST], dtype=np.uint8)
        return _Newcomers(keys, np.array([tag], dtype=np.uint32), np.array([uses], dtype=np.uint8), classes)

    def _detail_behind(self, parent: int) -> int:
        """Detail of the class of new chunks that continue a prefix."""
        if parent == NO_SLOT:
            return 0
        uses = self._uses_of[parent]
        if uses == 1:  # the same request, in parts
            return self._class_of[parent] % _DETAILS
        return min((uses.bit_length() + 1) // 2, _CONTINUES_OFTEN)

    def _observe(self, tags: Tags, classes: Classes) -> None:
        """Chunks were used: time goes on. Mutates the model's records."""
        sampled = (tags < self._model.sample_end).nonzero()[0]
        if len(sampled):
            self._model.observe(tags[sampled].tolist(), classes[sampled].tolist(), self._now)
        self._now += len(tags)


def _one_more(uses: Uses) -> Uses:
    more: Uses = np.minimum(uses, _MAX_USES - 1) + np.uint8(1)
    return more


def _classes_of_known(uses: Uses, ages: Times) -> Classes:
    """Classes of chunks that were used before, that long ago; not as the last of their request."""
    # frexp gives the number of bits of an integer.
    details = np.minimum((np.frexp(np.maximum(ages, 1))[1] + 1) // 2, _DETAILS - 1)
    classes: Classes = _LEVEL_OF_USES[uses] * np.uint8(_PER_LEVEL) + details.astype(np.uint8)
    return classes
