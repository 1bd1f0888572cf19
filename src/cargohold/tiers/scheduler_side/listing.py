"""Finds again what an earlier engine has left in a tier: a few chunks at a time, and behind everything else.

First which chunks the tier has: from then on it need not be asked, because it tells what it loses (``TierState.knows_all``).
Then, if anybody wants events, what these say of each chunk, which was stored with it and takes longer to read::

    due --> LIST, then DESCRIBE: from one worker --> CHECK: does every worker have its shard? --> known, then announced
             ^                                                                                 |
             +------------------------------- until the end of the list -----------------------+

After a ``rename``, nothing is listed: chunks have names then that tell nobody which chunks they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import compress

from cargohold.tiers.port import Found, JobKind, Listing
from cargohold.tiers.scheduler_side.tasks import TaskTable, TierTask
from cargohold.tiers.scheduler_side.tier_state import MAX_ANNOUNCED, TierState


class Lister:
    """Lists the chunks of one tier at the start, and again each time when the tier can be relied on again.

    Args:
        at: index of the tier.
        tier: what is known of it; is told what was found.
        tasks: the table that jobs are added to.
    """

    def __init__(self, at: int, tier: TierState, tasks: TaskTable) -> None:
        self._at = at
        self._tier = tier
        self._tasks = tasks
        self._is_due = tier.options.is_listed
        self._num_found = 0
        self._is_running = False

    @property
    def is_at_work(self) -> bool:
        """Whether it is listing, or about to."""
        may_begin = self._tier.can_be_relied_on and not self._tasks.is_renamed
        return self._is_running or (self._is_due and may_begin)

    def begin_again(self) -> None:
        """List anew what is there, because the tier has lost everything, or its list of losses."""
        self._is_due = self._tier.options.is_listed

    def step(self) -> None:
        """Begin to list if that is due and possible. To be called once a step."""
        if self._is_running or not self._tier.options.is_listed:
            return
        if not self._tier.can_be_relied_on:
            self._is_due = True
        elif self.is_at_work:
            self._is_due = False
            self._num_found = 0
            if self._tier.may_know_all:
                self._list_from(b"", JobKind.LIST)
            elif self._tier.records_events:
                self._list_from(b"", JobKind.DESCRIBE)

    def _list_from(self, cursor: bytes, kind: JobKind) -> None:
        self._is_running = True
        self._tasks.want(TierTask(kind, self._at, [cursor], self._end_list))

    def _end_list(self, task: TierTask, _: Sequence[bool], is_done: bool) -> None:
        if task.is_cancelled or not is_done:
            self._is_running = False
        elif task.listing.keys:
            on_end = partial(self._end_check, task.listing, task.kind)
            self._tasks.want(TierTask(JobKind.CHECK, self._at, task.listing.keys, on_end))
        else:
            self._go_on(task.listing, task.kind)

    def _end_check(
        self, listing: Listing, kind: JobKind, task: TierTask, succeeded: Sequence[bool], is_done: bool
    ) -> None:
        if task.is_cancelled or not is_done:
            self._is_running = False
            return
        self._tier.hold(task.keys, succeeded)
        if kind is JobKind.DESCRIBE:
            there = tuple(map(Found, compress(listing.keys, succeeded), compress(listing.details, succeeded)))
            self._num_found += len(there)
            self._tier.announce_found(there)
        self._go_on(listing, kind)

    def _go_on(self, listing: Listing, kind: JobKind) -> None:
        self._is_running = False
        is_enough = not self._tier.may_know_all if kind is JobKind.LIST else self._num_found >= MAX_ANNOUNCED
        if listing.cursor and not is_enough:
            self._list_from(listing.cursor, kind)
        elif kind is JobKind.LIST:
            # Unless the list, or a part of it, has become worthless meanwhile.
            self._tier.knows_all = self._tier.may_know_all and not self._is_due
            if self._tier.records_events:
                self._list_from(b"", JobKind.DESCRIBE)
