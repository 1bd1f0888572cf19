"""One run of a workload through tiers, on the managers that production uses, and the hints that an orchestrator would give.

For every request, in this order: its prompt is looked up; chunks found in a lower tier are promoted into the first; all chunks
are touched in the first tier, and in lower tiers only the promoted ones; the rest of the prompt is computed and stored, and
then the chunks that the answer completed. Requests come one after the other, so nothing is busy, and a load changes no state:
it is only counted. Where the trace says how many tokens its engine computed in a step, chunks are stored step by step as in
that engine, and an answer's chunks one by one, because policies may depend on that.

The first tier is the one that exchanges KV with the accelerator. Lower tiers are written through: chunks stored in the first
are written to the others, too. A promotion needs room in the first tier; a chunk that finds none there is a miss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Final

import numpy as np

from cargohold.blocks import ABSENT, READY
from cargohold.cache import OffloadManager, make_manager
from cargohold.cache.shares import NORMAL
from cargohold.errors import ConfigError
from cargohold.option_values import is_positive_int
from cargohold.replay.workload import UNKNOWN, Floats, Ints, Workload

HINTED: Final = "+hints"
"""What is appended to a policy's name where it gets hints."""
GUESSED: Final = "+guesses"
"""The same where the kind of a pause is guessed from the session's earlier pauses."""
QUICK_S: Final = 15.0
"""A pause up to this comes from a quick tool."""
SLOW_S: Final = 60.0
"""A pause up to this comes from a slow tool. Behind longer ones is a person, or a long job."""
RETAIN_FRACTION: Final = 0.5
"""Part of the tier whose priority may be raised: the default of ``HintConfig.retain_fraction``."""
SEVERAL: Final = 4
"""Number of sessions for which the tier must have room: else those that are raised would take the place of the running one."""

_QUICK, _SLOW, _OVER = 80, 60, 0
_LONG: Final = ((0.0, 24), (50.0, 30), (150.0, 25), (240.0, 20), (480.0, 15), (960.0, 10))
"""Levels behind a long pause, by the seconds that it has lasted. It lasts at least ``SLOW_S``; after that, the longer it has
lasted, the later the session is expected back."""
_NUM_RECALLED: Final = 8
"""Number of a session's last pauses from which the kind of the next one is guessed."""


@dataclass(slots=True)
class _Said:
    """What was said of a prompt, until its session goes on.

    Attributes:
        keys: its chunks.
        start: where they are in the workload's chunks.
        num_raised: how many of them count against ``RETAIN_FRACTION``.
        is_void: whether it holds no more.
    """

    keys: Sequence[bytes]
    start: int
    num_raised: int = 0
    is_void: bool = False


class DerivedHints:
    """Gives hints to a tier while a workload is replayed.

    Args:
        workload: the requests; they must have times and sessions.
        manager: the tier.
        is_guessed: whether kinds of pauses are guessed from the session's earlier ones. Otherwise they are known.

    Raises:
        ConfigError: the trace has no times, or no sessions.
    """

    def __init__(self, workload: Workload, manager: OffloadManager, *, is_guessed: bool = False) -> None:
        if not workload.is_timed or (workload.sessions == UNKNOWN).all():
            raise ConfigError(
                "hints", "derived", "the trace must say when requests arrived, and of which session each is"
            )
        self._manager = manager
        self._arrivals_s = workload.arrivals_s
        self._sessions = workload.sessions.tolist()
        self._pauses_s = pauses_s(workload)
        if is_guessed:
            self._pauses_s = guess_pauses_s(self._sessions, self._pauses_s)
        self._starts = workload.starts
        self._last_uses = _last_uses(workload)
        self._budget = int(RETAIN_FRACTION * manager.capacity)
        # By session that is not over: its last turn, and branches that it has left and comes back to.
        self._waiting: dict[int, _Said] = {}
        self._left: dict[int, list[_Said]] = {}
        self._num_waiting = 0
        self._due: list[tuple[float, int, _Said, int]] = []
        self._numbers = count()

    def before(self, request: int, prompt: Sequence[bytes]) -> None:
        """A request arrives: what was said of its session is void, and what the new prompt does not contain was left behind."""
        now, session = self._arrivals_s[request], self._sessions[request]
        while self._due and self._due[0][0] <= now:
            _, _, said, level = heappop(self._due)
            if not said.is_void:
                self._say_later(said, level)
        for branch in self._left.get(session, ()):
            branch.is_void |= branch.keys[0] in prompt
        last = self._waiting.pop(session, None)
        if last is None:
            return
        self._num_waiting -= len(last.keys)
        self._take_back(last)
        last.is_void = True
        num_common = next(
            (at for at, (old, new) in enumerate(zip(last.keys, prompt, strict=False)) if old != new),
            min(len(last.keys), len(prompt)),
        )
        self._manager.rank(last.keys[:num_common], NORMAL)
        self._leave(last, num_common, request)

    def _leave(self, last: _Said, num_common: int, request: int) -> None:
        """A session leaves chunks behind. Its orchestrator knows which it has ended, as it does of the whole session."""
        start = last.start + num_common
        num_kept = int((self._last_uses[start : last.start + len(last.keys)] >= request).sum())
        self._manager.rank(last.keys[num_common + num_kept :], _OVER)
        if num_kept:  # those of another agent of the session, with a tool of its own
            kept = _Said(last.keys[num_common : num_common + num_kept], start)
            session = self._sessions[request]
            self._left[session] = [branch for branch in (*self._left.get(session, ()), kept) if not branch.is_void]
            self._lower(kept, self._arrivals_s[request], not_before_s=SLOW_S)

    def after(self, request: int, keys: Sequence[bytes]) -> None:
        """A request has ended: its orchestrator says what it knows."""
        session, pause_s = self._sessions[request], self._pauses_s[request]
        if session == UNKNOWN:
            return
        said = _Said(keys, int(self._starts[request]))
        if not np.isfinite(pause_s):
            self._manager.rank(keys, _OVER)
            return
        self._waiting[session] = said
        self._num_waiting += len(keys)
        if pause_s > SLOW_S:
            self._lower(said, self._arrivals_s[request])
        elif self._num_waiting > self._manager.capacity >= SEVERAL * self._num_waiting / len(self._waiting):
            self._raise(said, _QUICK if pause_s <= QUICK_S else _SLOW)
            # If it was a guess, and wrong, this shows.
            heappush(self._due, (self._arrivals_s[request] + QUICK_S, next(self._numbers), said, _SLOW))
            self._lower(said, self._arrivals_s[request], not_before_s=SLOW_S)

    def _say_later(self, said: _Said, level: int) -> None:
        """Say what has become known of a prompt because its session has not gone on yet."""
        if level < NORMAL:
            self._take_back(said)
            self._manager.rank(said.keys, level)
        else:
            self._manager.rank(said.keys[: said.num_raised], level)

    def _take_back(self, said: _Said) -> None:
        """What was raised no longer counts."""
        self._budget += said.num_raised
        said.num_raised = 0

    def _lower(self, said: _Said, now: float, not_before_s: float = 0.0) -> None:
        """Say that a prompt is not expected back soon, and the longer it takes, the less."""
        for after_s, level in _LONG:
            heappush(self._due, (now + max(after_s, not_before_s), next(self._numbers), said, level))

    def _raise(self, said: _Said, level: int) -> None:
        """Say that a prompt is expected back soon, as far as the budget goes."""
        raised = said.keys[: self._budget]
        said.num_raised = len(raised)
        self._budget -= len(raised)
        self._manager.rank(raised, level)


def pauses_s(workload: Workload) -> Floats:
    """Per request, seconds until the next one of its session; infinite behind its last."""
    pauses = np.full(len(workload.ends), np.inf)
    order = np.lexsort((np.arange(len(pauses)), workload.sessions))
    sessions: Ints = workload.sessions[order]
    same = sessions[:-1] == sessions[1:]
    pauses[order[:-1][same]] = (workload.arrivals_s[order[1:]] - workload.arrivals_s[order[:-1]])[same]
    return pauses


def guess_pauses_s(sessions: Sequence[int], known_s: Floats) -> Floats:
    """Pauses as they would be guessed: of the kind that most of a session's last ones had; quick before its first.

    That a session is over stays known.

    Returns:
        Per request the longest pause of the guessed kind; behind a session's last request, infinity.
    """
    longest = (QUICK_S, SLOW_S, np.finfo(np.float64).max)
    recalled: dict[int, deque[int]] = {}
    guessed = np.full_like(known_s, np.inf)
    for request in np.flatnonzero(np.isfinite(known_s)).tolist():
        last = recalled.setdefault(sessions[request], deque(maxlen=_NUM_RECALLED))
        kind = max(range(len(longest)), key=last.count)  # of several, the shortest
        guessed[request] = longest[kind]
        last.append(int(np.searchsorted(longest, known_s[request])))
    return guessed


def _last_uses(workload: Workload) -> Ints:
    """Per use of a chunk, the last request that uses it."""
    requests = np.repeat(np.arange(len(workload.ends)), workload.ends - workload.starts)
    last_uses = np.zeros(workload.num_unique, dtype=np.int64)
    np.maximum.at(last_uses, workload.chunks, requests)
    return last_uses[workload.chunks]


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
        hits: per request, number of leading chunks of its prompt that were found in a tier.
        present: per request, chunks of its prompt that were found in a tier, behind a hole or not.
        tiers: what each tier did, first tier first; empty if that is not known.
    """

    hits: Ints
    present: Ints
    tiers: tuple[TierLog, ...]

    def traffic(self, first: int = 0) -> tuple[TierTraffic, ...]:
        """The tiers' traffic from a request on."""
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

    def store(self, keys: Keys, parent: bytes | None) -> int:
        """Offer chunks to the tier. Returns how many leading ones are there afterwards."""
        handle = self.manager.prepare_store(keys, parent)
        assert not handle.deferred, "nothing is busy when requests come one after the other"
        stored = handle.keys
        handle.commit()
        self.stored += len(stored)
        if len(stored) == len(keys):
            return len(keys)
        return len(self.manager.lookup_run(keys))

    def end_request(self) -> None:
        """Note the counters after a request."""
        self._log.append((self.loaded, self.stored, self.manager.num_ready))

    def log(self) -> TierLog:
        """What the tier did. Raises ``AssertionError`` if the counters or the manager's invariants do not hold at the end."""
        manager = self.manager
        manager.check()
        assert manager.num_writing == manager.num_pins == manager.num_leaving == 0, "something is still in flight"
        assert manager.num_free + manager.num_ready == manager.capacity, "slots are lost"
        assert manager.num_ready <= self.stored, "chunks are there that nobody stored"
        loaded, stored, held = np.array(self._log, dtype=np.int64).T
        return TierLog(self.name, self.capacity, np.diff(loaded, prepend=0), np.diff(stored, prepend=0), held)


def run_tiers(
    workload: Workload,
    policy: str,
    capacities: Sequence[int],
    disk_policy: str = DEFAULT_DISK_POLICY,
    *,
    with_hints: bool = False,
    with_guesses: bool = False,
) -> TierRun:
    """Replay a workload.

    Args:
        workload: the requests.
        policy: policy of host memory; see ``cargohold.cache.policies.find_policy``.
        capacities: slots of host memory, and of the disk if there is one.
        disk_policy: policy of the disk.
        with_hints: whether host memory gets the hints that an orchestrator could give; see ``DerivedHints``.
        with_guesses: the same, with kinds of pauses that are guessed.

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
    hints = DerivedHints(workload, tiers[0].manager, is_guessed=with_guesses) if with_hints or with_guesses else None
    names = _names(workload.num_unique)
    hits, present = np.zeros((2, len(workload.ends)), dtype=np.int64)
    for request, (start, prompt_end, end) in enumerate(workload.spans()):
        keys = tuple(names[workload.chunks[start:end]].tolist())
        prompt = keys[: prompt_end - start]
        if hints is not None:
            hints.before(request, prompt)
        num_hits, present[request] = _serve(tiers, prompt)
        hits[request] = num_hits
        for first, last in _pieces(workload, num_hits, len(prompt), len(keys)):
            _store(tiers, keys[first:last], keys[first - 1] if first else None)
        if hints is not None:
            hints.after(request, keys)
        for tier in tiers:
            tier.end_request()
    return TierRun(hits, present, tuple(tier.log() for tier in tiers))


def _names(num_chunks: int) -> np.ndarray[tuple[int], np.dtype[np.object_]]:
    """A key for each chunk number: one object per number, so that comparing keys is cheap."""
    names = np.empty(num_chunks, dtype=np.object_)
    # Low byte first: managers spread keys by their first byte.
    names[:] = [number.to_bytes(_NAME_BYTES, "little") for number in range(num_chunks)]
    return names


def _pieces(workload: Workload, num_hits: int, num_prompt: int, num_chunks: int) -> Iterator[tuple[int, int]]:
    """The ranges of a request's chunks that are stored together: first chunk, and the one behind the last."""
    if workload.step_tokens is None or workload.chunk_tokens is None:
        ends = [num_prompt, num_chunks]
    else:
        step, chunk = workload.step_tokens, workload.chunk_tokens
        computed = range(num_hits * chunk + step, num_prompt * chunk, step)
        ends = [*(tokens // chunk for tokens in computed), *range(num_prompt, num_chunks + 1)]
    first = num_hits
    for end in ends:
        if end > first:
            yield first, end
            first = end


def _serve(tiers: Sequence[_Tier], prompt: Keys) -> tuple[int, int]:
    """Look a prompt up, promote and touch. Returns how many leading chunks were found, and how many in all."""
    first = tiers[0]
    presence = first.manager.lookup(prompt)
    num_hits = presence.find(ABSENT)
    if num_hits < 0:
        num_hits = len(prompt)
    first.loaded += num_hits
    num_present = presence.count(READY)
    if len(tiers) > 1 and num_hits < len(prompt):
        answers = [presence, *(tier.manager.lookup(prompt) for tier in tiers[1:])]
        num_present = sum(READY in column for column in zip(*answers, strict=True))
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
                # The first tier may have some of these chunks, behind the hole. They are offered, too, so that they are not
                # evicted for the others.
                states = first.manager.lookup(rest)
                tier.manager.touch([key for key, state in zip(rest, states, strict=True) if state == ABSENT])
                fits = first.store(rest, prompt[num_hits - 1] if num_hits else None)
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
    num_there = first.store(keys, parent)
    for tier in lower:
        if num_there:
            tier.store(keys[:num_there], parent)
