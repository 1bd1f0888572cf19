"""A circuit breaker: a tier whose medium keeps failing rests for a while, so that it costs misses instead of waits.

::

    CLOSED --several failures in a row--> OPEN --cooldown over--> HALF_OPEN --trial succeeds--> CLOSED
                                            ^                        |
                                            +---- trial fails -------+   (the next cooldown is twice as long)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cargohold.errors import ConfigError
from cargohold.offload.tier.jobs import JobKind
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

    def may_ask(self, kind: JobKind) -> bool:
        """Whether a job that does not reach the medium is let through. Call none of the ``note_*`` methods for such a job.

        While a trial is due, probes pass, because without them no load would ever become the trial. Touches do not: there is
        no use in telling the tier what was used.
        """
        return self.state is BreakerState.CLOSED or (kind is JobKind.PROBE and self.would_admit())

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
