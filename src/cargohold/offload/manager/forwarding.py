"""A manager that forwards every call to another, as a base class for wrappers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cargohold.offload.manager.base import (
    LoadHandle,
    ManagerEvent,
    OffloadKey,
    OffloadManager,
    StoreHandle,
    StoreOffer,
)


class ForwardingManager(OffloadManager):
    """Passes every call on to an inner manager. Subclasses override the methods that they change.

    Args:
        inner: the manager that answers.
    """

    def __init__(self, inner: OffloadManager) -> None:
        self.inner = inner
        self.capacity = inner.capacity

    def admit_all(self) -> None:  # noqa: D102
        self.inner.admit_all()

    @property
    def generation(self) -> int:  # noqa: D102
        return self.inner.generation

    def lookup(self, keys: Sequence[OffloadKey]) -> bytes:  # noqa: D102
        return self.inner.lookup(keys)

    def lookup_run(self, keys: Sequence[OffloadKey]) -> bytes:  # noqa: D102
        return self.inner.lookup_run(keys)

    def touch(self, keys: Sequence[OffloadKey]) -> int:  # noqa: D102
        return self.inner.touch(keys)

    def prepare_load(self, keys: Sequence[OffloadKey]) -> LoadHandle:  # noqa: D102
        return self.inner.prepare_load(keys)

    def prepare_stores(self, offers: Sequence[StoreOffer]) -> StoreHandle:  # noqa: D102
        return self.inner.prepare_stores(offers)

    def remove(self, keys: Iterable[OffloadKey]) -> None:  # noqa: D102
        self.inner.remove(keys)

    def reset(self) -> bool:  # noqa: D102
        return self.inner.reset()

    def take_events(self) -> list[ManagerEvent]:  # noqa: D102
        return self.inner.take_events()

    @property
    def num_ready(self) -> int:  # noqa: D102
        return self.inner.num_ready

    @property
    def num_writing(self) -> int:  # noqa: D102
        return self.inner.num_writing

    @property
    def num_removed(self) -> int:  # noqa: D102
        return self.inner.num_removed

    @property
    def num_leaving(self) -> int:  # noqa: D102
        return self.inner.num_leaving

    @property
    def num_pins(self) -> int:  # noqa: D102
        return self.inner.num_pins

    @property
    def num_free(self) -> int:  # noqa: D102
        return self.inner.num_free

    def check(self) -> None:  # noqa: D102
        self.inner.check()
