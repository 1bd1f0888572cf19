"""A circuit breaker: a medium that keeps failing is left alone for a while, so that it costs misses and not waiting.

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
    """Whether work is let through."""

    CLOSED = "closed"
    """All of it."""
    OPEN = "open"
    """None of it."""
    HALF_OPEN = "half-open"
    """One job at a time, as a trial."""


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """When to give up, and for how long.

    Attributes:
        failures_to_open: failures in a row that open the breaker.
        cooldown_s: time until the first trial.
        max_cooldown_s: the cooldown doubles with every failed trial up to this.
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
    """Counts failures and decides what is let through. Not thread-safe: its owner holds a lock.

    Args:
        clock: monotonic time in seconds.
        config: when to give up, and for how long.
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
        """Whether work is let through now."""
        if self._state is BreakerState.OPEN and self._clock() >= self._retry_at:
            self._state, self._has_trial = BreakerState.HALF_OPEN, False
        return self._state

    def would_admit(self) -> bool:
        """Whether a job would be let through."""
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._has_trial)

    def may_ask(self, kind: JobKind) -> bool:
        """Whether a job that does not reach the medium is let through. None of the ``note_*`` methods must follow for it.

        While a trial is awaited, a tier is asked what it has, or no load would ever be the trial; there is no use in telling
        it what was used.
        """
        return self.state is BreakerState.CLOSED or (kind is JobKind.PROBE and self.would_admit())

    def admit(self) -> bool:
        """Let a job through if the state allows; exactly one of the ``note_*`` methods must follow for it."""
        if not self.would_admit():
            return False
        self._has_trial = self._state is BreakerState.HALF_OPEN
        return True

    def note_success(self) -> None:
        """A job was carried out: the medium lives."""
        if self.state is not BreakerState.OPEN:  # a success from before it opened says nothing
            self._state = BreakerState.CLOSED
            self._failures = 0
            self._cooldown_s = self._config.cooldown_s

    def note_failure(self) -> bool:
        """A job failed, or was late; whether that opened the breaker."""
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
        """A job ended without telling anything of the medium."""
        self._has_trial = False
