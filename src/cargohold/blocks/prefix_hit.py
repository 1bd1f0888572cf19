"""How long a prefix can be reused, given which pieces of it are present: one pure function for device and tiers alike.

A *unit* is what is present or absent as a whole: a block of the device pool, or a chunk of a tier. A prefix of ``n`` tokens is
usable for a group when every unit that a later query will read is present::

    full attention      |#########################|           all units before n
    sliding window      |.................########|           those that reach into the window behind n
    chunked local       |....................#####|           those since the last multiple of the chunk
    recurrent state     |........................#|           the last one
                        0                         n

The usable prefix is the longest that is usable for every group at once. A group can only shorten it, and shortening may put
another group's window elsewhere, so the groups take turns until a full round changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from cargohold.protocol import AttentionKind, KVCacheGroup

ABSENT: Final = 0
READY: Final = 1
NOT_YET: Final = 2
"""Asked for, answer outstanding."""

_ABSENT = bytes([ABSENT])
_READY = bytes([READY])
_NOT_YET = bytes([NOT_YET])
_NOT_YET_IS_ABSENT = bytes.maketrans(_NOT_YET, _ABSENT)


class UnitStates(Protocol):
    """Which units of one group are present."""

    def run(self, first: int, end: int) -> bytes:
        """One state byte per unit from ``first``, up to ``end`` or to the first ``ABSENT`` one, which may be left out."""
        ...

    def window(self, first: int, end: int) -> bytes:
        """Exactly ``end - first`` state bytes."""
        ...


@dataclass(frozen=True, slots=True)
class GroupUnits:
    """One group's units.

    Attributes:
        group: the group.
        unit_tokens: tokens per unit; a multiple of ``group.block_tokens``.
        states: which of them are present.
    """

    group: KVCacheGroup
    unit_tokens: int
    states: UnitStates


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """How far a prefix can be reused.

    Attributes:
        num_tokens: its length, counting what is computed already; equal to it if there is nothing more.
        undecided: whether a unit answered ``NOT_YET``: then the length may still change, so ask again.
    """

    num_tokens: int
    undecided: bool


def longest_hit(
    groups: Sequence[GroupUnits], num_tokens: int, num_computed_tokens: int = 0, limit_tokens: int | None = None
) -> PrefixHit:
    """The longest prefix of a request that is usable for all groups.

    Units that end at or before ``num_computed_tokens`` are taken as present without being asked for. If nothing beyond them
    is usable, ``num_computed_tokens`` is returned, whether or not it is a multiple of anything.

    Args:
        groups: the groups' units.
        num_tokens: tokens of the request. The last is computed even if all are present, for its logits, so windows never
            start behind what it reads.
        num_computed_tokens: leading tokens that are present already.
        limit_tokens: length that is enough; ``num_tokens`` if ``None``.
    """
    probes = [_GroupProbe(group, num_tokens - 1, num_computed_tokens) for group in groups]
    length = num_tokens if limit_tokens is None else limit_tokens
    while length > num_computed_tokens:
        before = length
        for probe in probes:
            length = probe.shorten(length)
        if length == before:
            break
    return PrefixHit(max(length, num_computed_tokens), any(probe.undecided for probe in probes))


class _GroupProbe:
    """One group's answers, remembered so that no unit is asked for twice."""

    def __init__(self, units: GroupUnits, last_query: int, num_computed_tokens: int) -> None:
        self._group = units.group
        self._unit_tokens = units.unit_tokens
        self._states = units.states
        self._last_query = last_query
        self._num_local = num_computed_tokens // units.unit_tokens
        self._full_length: int | None = None
        # Windowed groups: states of consecutive units from _known_from on, asked for from the right.
        self._known = b""
        self._known_from = 0
        self.undecided = False

    def shorten(self, length: int) -> int:
        """The longest prefix of at most ``length`` tokens usable for this group; a multiple of its unit."""
        if self._group.kind is AttentionKind.FULL:
            return min(length, self._run_length(length)) // self._unit_tokens * self._unit_tokens
        return self._windowed(length)

    def _run_length(self, length: int) -> int:
        if self._full_length is None:
            run = self._states.run(self._num_local, length // self._unit_tokens)
            absent_at = run.find(_ABSENT)
            num_present = len(run) if absent_at < 0 else absent_at
            # A "not yet" goes on as if it were a hit, so that all look-ups get started.
            self.undecided |= _NOT_YET in run[:num_present]
            self._full_length = (self._num_local + num_present) * self._unit_tokens
        return self._full_length

    def _windowed(self, length: int) -> int:
        end = length // self._unit_tokens
        while end > 0:
            next_query = min(end * self._unit_tokens, self._last_query)
            first = self._group.num_skipped_tokens(next_query) // self._unit_tokens
            absent_at = self._last_absent(first, end)
            if absent_at is None:
                return end * self._unit_tokens
            # Any shorter prefix that still reaches beyond the absent unit needs it as well: first units never move right
            # when a prefix gets shorter.
            end = absent_at
        return 0

    def _last_absent(self, first: int, end: int) -> int | None:
        first = max(first, self._num_local)
        if first >= end:
            return None
        self._ask(first, end)
        at = self._known.rfind(_ABSENT, first - self._known_from, end - self._known_from)
        return None if at < 0 else at + self._known_from

    def _ask(self, first: int, end: int) -> None:
        if not self._known:
            self._known_from = end
        if first < self._known_from:
            states = self._states.window(first, self._known_from)
            self.undecided |= _NOT_YET in states
            self._known = states.translate(_NOT_YET_IS_ABSENT) + self._known
            self._known_from = first
