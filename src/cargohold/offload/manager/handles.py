"""The handles that a manager hands out, each to be given back exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cargohold.errors import LifecycleError
from cargohold.offload.manager.base import OffloadKey


class _Handle:
    """Chunks in slots, and the moves of the handle so far, for errors."""

    __slots__ = ("_history", "keys", "slots")

    def __init__(self, keys: Sequence[OffloadKey], slots: Sequence[int], history: tuple[str, ...]) -> None:
        self.keys = keys
        self.slots = slots
        self._history = history

    def _move(self, move: str) -> None:
        """Note a move that ends this handle's life. Raises ``LifecycleError`` if it has ended already."""
        if len(self._history) > 1:
            subject = f"handle of {len(self.keys)} chunk(s)" + (f" from {self.keys[0].hex()} on" if self.keys else "")
            raise LifecycleError(subject, "given back", move, self._history)
        self._history = (*self._history, move)


class SlotReservation(_Handle):
    """Slots reserved for chunks on their way into the tier. Satisfies ``StoreHandle``.

    Args:
        keys: the chunks.
        slots: their slots, parallel to ``keys``.
        deferred: chunks to be offered again.
        end: called once, when the handle is given back, with the handle and whether the chunks were written.
    """

    __slots__ = ("_end", "deferred")

    def __init__(
        self,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        deferred: Sequence[OffloadKey],
        end: Callable[[SlotReservation, bool], None],
    ) -> None:
        super().__init__(keys, slots, ("prepare_stores",))
        self.deferred = deferred
        self._end = end

    def commit(self) -> None:
        """See ``StoreHandle.commit``."""
        self._move("commit")
        self._end(self, True)

    def forfeit(self) -> None:
        """See ``StoreHandle.forfeit``."""
        self._move("forfeit")
        self._end(self, False)


class ChunkPins(_Handle):
    """Chunks pinned while they are read. Satisfies ``LoadHandle``.

    Args:
        keys: the chunks.
        slots: their slots, parallel to ``keys``.
        end: called once, when the handle is given back, with the handle and the corrupt chunks.
    """

    __slots__ = ("_end",)

    def __init__(
        self, keys: Sequence[OffloadKey], slots: Sequence[int], end: Callable[[ChunkPins, Sequence[OffloadKey]], None]
    ) -> None:
        super().__init__(keys, slots, ("prepare_load",))
        self._end = end

    def release(self, bad_keys: Iterable[OffloadKey] = ()) -> None:
        """See ``LoadHandle.release``."""
        bad = list(dict.fromkeys(bad_keys))
        known = set(self.keys) if bad else ()
        for key in bad:
            if key not in known:
                raise LifecycleError(f"chunk {key.hex()}", "not pinned by this handle", "report as bad", self._history)
        self._move("release")
        self._end(self, bad)
