"""Deadlines: every one of them in one table, the times that users choose, and the two clocks.

Users choose three times: ``restore_timeout_s``, ``transfer_timeout_s`` and ``shutdown_timeout_s``. What else takes time follows
from one of them, or is the same for everyone. A deadline is decided here, and kept where its constant is used.

There are two clocks. *System* is the process's monotonic time: workers, threads, starts and stops have nothing else. *Engine*
is ``SteppedClock`` of lower tiers, which stands still while the engine does not step: what ended meanwhile is reported only in
the next steps. For the same reason, what the scheduler waits for is overdue only if it is found so in several steps
(``Patience``), and what is held for a request is held for some steps at least (``HoldTime``), however long they take.

How often something is tried again, and how old a measurement may be, is no deadline; that stands next to what does it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

RESTORE: Final = "restore_timeout_s"
TRANSFER: Final = "transfer_timeout_s"
SHUTDOWN: Final = "shutdown_timeout_s"
DEFAULTS: Final = {RESTORE: 5.0, TRANSFER: 30.0, SHUTDOWN: 3.0}
"""The times that users choose, in seconds."""
MAX_SHUTDOWN_S: Final = 20.0
"""Maximum of ``shutdown_timeout_s``. Engines kill workers that have not stopped by themselves: the embedded one after 30 s."""

SYSTEM: Final = "system"
ENGINE: Final = "engine"
MIN_LOOKS: Final = 4
"""Looks at which something must be overdue: more than the steps in flight, so an end that happened is reported by then."""
HOLD_STEPS: Final = 8
"""Steps for which something is held at least: what one step begins is reported one or two steps later."""


@dataclass(frozen=True, slots=True)
class Timer:
    """One deadline.

    Attributes:
        what: what must not take longer.
        then: what happens if it does.
        clock: by which clock.
        of: the time of the users from which it follows; empty if it is the same for everyone.
        part: which part of that time it is.
        plus_s: seconds beyond that.
        steps: number of the engine's steps that must have passed as well.
    """

    what: str
    then: str
    clock: str
    of: str = ""
    part: float = 1.0
    plus_s: float = 0.0
    steps: int = 0

    def seconds(self, chosen: float = 0.0) -> float:
        """Return the seconds, given the time that the user has chosen."""
        return self.part * chosen + self.plus_s


# --- the table --------------------------------------------------------------------------------------------------------

WAIT: Final = Timer(
    "a request waits for lower tiers, counting steps in which the engine has room for it, each as half of this at most",
    "missing chunks are computed",
    ENGINE,
    RESTORE,
)
ESTIMATE: Final = Timer("a load from a lower tier, by its estimate", "it is not started", ENGINE, RESTORE, part=0.5)
FETCHED: Final = Timer(
    "chunks that were fetched for a request, from when it asks until it is admitted",
    "they may be evicted; the request starts over",
    ENGINE,
    RESTORE,
    part=2.0,
)
HOLD: Final = Timer(
    "blocks of an ended request, until they are stored",
    "they are released, stored or not",
    SYSTEM,
    RESTORE,
    steps=HOLD_STEPS,
)
PROMISE: Final = Timer(
    "a chunk promised to another engine, until it is written",
    "the promise is broken",
    ENGINE,
    RESTORE,
    steps=HOLD_STEPS,
)
START: Final = Timer(
    "a copy between device and host memory until a worker starts it",
    "it is abandoned: a load is a miss, a store is offered again",
    SYSTEM,
    TRANSFER,
)
END: Final = Timer(
    "a copy until all workers have ended it",
    "a load counts as failed and its tokens are computed in other blocks; its blocks stay out of service until it ends",
    SYSTEM,
    TRANSFER,
    plus_s=30.0,
    steps=MIN_LOOKS,
)
CONNECTOR: Final = Timer(
    "a load, or an answer that a request waits for, until the engine has it",
    "the connector is turned off",
    SYSTEM,
    TRANSFER,
    part=2.0,
    plus_s=60.0,
    steps=MIN_LOOKS,
)
WRITE: Final = Timer("a write to a lower tier", "it counts as failed", SYSTEM, TRANSFER)
REQUEST: Final = Timer(
    "one request to a shared store, to the last byte of its answer", "it counts as failed", SYSTEM, TRANSFER, part=1 / 3
)
FINISH: Final = Timer("writes to lower tiers when the workers stop", "they are abandoned", SYSTEM, SHUTDOWN)
STOP: Final = Timer(
    "a tier's threads until they have stopped, unless ``shutdown_timeout_s`` is longer",
    "the tier is left open",
    SYSTEM,
    plus_s=5.0,
)
CLOSE: Final = Timer(
    "closing a tier's files, when stopping has taken all of that", "they are left open", SYSTEM, plus_s=1.0
)
ANSWER: Final = Timer(
    "a tier's directory, when a start looks at it before it loads the model", "the start fails", SYSTEM, plus_s=60.0
)
LOCK: Final = Timer(
    "a start, while another process uses the same files of a disk tier, as one that is being replaced",
    "it fails",
    SYSTEM,
    plus_s=20.0,
)
MOVE: Final = Timer(
    "a start, while it moves chunks because ``max_bytes`` of a disk tier is lower than before",
    "chunks that were not moved are deleted",
    SYSTEM,
    plus_s=60.0,
)
ROOM: Final = Timer(
    "another process that makes or deletes files in a disk tier's directory",
    "no files are added, and it is tried again later",
    SYSTEM,
    plus_s=60.0,
)
GROWTH: Final = Timer(
    "a store, while another one makes a disk tier's files larger", "it is offered again", SYSTEM, plus_s=1.0
)
SLEEP: Final = Timer(
    "copies in flight when the engine puts the device's memory to sleep",
    "the connector is turned off when they have ended",
    SYSTEM,
    plus_s=10.0,
)
AHEAD: Final = Timer(
    "a prefetch hint without ``deadline_s``", "it ends with the chunks that have arrived", ENGINE, plus_s=30.0
)
SETTLE: Final = Timer(
    "an idle engine keeps stepping while chunks are written", "the rest waits for work", ENGINE, plus_s=5.0
)
PROGRESS: Final = Timer(
    "an idle engine keeps stepping while no job of a tier ends",
    "jobs are checked with the next work",
    ENGINE,
    plus_s=3.0,
)

TIMERS: Final = (
    WAIT, ESTIMATE, FETCHED, HOLD, PROMISE, START, END, CONNECTOR, WRITE, REQUEST, FINISH, STOP, CLOSE, ANSWER, LOCK, MOVE,
    ROOM, GROWTH, SLEEP, AHEAD, SETTLE, PROGRESS,
)  # fmt: skip


# --- deciding that something takes too long ---------------------------------------------------------------------------

MAX_GRACE_S: Final = 1.0
"""Longest time in seconds for which something must stay overdue after it was first found so."""


class Patience:
    """Distinguishes something that does not end from something that ended unobserved.

    A caller that looks once a step may be away for minutes: no step is needed, or the process was stopped for a while. A job
    that is overdue at the first look after that has probably ended long ago, and the next steps will report it. So the job
    must be found overdue again, at ``MIN_LOOKS`` looks and for a grace time.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._overdue: Hashable = None
        self._since = 0.0
        self._num_looks = 0

    def has_run_out(self, overdue: Hashable, limit_s: float) -> bool:
        """Whether ``overdue`` has been overdue at enough looks and for long enough. Call it at each look, at most once a step.

        Args:
            overdue: identifies what is overdue now, the oldest of several; ``None`` if nothing is.
            limit_s: time in seconds after which the caller calls something overdue. The grace time is a tenth of it, but not
                more than ``MAX_GRACE_S``.
        """
        if overdue is None:
            self._overdue = None
            return False  # nearly always
        now = self._clock()
        if overdue != self._overdue:
            self._overdue, self._since, self._num_looks = overdue, now, 0
        self._num_looks += 1
        has_waited = now - self._since >= min(MAX_GRACE_S, limit_s / 10)
        return self._num_looks >= MIN_LOOKS and has_waited


# --- holding something for a request -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of a wait: ``at`` seconds of the engine's clock, but not before so many ``steps`` of the engine."""

    at: float
    steps: int


class HoldTime:
    """How long something is held.

    Args:
        clock: monotonic time in seconds.
        hold_s: seconds for which things are held, unless that is less than ``HOLD_STEPS`` steps.
    """

    def __init__(self, clock: Callable[[], float], hold_s: float) -> None:
        self._clock = clock
        self._hold_s = hold_s
        self._num_steps = 0

    def note_step(self) -> None:
        """Count a step. Call it once in every step."""
        self._num_steps += 1

    def deadline(self) -> Deadline:
        """Return until when something that begins now is held."""
        return Deadline(self._clock() + self._hold_s, self._num_steps + HOLD_STEPS)

    def has_passed(self, deadline: Deadline) -> bool:
        return self._num_steps >= deadline.steps and self._clock() >= deadline.at
