"""Circuit breakers: a tier whose medium keeps failing rests for a while, so that it costs misses instead of waits.

::

    CLOSED --several failures in a row--> OPEN --cooldown over--> HALF_OPEN --trial succeeds--> CLOSED
                                            ^                        |
                                            +---- trial fails -------+   (the next cooldown is twice as long)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from cargohold.errors import ConfigError
from cargohold.offload.tier.jobs import ACCESS_OF, Access, JobKind
from cargohold.protocol import Clock


class BreakerState(Enum):
    """Which jobs the breaker lets through."""

    CLOSED = "closed"
    """All jobs: the tier works."""
    OPEN = "open"
    """No job: the tier rests."""
    HALF_OPEN = "half-open"
    """One job at a time, as a trial."""


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """When a tier rests, and for how long.

    Attributes:
        failures_to_open: number of failures in a row that open the breaker.
        cooldown_s: time until the first trial.
        max_cooldown_s: limit of the cooldown, which doubles with every failed trial.
    """

    failures_to_open: int = 3
    cooldown_s: float = 1.0
    max_cooldown_s: float = 60.0

    def __post_init__(self) -> None:
        if self.failures_to_open < 1:
            raise ConfigError("failures_to_open", self.failures_to_open, "at least 1")
        if not 0 < self.cooldown_s <= self.max_cooldown_s:
            raise ConfigError("cooldown_s", self.cooldown_s, f"above 0, at most max_cooldown_s={self.max_cooldown_s}")


class CircuitBreaker:
    """Counts failures and decides which jobs are let through. Not thread-safe: its owner holds a lock.

    Args:
        clock: monotonic time in seconds.
        config: when the tier rests, and for how long.
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

    def would_admit(self) -> bool:
        """Whether a job would be let through now. Lets none through."""
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._has_trial)

    def admit(self) -> bool:
        """Let a job through if the state allows, and return whether it does. If so, call one ``note_*`` method at its end."""
        if not self.would_admit():
            return False
        self._has_trial = self._state is BreakerState.HALF_OPEN
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


class TierBreakers:
    """The circuit breakers of one tier: one for each ``Access``, because one may work while another does not.

    A disk may take writes into the operating system's cache while every load waits for the medium: if writes that succeed
    closed the breaker again, requests would wait for loads in vain for ever. And what is on a full disk can still be loaded.

    Touches tell nothing: a tier that fails to note the use of chunks is not worse for that. They pass while look-ups do, but
    are no trials.

    Args:
        clock: monotonic time in seconds.
        config: when an access rests, and for how long.
    """

    def __init__(self, clock: Clock, config: BreakerConfig) -> None:
        self._breakers = {access: CircuitBreaker(clock, config) for access in Access}

    def __getitem__(self, access: Access) -> CircuitBreaker:
        """The breaker of one way of access."""
        return self._breakers[access]

    def of(self, kind: JobKind) -> CircuitBreaker:
        """The breaker of the access that a job of this kind is."""
        return self._breakers[ACCESS_OF[kind]]

    @property
    def can_be_read(self) -> bool:
        """Whether a request may look for chunks now, and load them."""
        return self._breakers[Access.LOOK_UP].would_admit() and self._breakers[Access.LOAD].would_admit()

    @property
    def can_be_relied_on(self) -> bool:
        """Whether look-ups and loads work, as far as is known."""
        return all(self._breakers[access].state is BreakerState.CLOSED for access in (Access.LOOK_UP, Access.LOAD))

    @property
    def worst_state(self) -> BreakerState:
        """The state of the breaker that lets the fewest jobs through."""
        states = {breaker.state for breaker in self._breakers.values()}
        return next(state for state in _WORST_FIRST if state in states)

    def admit(self, kind: JobKind) -> bool:
        """Let a job through if its breaker allows, and return whether it does. If so, call one ``note_*`` method at its end."""
        return self.of(kind).state is BreakerState.CLOSED if kind is JobKind.TOUCH else self.of(kind).admit()

    def note_success(self, kind: JobKind) -> None:
        """Note that a job was carried out."""
        if kind is not JobKind.TOUCH:
            self.of(kind).note_success()

    def note_failure(self, kind: JobKind) -> bool:
        """Note that a job failed or was late; return whether that opened its breaker."""
        return kind is not JobKind.TOUCH and self.of(kind).note_failure()

    def note_cancelled(self, kind: JobKind) -> None:
        """Note that a job ended without showing whether the medium works."""
        if kind is not JobKind.TOUCH:
            self.of(kind).note_cancelled()


_WORST_FIRST: Final = (BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED)
