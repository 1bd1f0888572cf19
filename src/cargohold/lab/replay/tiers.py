"""One run of a workload through tiers, on the managers that production uses.

When a request arrives, its prompt is looked up; chunks found in a lower tier are promoted into the first; all chunks are
touched in the first tier, and in lower tiers only the promoted ones; the rest of the prompt is computed and stored. When its
answer is complete, which other requests may come before, the chunks that the answer filled are stored, and only then is it
reported how the turn ended. Nothing is busy, and a load changes no state: it is only counted. Where the trace says how many
tokens its engine computed in a step, chunks are stored step by step as in that engine, and an answer's chunks one by one,
because policies may depend on that.

With a device pool in front, which finds what was used last by itself, both are one cache, as in an engine: chunks are stored
as they are computed while there is room, or a lower tier wants them; after that, when the device loses them.

The first tier is the one that exchanges KV with the accelerator. Lower tiers are written through: chunks stored in the first
are written to the others, too. A promotion needs room in the first tier; a chunk that finds none there is a miss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cargohold.blocks import ABSENT, READY
from cargohold.cache import OffloadManager, StoreOffer, make_manager
from cargohold.errors import ConfigError
from cargohold.lab.replay.hints import OrchestratorHints
from cargohold.lab.replay.workload import TURN_ENDS, DevicePool, Ints, Workload
from cargohold.option_values import is_positive_int

HOST: Final = "host"
DISK: Final = "disk"
DEFAULT_DISK_POLICY: Final = "lru"
"""Default policy of a disk. A disk sees no requests, only what host memory could not keep."""

_NAME_BYTES: Final = 4

Keys = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """The traffic of one tier, in chunks.

    Attributes:
        name: what users call the tier.
        capacity: slots.
        loaded: chunks that were there and were read, those promoted into the first tier included.
        stored: chunks written.
        evicted: chunks that made room for others.
        held: chunks in the tier at the end.
    """

    name: str
    capacity: int
    loaded: int
    stored: int
    evicted: int
    held: int


@dataclass(frozen=True, slots=True)
class TierLog:
    """What a tier did, request by request, in chunks.

    Attributes:
        name, capacity: see ``TierTraffic``.
        loaded, stored: per request, chunks read and written.
        held: per request, chunks in the tier after it.
    """

    name: str
    capacity: int
    loaded: Ints
    stored: Ints
    held: Ints

    def traffic(self, first: int) -> TierTraffic:
        """The traffic from a request on."""
        loaded, stored = int(self.loaded[first:].sum()), int(self.stored[first:].sum())
        held, held_before = int(self.held[-1]), int(self.held[first - 1]) if first else 0
        return TierTraffic(self.name, self.capacity, loaded, stored, stored + held_before - held, held)


@dataclass(frozen=True, slots=True)
class TierRun:
    """The result of one run, request by request.

    Attributes:
        hits: per request, number of leading chunks of its prompt that were found in a tier or on the device.
        present: per request, chunks of its prompt that were found there, after a hole or not.
        tiers: what each tier did, first tier first; empty if that is not known.
    """

    hits: Ints
    present: Ints
    tiers: tuple[TierLog, ...]

    def traffic(self, first: int = 0) -> tuple[TierTraffic, ...]:
        return tuple(tier.traffic(first) for tier in self.tiers)


class _Tier:
    """A tier's manager, with counters of its traffic."""

    def __init__(self, name: str, policy: str, capacity: int, num_unique: int) -> None:
        self.name = name
        self.capacity = capacity
        # A tier with room for all chunks keeps all of them: more slots would take memory and change nothing.
        self.manager: OffloadManager = make_manager(policy, min(capacity, num_unique))
        self.loaded = 0
        self.stored = 0
        self._log: list[tuple[int, int, int]] = []

    def empty(self) -> None:
        """Drop all chunks, and begin to count again. What the policy has learned stays."""
        self.manager.reset()
        self.loaded = self.stored = 0
        self._log.clear()

    def store(self, keys: Keys, parent: bytes | None) -> None:
        """Offer chunks to the tier."""
        handle = self.manager.prepare_store(keys, parent)
        assert not handle.deferred, "nothing is busy when requests come one after the other"
        handle.commit()
        self.stored += len(handle.keys)

    def end_request(self) -> None:
        """Note the counters after a request, and what happened before the next."""
        self._log.append((self.loaded, self.stored, self.manager.num_ready))

    def log(self) -> TierLog:
        """What the tier did. Raises ``AssertionError`` if the counters or the manager's invariants do not hold at the end."""
        manager = self.manager
        manager.check()
        assert manager.num_writing == manager.num_pins == manager.num_leaving == 0, "something is still in flight"
        assert manager.num_free + manager.num_ready == manager.capacity, "slots are lost"
        assert manager.num_ready <= self.stored, "chunks are there that were not stored"
        loaded, stored, held = np.array(self._log, dtype=np.int64).T
        return TierLog(self.name, self.capacity, np.diff(loaded, prepend=0), np.diff(stored, prepend=0), held)


def run_tiers(
    workload: Workload,
    policy: str,
    capacities: Sequence[int],
    disk_policy: str = DEFAULT_DISK_POLICY,
    give_hints: Callable[[OffloadManager], OrchestratorHints] | None = None,
    *,
    learns_first: bool = False,
) -> TierRun:
    """Replay a workload.

    Args:
        workload: the requests.
        policy: policy of host memory; see ``cargohold.cache.policies.find_policy``.
        capacities: slots of host memory, and of the disk if there is one.
        disk_policy: policy of the disk.
        give_hints: makes what gives hints to host memory, if any are given.
        learns_first: whether all is replayed before, in tiers that are emptied then: so policies know what an engine knows that
            has served for long.

    Raises:
        ConfigError: there is no such policy, or a tier has no slot.
    """
    for name, capacity in zip((HOST, DISK), capacities, strict=False):
        if not is_positive_int(capacity):
            raise ConfigError(f"{name} size", capacity, "a tier has at least one chunk")
    kinds = ((HOST, policy), (DISK, disk_policy))
    tiers = [
        _Tier(name, kind, size, workload.num_unique) for (name, kind), size in zip(kinds, capacities, strict=False)
    ]
    if len(tiers) > 1:
        tiers[0].manager.admit_all()
    if learns_first:
        _Replay(workload, tiers, None).run()
        for tier in tiers:
            tier.empty()
    return _Replay(workload, tiers, None if give_hints is None else give_hints(tiers[0].manager)).run()


class _Replay:
    """The requests in the order of time: each arrives, and its answer is complete some time later."""

    def __init__(self, workload: Workload, tiers: Sequence[_Tier], hints: OrchestratorHints | None) -> None:
        self._workload = workload
        self._tiers = tiers
        self._hints = hints
        self._device = DevicePool[bytes](workload.device_chunks)
        self._is_pooled = workload.device_chunks > 0 and tiers[0].manager.pool_with_device(
            workload.device_chunks, lambda keys: [key in self._device for key in keys]
        )

    def run(self) -> TierRun:
        """Replay all requests."""
        workload, names = self._workload, _names(self._workload.num_unique)
        found: list[tuple[int, int]] = []
        spans = list(workload.spans())
        for request, is_answered in workload.events():
            start, prompt_end, end = spans[request]
            keys = tuple(names[workload.chunks[start:end]].tolist())
            if is_answered:
                self._end(request, keys, prompt_end - start)
                continue
            if request:
                self._end_request()
            found.append(self._arrive(request, keys[: prompt_end - start]))
        self._end_request()
        hits, present = np.array(found, dtype=np.int64).T
        return TierRun(hits, present, tuple(tier.log() for tier in self._tiers))

    def _arrive(self, request: int, prompt: Keys) -> tuple[int, int]:
        """Look a prompt up and compute the rest. Returns how many leading chunks were found, and how many in all."""
        if self._hints is not None:
            self._hints.before(prompt)
        num_hits, num_present = _serve(self._tiers, prompt, self._device.find(prompt))
        self._note_lost(self._device.use(prompt))
        if self._is_pooled:
            self._list(prompt[:num_hits], None)
        for first, end in _prompt_pieces(self._workload, num_hits, len(prompt)):
            self._store(prompt[first:end], prompt[first - 1] if first else None)
        return num_hits, num_present

    def _end(self, request: int, keys: Keys, num_prompt: int) -> None:
        """The answer to a request is complete."""
        self._note_lost(self._device.end(keys, num_prompt))
        for first, end in _answer_pieces(self._workload, num_prompt, len(keys)):
            self._store(keys[first:end], keys[first - 1] if first else None)
        if self._hints is not None:
            self._hints.after(request, keys)
        self._tiers[0].manager.end_turn(keys, TURN_ENDS[self._workload.turn_ends[request]])

    def _store(self, keys: Keys, parent: bytes | None) -> None:
        """Store chunks that were computed, or only list those that the device holds, if there is no room for all."""
        if not self._is_pooled:
            _store(self._tiers, keys, parent)
        elif len(self._tiers) > 1 or len(keys) <= self._tiers[0].manager.num_free:
            _store(self._tiers, keys, parent)
            self._tiers[0].manager.note_copies([key for key in keys if key in self._device])
        else:
            num_listed = self._list(keys, parent)
            if num_listed < len(keys):  # the prompt is longer than the device pool
                _store(self._tiers, keys[num_listed:], keys[num_listed - 1] if num_listed else parent)

    def _list(self, keys: Keys, parent: bytes | None) -> int:
        """List the leading chunks that the device holds; return how many they are."""
        listed = keys[: self._device.find(keys)]
        if listed:
            self._tiers[0].manager.note_copies(listed)
            self._tiers[0].manager.list_on_device((StoreOffer(listed, parent),))
        return len(listed)

    def _note_lost(self, lost: Sequence[bytes]) -> None:
        """Store what the device loses and nothing else has, as far as it is worth a slot."""
        if self._is_pooled and lost:
            host = self._tiers[0]
            handle = host.manager.prepare_saves(lost)
            handle.commit()
            host.stored += len(handle.keys)
            host.manager.note_lost(lost)

    def _end_request(self) -> None:
        for tier in self._tiers:
            tier.end_request()


def _names(num_chunks: int) -> np.ndarray[tuple[int], np.dtype[np.object_]]:
    """A key for each chunk number: one object per number, so that comparing keys is cheap."""
    names = np.empty(num_chunks, dtype=np.object_)
    # Low byte first: managers spread keys by their first byte.
    names[:] = [number.to_bytes(_NAME_BYTES, "little") for number in range(num_chunks)]
    return names


def _pieces(first: int, ends: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The ranges between the ends of chunks that are stored together: first chunk, and the one after the last."""
    for end in ends:
        if end > first:
            yield first, end
            first = end


def _prompt_pieces(workload: Workload, num_hits: int, num_prompt: int) -> Iterator[tuple[int, int]]:
    """The ranges of a prompt's chunks that are stored together, after those that were found."""
    step, chunk = workload.step_tokens, workload.chunk_tokens
    computed = () if step is None or chunk is None else range(num_hits * chunk + step, num_prompt * chunk, step)
    return _pieces(num_hits, [*(tokens // (chunk or 1) for tokens in computed), num_prompt])


def _answer_pieces(workload: Workload, num_prompt: int, num_chunks: int) -> Iterator[tuple[int, int]]:
    """The ranges of an answer's chunks that are stored together."""
    is_stepped = workload.step_tokens is not None and workload.chunk_tokens is not None
    return _pieces(num_prompt, range(num_prompt, num_chunks + 1) if is_stepped else [num_chunks])


def _serve(tiers: Sequence[_Tier], prompt: Keys, num_on_device: int) -> tuple[int, int]:
    """Look up what the device lacks of a prompt, promote and touch.

    Returns how many leading chunks were found, and how many in all, both with those on the device.
    """
    first = tiers[0]
    presence = first.manager.lookup(prompt)
    num_hits = presence.find(ABSENT, num_on_device)
    if num_hits < 0:
        num_hits = len(prompt)
    first.loaded += num_hits - num_on_device
    num_present = num_on_device + presence.count(READY, num_on_device)
    if len(tiers) > 1 and num_hits < len(prompt):
        answers = [
            answer[num_on_device:] for answer in (presence, *(tier.manager.lookup(prompt) for tier in tiers[1:]))
        ]
        num_present = num_on_device + sum(READY in column for column in zip(*answers, strict=True))
        num_hits = _promote(tiers, prompt, num_hits)
    first.manager.touch(prompt)
    return num_hits, num_present


def _promote(tiers: Sequence[_Tier], prompt: Keys, num_hits: int) -> int:
    """Copy chunks that continue the found prefix from lower tiers into the first. Returns how long the prefix is then."""
    first, *lower = tiers
    is_longer = True
    while is_longer and num_hits < len(prompt):
        is_longer = False
        for tier in lower:
            found = len(tier.manager.lookup_run(prompt[num_hits:]))
            if found:
                rest = prompt[num_hits : num_hits + found]
                # The first tier may have some of these chunks, after the hole. They are offered, too, so that they are not
                # evicted for the others.
                states = first.manager.lookup(rest)
                tier.manager.touch([key for key, state in zip(rest, states, strict=True) if state == ABSENT])
                first.store(rest, prompt[num_hits - 1] if num_hits else None)
                fits = len(first.manager.lookup_run(rest))
                brought = states[:fits].count(ABSENT)
                tier.loaded += brought
                first.loaded += fits - brought
                num_hits += fits
                is_longer = fits == found
        if is_longer:
            run = len(first.manager.lookup_run(prompt[num_hits:]))
            first.loaded += run
            num_hits += run
    return num_hits


def _store(tiers: Sequence[_Tier], keys: Keys, parent: bytes | None) -> None:
    """Store chunks that were computed, in the first tier and through it in the others."""
    first, *lower = tiers
    first.store(keys, parent)
    if lower and (num_there := len(first.manager.lookup_run(keys))):
        for tier in lower:
            tier.store(keys[:num_there], parent)
