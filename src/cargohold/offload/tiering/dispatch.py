"""Hands out jobs of lower tiers: those that requests want, and writes from the backlogs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import TypeVar

from cargohold.blocks import READY
from cargohold.offload.manager.base import LoadHandle, OffloadKey, OffloadManager
from cargohold.offload.tier.jobs import JobKind
from cargohold.offload.tiering.fetches import BATCH_CHUNKS
from cargohold.offload.tiering.options import TieringConfig
from cargohold.offload.tiering.tasks import TaskTable, TierCommand, TierTask
from cargohold.offload.tiering.tier_state import TierState

_SomeKey = TypeVar("_SomeKey", OffloadKey, OffloadKey | None)


def random_epoch() -> bytes:
    """Return 16 random bytes: a name that no other engine has and that nobody can predict."""
    return secrets.token_bytes(16)


class Dispatch:
    """Turns tasks into commands for the workers, as far as the tiers can take them.

    Args:
        host: the manager of host memory; chunks are pinned there while they are written.
        tiers: the tiers.
        tasks: the table of tasks; mutated.
        config: deadlines.
        new_epoch: makes the new name for ``rename``.
    """

    def __init__(
        self,
        host: OffloadManager,
        tiers: Sequence[TierState],
        tasks: TaskTable,
        config: TieringConfig,
        new_epoch: Callable[[], bytes],
    ) -> None:
        self._host = host
        self._tiers = tiers
        self._tasks = tasks
        self._config = config
        self._new_epoch = new_epoch
        self._epoch = b""

    def requested(self, new_id: Callable[[], int], turn_away: Callable[[TierTask], None]) -> Iterator[TierCommand]:
        """Yield commands for the probes, touches and loads that wait to be handed out.

        Tasks that were cancelled, or whose access is suspended, go to ``turn_away`` instead. Tasks for which a tier's workers
        have no room keep their turn: the workers would refuse them, which looks like a failure of the medium.
        """
        full: set[int] = set()
        for task in self._tasks.take_wanted():
            if not task.is_cancelled and (task.tier in full or self._is_too_much(task)):
                full.add(task.tier)
                self._tasks.want(task)
            elif not task.is_cancelled and self._may_go(task):
                yield self._command(new_id(), task, self._config.restore_timeout_s)
            else:
                turn_away(task)

    def writes(self, new_id: Callable[[], int]) -> Iterator[TierCommand]:
        """Yield commands that write as many chunks of the backlogs as may be in flight; pin the chunks."""
        for at, tier in enumerate(self._tiers):
            while (room := tier.num_writable) and tier.is_writable:
                batch = tier.backlog.take(min(room, BATCH_CHUNKS), partial(self._writable, tier))
                if batch is None:
                    break
                pins = self._host.prepare_load(batch.keys)
                task = TierTask(
                    JobKind.STORE, at, batch.keys, batch.parents, pins.slots, on_end=partial(_release, pins)
                )
                tier.begin_writing(task)
                yield self._command(new_id(), task, self._config.store_timeout_s)

    def rename(self) -> None:
        """Give chunks other names in the tiers from now on, so that nobody finds what is there under the old names."""
        self._epoch = self._new_epoch()

    def _is_too_much(self, task: TierTask) -> bool:
        num_asked = self._tasks.num_asked(task.tier)
        return num_asked > 0 and num_asked + len(task.keys) > self._tiers[task.tier].options.max_asked_chunks

    def _may_go(self, task: TierTask) -> bool:
        return self._tiers[task.tier].takes(task.kind)

    def _writable(self, tier: TierState, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the chunks that a tier wants and host memory has."""
        wanted = tier.wanted(keys)
        return [key for key, state in zip(wanted, self._host.lookup(wanted), strict=True) if state == READY]

    def _command(self, job_id: int, task: TierTask, timeout_s: float) -> TierCommand:
        self._tasks.begin(job_id, task)
        parents = self._names(task.parents) if task.kind is JobKind.STORE else ()
        return TierCommand(job_id, task.tier, task.kind, self._names(task.keys), tuple(task.slots), parents, timeout_s)

    def _names(self, keys: Sequence[_SomeKey]) -> tuple[_SomeKey, ...]:
        """Return the names of chunks in the tiers: their keys, or digests of epoch and key after a ``rename``."""
        return tuple(map(self._name, keys) if self._epoch else keys)

    def _name(self, key: _SomeKey) -> _SomeKey:
        if key is None:
            return key
        # As long as the key; the group in its last 4 bytes stays readable.
        return blake2b(self._epoch + key, digest_size=len(key) - 4).digest() + key[-4:]


def _release(pins: LoadHandle, *_: object) -> None:
    pins.release()
