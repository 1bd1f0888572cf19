"""Room and turns: when several tenants want the same, each gets its part, whatever one of them requests."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


class Room:
    """A limit that tenants share. What others leave free can be borrowed.

    While all is taken, a tenant with more than a share gets no more, and one that comes for its own share is let in.

    Args:
        limit: the most that may be taken, except for shares of those that come later.
        num_tenants: how many share it.

    Attributes:
        limit: as given.
    """

    def __init__(self, limit: int, num_tenants: int) -> None:
        self.limit = limit
        self._share = max(1, limit // num_tenants)
        self._held: Counter[str | None] = Counter()

    @property
    def num_taken(self) -> int:
        return self._held.total()

    def take(self, tenant: str | None, amount: int) -> bool:
        """Take some, if there is room for it. Returns whether there is."""
        has_room = self.num_taken + amount <= self.limit or self._held[tenant] + amount <= self._share
        self._held[tenant] += amount if has_room else 0
        return has_room

    def give_back(self, tenant: str | None, amount: int) -> None:
        self._held[tenant] -= amount


@dataclass(slots=True, eq=False)
class Turn:
    """A caller that waits, or is in.

    Attributes:
        tenant: whose.
        weight: what it takes.
        urgency: of one tenant, the lowest goes first; then in order of arrival.
        called: done once it is in.
        is_in: whether it is.
    """

    tenant: str | None
    weight: int
    urgency: int
    called: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_in: bool = False


class Turns:
    """Lets at most ``limit`` in at a time. Next is the tenant that has least in; equal ones go in rotation.

    Belongs to one event loop. What weighs more than ``limit`` goes alone.

    Args:
        limit: the most that may be in, added up by weight; ``None`` for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._num_in = 0
        self._num_in_of: Counter[str | None] = Counter()
        self._lines: dict[str | None, list[Turn]] = {}
        """Who waits, by tenant."""
        self._last_called: Counter[str | None] = Counter()
        self._num_called = 0

    async def enter(self, tenant: str | None, weight: int = 1, urgency: int = 0) -> Turn:
        """Wait until it is its turn, and go in. A caller that is cancelled meanwhile leaves no trace."""
        turn = Turn(tenant, weight, urgency)
        insort(self._lines.setdefault(tenant, []), turn, key=lambda one: one.urgency)
        self._call()
        try:
            await turn.called
        except BaseException:
            self.leave(turn)
            raise
        return turn

    def leave(self, turn: Turn) -> None:
        """Make room, or stop waiting."""
        if turn.is_in:
            turn.is_in = False
            self._count(turn, -turn.weight)
        elif turn in (line := self._lines.get(turn.tenant, [])):
            line.remove(turn)
            if not line:
                del self._lines[turn.tenant]
        self._call()

    @asynccontextmanager
    async def of(self, tenant: str | None, weight: int = 1, urgency: int = 0) -> AsyncGenerator[None]:
        """Be in within the ``with`` block."""
        turn = await self.enter(tenant, weight, urgency)
        try:
            yield
        finally:
            self.leave(turn)

    def _call(self) -> None:
        """Let in the next client, as long as there is room."""
        while self._lines:
            tenant = min(self._lines, key=lambda one: (self._num_in_of[one], self._last_called[one]))
            line = self._lines[tenant]
            has_gone = line[0].called.cancelled()  # and has not run since
            if not has_gone and not self._has_room(line[0].weight):
                return
            turn = line.pop(0)
            if not line:
                del self._lines[tenant]
            if not has_gone:
                self._num_called += 1
                self._last_called[tenant] = self._num_called
                turn.is_in = True
                self._count(turn, turn.weight)
                turn.called.set_result(None)

    def _count(self, turn: Turn, change: int) -> None:
        self._num_in += change
        self._num_in_of[turn.tenant] += change

    def _has_room(self, weight: int) -> bool:
        return self._limit is None or self._num_in == 0 or self._num_in + weight <= self._limit
