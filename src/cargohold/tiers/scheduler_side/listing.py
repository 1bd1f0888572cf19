"""Finds again what an earlier engine has left in a tier: a few chunks at a time, and after everything else.

First which chunks the tier has: from then on it need not be asked, because it tells what it loses (``TierState.knows_all``).
Then, if events are on, what these say of each chunk, which was stored with it and takes longer to read::

    due --> LIST, then DESCRIBE: from one worker --> CHECK: does every worker have its shard? --> known, then announced
             ^                    | failed                  | failed                           |
             +--- after a pause --+-------------------------+                                  |
             +------------------------------- until the end of the list -----------------------+

A part that keeps failing ends the list: then the tier is asked which chunks it has, or these are announced when they are found.
After a ``rename``, nothing is listed: chunks have names then that do not reveal which chunks they are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from itertools import compress
from typing import Final

from cargohold.protocol import Clock
from cargohold.tiers.port import Found, JobKind, Listing
from cargohold.tiers.scheduler_side.tasks import TaskTable, TierTask
from cargohold.tiers.scheduler_side.tier_state import MAX_ANNOUNCED, TierState

MAX_RETRIES: Final = 3
"""A part of a list is read at most this many times more, as long as it fails."""
RETRY_S: Final = 0.5
"""Seconds until the first of these times; each further one comes after twice as long. An idle engine steps on for that."""

logger = logging.getLogger(__name__)


class InventoryScan:
    """Lists the chunks of one tier at the start, and again each time when the tier can be relied on again.

    Args:
        at: index of the tier.
        tier: what is known of it; what is found is added.
        tasks: the table that jobs are added to.
        clock: time in which the engine steps.

    Attributes:
        tier: as given.
        is_due: whether to begin at the start of the list.
        next: what to read next, or what is being read; ``None`` if nothing is left.
    """

    def __init__(self, at: int, tier: TierState, tasks: TaskTable, clock: Clock) -> None:
        self._at = at
        self.tier = tier
        self._tasks = tasks
        self._clock = clock
        self.is_due = tier.options.is_listed
        self.next: tuple[JobKind, bytes] | None = None
        self._is_running = False
        self._num_found = 0
        self._num_failures = 0
        self._read_at = 0.0

    @property
    def is_at_work(self) -> bool:
        """Whether it is listing, or about to."""
        may_begin = self.tier.can_be_relied_on and not self._tasks.is_renamed
        return self._is_running or ((self.is_due or self.next is not None) and may_begin)

    def begin_again(self) -> None:
        """List again what is there, because the tier has lost everything, or its list of losses."""
        self.is_due = self.tier.options.is_listed

    def step(self) -> None:
        """Begin to read the next part if that is possible. Call it in each step while something is left, or the tier fails."""
        if not self.tier.can_be_relied_on:
            self.begin_again()
        if self._is_running or not self.is_at_work:
            return
        if self.is_due:
            self.is_due = self.tier.list_failed = False
            self._num_found = self._num_failures = 0
            self._read_at = self._clock()
            self.next = (JobKind.LIST, b"") if self.tier.may_know_all else self._first_described()
        if self.next is not None and self._clock() >= self._read_at:
            kind, cursor = self.next
            self._is_running = True
            self._tasks.want(TierTask(kind, self._at, [cursor], self._end_list))

    def _first_described(self) -> tuple[JobKind, bytes] | None:
        return (JobKind.DESCRIBE, b"") if self.tier.events is not None else None

    def _end_list(self, task: TierTask, _: Sequence[bool], is_done: bool) -> None:
        if task.is_cancelled or not is_done:
            self._note_failure(task.kind)
        elif task.listing.keys:
            on_end = partial(self._end_check, task.listing, task.kind)
            self._tasks.want(TierTask(JobKind.CHECK, self._at, task.listing.keys, on_end))
        else:
            self._go_on(task.listing, task.kind)

    def _end_check(
        self, listing: Listing, kind: JobKind, task: TierTask, succeeded: Sequence[bool], is_done: bool
    ) -> None:
        if task.is_cancelled or not is_done:
            self._note_failure(kind)
            return
        self.tier.hold(self._tasks.keys_of(task.keys), succeeded)
        if kind is JobKind.DESCRIBE:
            there = tuple(map(Found, compress(listing.keys, succeeded), compress(listing.details, succeeded)))
            self._num_found += len(there)
            self.tier.announce_found(there)
        self._go_on(listing, kind)

    def _go_on(self, listing: Listing, kind: JobKind) -> None:
        self._is_running = False
        self._num_failures = 0
        is_enough = not self.tier.may_know_all if kind is JobKind.LIST else self._num_found >= MAX_ANNOUNCED
        if listing.cursor and not is_enough:
            self.next = kind, listing.cursor
            return
        if kind is JobKind.LIST:
            # Unless the list, or a part of it, has become worthless meanwhile.
            self.tier.knows_all = self.tier.may_know_all and not self.is_due
        self.next = self._first_described() if kind is JobKind.LIST else None

    def _note_failure(self, kind: JobKind) -> None:
        """Read the part again later, unless it has failed too often."""
        self._is_running = False
        self._num_failures += 1
        if self._num_failures <= MAX_RETRIES:
            self._read_at = self._clock() + RETRY_S * 2 ** (self._num_failures - 1)
            return
        logger.warning(
            "tier %s: the list of its chunks cannot be read, so those of earlier engines are found only by requests for them",
            self.tier.name,
        )
        self.tier.list_failed = True
        self._num_failures = 0
        self.next = self._first_described() if kind is JobKind.LIST else None
