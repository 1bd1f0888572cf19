"""The health of a medium, judged where its I/O is: a circuit breaker for each way of access, and what is reported of them.

::

    CLOSED --several failures in a row--> OPEN --cooldown over--> HALF_OPEN --trial succeeds--> CLOSED
                                            ^                        |
                                            +---- trial fails -------+   (the next cooldown is twice as long)

Look-ups, loads and writes have a breaker each, because one may work while another does not. A disk may take writes into the
operating system's cache while every load waits for the medium: if writes that succeed closed the breaker of loads, requests
would wait forever. And what is on a full disk can still be loaded.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from cargohold.protocol import Clock
from cargohold.tiers.port import (
    ACCESS_OF,
    FROM_INDEX,
    SHOW_NOTHING,
    Access,
    Answer,
    JobKind,
    JobStatus,
    StoreOutcome,
    TierJob,
)

logger = logging.getLogger(__name__)


class BreakerState(IntEnum):
    """Which jobs a breaker lets through; the worse, the greater."""

    CLOSED = 0
    """All jobs: the medium works."""
    HALF_OPEN = 1
    """One job at a time, as a trial."""
    OPEN = 2
    """No job: this access is suspended."""


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """When an access is suspended, and for how long.

    Attributes:
        failures_to_open: number of failures in a row that open the breaker.
        cooldown_s: time until the first trial.
        max_cooldown_s: limit of the cooldown, which doubles with every failed trial.
    """

    failures_to_open: int = 3
    cooldown_s: float = 1.0
    max_cooldown_s: float = 60.0


@dataclass(frozen=True, slots=True)
class TierHealth:
    """The health of a tier on one worker, or the worst of several.

    Attributes:
        look_up, load, write: state of the breaker of each access.
        reason: why a breaker opened last, in one line; empty if all are closed.
        retry_s: seconds from the moment when an access was suspended last until it is tried again; 0 if none is suspended.
        is_off: whether no worker will use the tier any more: its threads keep dying, or it was shut down.
    """

    look_up: BreakerState = BreakerState.CLOSED
    load: BreakerState = BreakerState.CLOSED
    write: BreakerState = BreakerState.CLOSED
    reason: str = ""
    retry_s: float = 0.0
    is_off: bool = False

    def of(self, access: Access) -> BreakerState:
        return {Access.LOOK_UP: self.look_up, Access.LOAD: self.load, Access.WRITE: self.write}[access]

    @property
    def worst(self) -> BreakerState:
        """The state of the breaker that lets the fewest jobs through."""
        return max(self.look_up, self.load, self.write)

    @property
    def num_open(self) -> int:
        """Number of ways of access that are suspended."""
        return [self.look_up, self.load, self.write].count(BreakerState.OPEN)

    def worse(self, other: TierHealth) -> TierHealth:
        """Return the worse of both, access by access: a chunk is of use only if all workers have their shard of it."""
        return TierHealth(
            max(self.look_up, other.look_up),
            max(self.load, other.load),
            max(self.write, other.write),
            (other if other.worst > self.worst else self).reason,
            max(self.retry_s, other.retry_s),
            self.is_off or other.is_off,
        )


HEALTHY: Final = TierHealth()


class CircuitBreaker:
    """Counts failures and decides which jobs are let through. Not thread-safe: its owner holds a lock.

    Args:
        clock: monotonic time in seconds.
        config: when it opens, and for how long.
    """

    def __init__(self, clock: Clock, config: BreakerConfig) -> None:
        self._clock = clock
        self._config = config
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._cooldown_s = config.cooldown_s
        self._retry_at = 0.0
        self._has_trial = False

    @property
    def state(self) -> BreakerState:
        """Which jobs are let through now."""
        if self._state is BreakerState.OPEN and self._clock() >= self._retry_at:
            self._state, self._has_trial = BreakerState.HALF_OPEN, False
        return self._state

    @property
    def cooldown_s(self) -> float:
        """Seconds from opening until the first trial; 0 unless it is open."""
        return self._cooldown_s if self.state is BreakerState.OPEN else 0.0

    def admit(self) -> bool:
        """Let a job through if the state allows, and return whether it does. If so, call one ``note_*`` method at its end."""
        state = self.state
        if state is BreakerState.OPEN or (state is BreakerState.HALF_OPEN and self._has_trial):
            return False
        self._has_trial = state is BreakerState.HALF_OPEN
        return True

    def note_success(self) -> None:
        """Note that a job was carried out: the medium works, so close the breaker."""
        if self.state is not BreakerState.OPEN:  # a job from before the breaker opened says nothing
            self._state = BreakerState.CLOSED
            self._failures = 0
            self._cooldown_s = self._config.cooldown_s

    def note_failure(self) -> bool:
        """Note that a job failed or was late; return whether that opened the breaker."""
        state = self.state
        if state is BreakerState.OPEN:
            return False
        self._failures += 1
        if state is BreakerState.HALF_OPEN:
            self._cooldown_s = min(2 * self._cooldown_s, self._config.max_cooldown_s)
        elif self._failures < self._config.failures_to_open:
            return False
        self._state = BreakerState.OPEN
        self._retry_at = self._clock() + self._cooldown_s
        return True

    def note_cancelled(self) -> None:
        """Note that a job ended without showing whether the medium works."""
        self._has_trial = False


class MediumHealth:
    """Judges a medium by how its jobs end. Not thread-safe: its owner holds a lock.

    Touches say nothing: a medium that fails to note the use of chunks is not worse for that. Nor do jobs for which nothing
    waits; see ``SHOW_NOTHING``.

    Args:
        name: the tier's name for users.
        clock: monotonic time in seconds.
        config: when an access is suspended, and for how long.
        has_index: whether the tier answers some questions without asking its medium.
    """

    def __init__(self, name: str, clock: Clock, config: BreakerConfig, *, has_index: bool) -> None:
        self._name = name
        self._clock = clock
        self._breakers = {access: CircuitBreaker(clock, config) for access in Access}
        self._told_by_index = FROM_INDEX if has_index else frozenset[Answer]()
        # When the medium last carried out anything in time, per access, and for which job.
        self._worked: dict[Access, tuple[float, TierJob | None]] = dict.fromkeys(Access, (float("-inf"), None))
        self._reasons: dict[Access, str] = dict.fromkeys(Access, "")

    def state_of(self, kind: JobKind) -> BreakerState:
        return self._breakers[ACCESS_OF[kind]].state

    def report(self) -> TierHealth:
        """Return the state of every access."""
        states = {access: breaker.state for access, breaker in self._breakers.items()}
        worst = max(states, key=states.__getitem__)
        if not states[worst]:
            return HEALTHY  # nearly always
        retry_s = max(breaker.cooldown_s for breaker in self._breakers.values())
        return TierHealth(
            states[Access.LOOK_UP], states[Access.LOAD], states[Access.WRITE], self._reasons[worst], retry_s
        )

    def admit(self, kind: JobKind) -> bool:
        """Let a job through if its breaker allows, and return whether it does. If so, call ``note_end`` at its end."""
        if kind in SHOW_NOTHING:
            return self.state_of(kind) is BreakerState.CLOSED
        return self._breakers[ACCESS_OF[kind]].admit()

    def note_answers(self, job: TierJob, answers: list[Answer]) -> None:
        """Note that part of a job that has not ended was carried out."""
        if job.kind not in SHOW_NOTHING and set(answers) - self._told_by_index - {StoreOutcome.FAILED}:
            self._worked[ACCESS_OF[job.kind]] = self._clock(), job

    def note_end(self, job: TierJob) -> Access | None:
        """Judge by how a job that was admitted ended; return the access that it got suspended, if it did."""
        if job.kind in SHOW_NOTHING:
            return None
        breaker = self._breakers[ACCESS_OF[job.kind]]
        answered = set(job.answers) - self._told_by_index
        match job.status:
            case JobStatus.DONE if answered - {StoreOutcome.FAILED}:
                if breaker.state is BreakerState.HALF_OPEN:
                    logger.info("tier %s: %s work again", self._name, ACCESS_OF[job.kind].value)
                breaker.note_success()
            case JobStatus.DONE if not answered:
                breaker.note_cancelled()
            case JobStatus.EXPIRED if self._was_one_too_many(job):
                breaker.note_cancelled()
            case JobStatus.CANCELLED:
                breaker.note_cancelled()
            case _:
                return self._note_failure(job)
        return None

    def _was_one_too_many(self, job: TierJob) -> bool:
        """Whether a job is late though the medium works: it has worked for others meanwhile, or done most of this one.

        A little of a job says nothing: a medium may begin each one, and then hang.
        """
        worked_at, worked_for = self._worked[ACCESS_OF[job.kind]]
        if worked_for is job:
            return 2 * (len(job.answers) - job.answers.count(None)) >= len(job.keys)
        return worked_at > job.queued_at

    def _note_failure(self, job: TierJob) -> Access | None:
        access = ACCESS_OF[job.kind]
        was_trial = self._breakers[access].state is BreakerState.HALF_OPEN
        if not self._breakers[access].note_failure():
            return None
        self._reasons[access] = job.reason
        if was_trial:  # of a medium that stays bad, trials fail every minute, for days
            logger.info("tier %s: %s stay suspended: a trial failed: %s", self._name, access.value, job.reason)
        else:
            message = "tier %s: %s are suspended after several failures in a row, until a trial succeeds; the last: %s"
            logger.warning(message, self._name, access.value, job.reason)
        return access
