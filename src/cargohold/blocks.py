"""What names a prefix, block by block, and how much of a prefix can be reused.

A *unit* is present or absent as a whole: a block of the device pool, or a chunk of a tier. A prefix of ``n`` tokens is usable
for a group when every unit that a later query will read is present::

    full attention      |#########################|           all units before n
    sliding window      |.................########|           units that reach into the window before n
    chunked local       |....................#####|           units since the last multiple of ``window_tokens``
    recurrent state     |........................#|           the last unit
                        0                         n

The longest hit is the longest prefix that is usable for every group. Each group can only shorten it, and shortening may move
the window of another group, so the groups take turns until a full round changes nothing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from math import lcm
from typing import Final, NamedTuple, Protocol

from cargohold.protocol import AttentionKind, KVCacheGroup

ABSENT: Final = 0
READY: Final = 1
NOT_YET: Final = 2
"""State of a unit that was asked for and of which it is not known yet whether it is present."""

_ABSENT = bytes([ABSENT])
_NOT_YET = bytes([NOT_YET])
_NOT_YET_IS_ABSENT = bytes.maketrans(_NOT_YET, _ABSENT)

_ROOT_TAG: Final = b"cargohold.prefix.v1"


def root_hash(*, salt: str | None = None, adapter: str | None = None) -> bytes:
    """Return the root hash, with which the chain of a prompt's hashes starts.

    Args:
        salt: separates prompts that must not share KV, such as those of different tenants.
        adapter: identity of the adapter that is added to the weights (a LoRA adapter's digest, say).

    ``None`` and the empty string are different.
    """
    digest = hashlib.sha256(_ROOT_TAG)
    for part in (salt, adapter):
        digest.update(b"\0" if part is None else _framed(part.encode()))
    return digest.digest()


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], block_tokens: int, root: bytes) -> None:
    """Append to ``hashes`` the hash of every full block of ``token_ids`` that is not in it yet.

    A block's hash is a digest of the hash of the block before it (of the first one, of ``root``) and of its tokens.

    Args:
        hashes: those that are known; the only thing that is mutated.
        token_ids: all tokens from the start of the prompt, each in ``[0, 2**32)``.
        block_tokens: tokens per block.
        root: the root hash.

    Raises:
        OverflowError: a token id does not fit.
    """
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_tokens, len(token_ids) - block_tokens + 1, block_tokens):
        parent = hashlib.sha256(parent + array("I", token_ids[start : start + block_tokens]).tobytes()).digest()
        hashes.append(parent)


def _framed(data: bytes) -> bytes:
    # A length in front keeps ("ab", "c") and ("a", "bc") apart.
    return b"\1" + len(data).to_bytes(8, "little") + data


class UnitStates(Protocol):
    """Which units of one group are present."""

    def run(self, first: int, end: int) -> bytes:
        """Return one state byte per unit in ``[first, end)``, up to the first ``ABSENT`` one, which may be left out."""

    def window(self, first: int, end: int) -> bytes: ...


class GroupUnits(NamedTuple):
    """One group's units.

    Attributes:
        group: the group.
        unit_tokens: tokens per unit; a multiple of ``group.block_tokens``.
        states: knows which of them are present.
    """

    group: KVCacheGroup
    unit_tokens: int
    states: UnitStates


class PrefixHit(NamedTuple):
    """How far a prefix can be reused.

    Attributes:
        num_tokens: length of the usable prefix, computed tokens included; never less than these.
        undecided: whether a unit answered ``NOT_YET``: then the length may still change, so ask again.
    """

    num_tokens: int
    undecided: bool


def longest_hit(
    groups: Sequence[GroupUnits], num_tokens: int, num_computed_tokens: int = 0, limit_tokens: int | None = None
) -> PrefixHit:
    """Return the longest prefix of a request that is usable for all groups.

    Units that end at or before ``num_computed_tokens`` are taken as present without being asked for. If nothing beyond them
    is usable, the length is ``num_computed_tokens``, which need not be a multiple of any unit.

    A prefix of which nothing is present is none, also where no later query reads any of it: so it is at some places if chunked
    local attention is alone.

    Args:
        groups: the groups' units.
        num_tokens: number of tokens of the request. The last token is computed even if all are present, for its logits, so
            the units that it reads are always required.
        num_computed_tokens: number of leading tokens that are present already.
        limit_tokens: maximum length of the prefix; ``num_tokens`` if ``None``.
    """
    step_tokens = lcm(*[lcm(units.unit_tokens, units.group.hit_tokens) for units in groups])
    needs_end = not any(_always_reads_back(units.group) for units in groups)
    prefixes = [
        _FullAttention(units, num_computed_tokens)
        if units.group.kind is AttentionKind.FULL
        else _Windowed(units, step_tokens, num_tokens - 1, num_computed_tokens, needs_end=needs_end)
        for units in groups
    ]
    length = num_tokens if limit_tokens is None else limit_tokens
    if len(prefixes) == 1 and step_tokens == groups[0].unit_tokens and length > num_computed_tokens:
        length = prefixes[0].shorten(length)  # what one group can use is not shortened
        return PrefixHit(max(length, num_computed_tokens), prefixes[0].undecided)
    while length > num_computed_tokens:
        before = length
        for prefix in prefixes:
            length = prefix.shorten(length)
        length -= length % step_tokens
        if length == before:
            break
    return PrefixHit(max(length, num_computed_tokens), any(prefix.undecided for prefix in prefixes))


def _always_reads_back(group: KVCacheGroup) -> bool:
    """Whether each query but the first reads what the token before it has left."""
    return group.kind is not AttentionKind.CHUNKED_LOCAL and group.window_tokens != 1


class _FullAttention:
    """The usable prefix of a group whose queries read all units before them."""

    def __init__(self, units: GroupUnits, num_computed_tokens: int) -> None:
        self._units = units
        self._num_local = num_computed_tokens // units.unit_tokens
        self._longest: int | None = None
        self.undecided = False

    def shorten(self, length: int) -> int:
        """Return the length of the longest prefix of at most ``length`` tokens usable for this group, in whole units."""
        unit_tokens = self._units.unit_tokens
        if self._longest is None:
            run = self._units.states.run(self._num_local, length // unit_tokens)
            absent_at = run.find(_ABSENT)
            num_present = len(run) if absent_at < 0 else absent_at
            # A "not yet" counts as present for now, so that units after it are asked for as well.
            self.undecided = _NOT_YET in run[:num_present]
            self._longest = (self._num_local + num_present) * unit_tokens
        return min(length, self._longest) // unit_tokens * unit_tokens


class _Windowed:
    """The usable prefix of a group whose queries read the last units only. No unit is asked for twice.

    It ends at a multiple of ``step_tokens``. With ``needs_end``, its last unit must be there even if no query reads it.
    """

    def __init__(
        self, units: GroupUnits, step_tokens: int, last_query: int, num_computed_tokens: int, *, needs_end: bool
    ) -> None:
        self._units = units
        self._step = step_tokens // units.unit_tokens
        self._needs_end = needs_end
        self._last_query = last_query
        self._num_local = num_computed_tokens // units.unit_tokens
        # States of consecutive units from _known_from on, asked for from the right.
        self._known = b""
        self._known_from = 0
        self.undecided = False

    def shorten(self, length: int) -> int:
        """Return the length of the longest prefix of at most ``length`` tokens usable for this group, in whole units."""
        unit_tokens = self._units.unit_tokens
        end = length // unit_tokens // self._step * self._step
        while end > 0:
            next_query = min(end * unit_tokens, self._last_query)
            first = self._units.group.num_skipped_tokens(next_query) // unit_tokens
            if self._needs_end:
                first = min(first, end - 1)
            absent_at = self._last_absent(max(first, self._num_local), end)
            if absent_at is None:
                return end * unit_tokens
            # Any shorter prefix that still reaches beyond the absent unit needs it as well: the first unit that a prefix needs
            # never moves right when the prefix gets shorter.
            end = absent_at // self._step * self._step
        return 0

    def _last_absent(self, first: int, end: int) -> int | None:
        if first >= end:
            return None
        if not self._known:
            self._known_from = end
        if first < self._known_from:
            states = self._units.states.window(first, self._known_from)
            self.undecided |= _NOT_YET in states
            self._known = states.translate(_NOT_YET_IS_ABSENT) + self._known
            self._known_from = first
        at = self._known.rfind(_ABSENT, first - self._known_from, end - self._known_from)
        return None if at < 0 else at + self._known_from
