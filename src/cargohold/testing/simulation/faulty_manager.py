"""Faults of a tier's bookkeeping: a wrapper around the manager port."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cargohold.blocks import ABSENT, NOT_YET
from cargohold.cache import ForwardingManager, OffloadKey, OffloadManager, StoreHandle, StoreOffer
from cargohold.testing.simulation.faults import Fault, FaultSource

_ABSENT = bytes([ABSENT])
MAX_WAIT_S = 0.5
"""Most seconds until a look-up is decided. Shorter than engines wait for a connector."""


class FaultyManager(ForwardingManager):
    """A manager that is full, away, or slow to answer now and then.

    Args:
        inner: the manager.
        source: decides when a fault strikes.
        is_gone: whether the tier is away.
    """

    def __init__(self, inner: OffloadManager, source: FaultSource, is_gone: Callable[[], bool]) -> None:
        super().__init__(inner)
        self._source = source
        self._is_gone = is_gone
        # By key, the time from which on its answer is known. Entries are never removed.
        self._known_at: dict[OffloadKey, float] = {}
        self._next_known = float("inf")
        self._was_gone = False
        self._num_changes = 0

    @property
    def generation(self) -> int:
        """The inner manager's generation, plus one for every change of answers here."""
        self._notice_time()
        return self.inner.generation + self._num_changes

    def lookup(self, keys: Sequence[OffloadKey]) -> bytes:
        """Pass on; some answers are "not yet" at first, and while the tier is away, nothing is there."""
        if self._is_gone():
            return _ABSENT * len(keys)
        return self._undecided(keys, self.inner.lookup(keys))

    def lookup_run(self, keys: Sequence[OffloadKey]) -> bytes:
        """Like ``lookup``, up to the first absent key."""
        if self._is_gone():
            return b""
        if Fault.UNDECIDED not in self._source.rates:
            return self.inner.lookup_run(keys)
        states = self.lookup(keys)
        absent_at = states.find(_ABSENT)
        return states if absent_at < 0 else states[:absent_at]

    def prepare_stores(self, offers: Sequence[StoreOffer]) -> StoreHandle:
        """Pass on some of the offers, and defer the others."""
        struck = [bool(offer.keys) and (self._is_gone() or self._source.strikes(Fault.FULL)) for offer in offers]
        taken = [offer for offer, is_busy in zip(offers, struck, strict=True) if not is_busy]
        handle = self.inner.prepare_stores(taken)
        busy = [key for offer, is_busy in zip(offers, struck, strict=True) if is_busy for key in offer.keys]
        return _BusyForSome(handle, busy) if busy else handle

    def _undecided(self, keys: Sequence[OffloadKey], states: bytes) -> bytes:
        """The states, with "not yet" for keys whose answer is not known yet. For a new key, draw when it will be."""
        if Fault.UNDECIDED not in self._source.rates:
            return states
        now, answers = self._source.clock(), bytearray(states)
        for at, key in enumerate(keys):
            known_at = self._known_at.get(key)
            if known_at is None:
                wait_s = self._source.random.random() * MAX_WAIT_S if self._source.strikes(Fault.UNDECIDED) else 0.0
                known_at = self._known_at[key] = now + wait_s
            if known_at > now:
                answers[at] = NOT_YET
                self._next_known = min(self._next_known, known_at)
        return bytes(answers)

    def _notice_time(self) -> None:
        """Count changes of answers that come from the passage of time alone."""
        is_gone = self._is_gone()
        now = self._source.clock()
        if is_gone is not self._was_gone or self._next_known <= now:
            self._was_gone = is_gone
            self._next_known = min((at for at in self._known_at.values() if at > now), default=float("inf"))
            self._num_changes += 1


class _BusyForSome:
    """A reservation of slots, with further chunks that were deferred. Satisfies ``StoreHandle``.

    Args:
        handle: the reservation.
        busy: chunks to be offered again, except those for which ``handle`` has a slot because of another offer.
    """

    def __init__(self, handle: StoreHandle, busy: Sequence[OffloadKey]) -> None:
        self.keys, self.slots = handle.keys, handle.slots
        self.deferred = list(dict.fromkeys([*handle.deferred, *(key for key in busy if key not in handle.keys)]))
        self.commit, self.forfeit = handle.commit, handle.forfeit
