"""Random steps of jobs, faults and damage for a tier on a medium that goes bad, and what must hold after each."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Self

from cargohold.errors import ConfigError, TierError
from cargohold.lab.simulation.faults import VirtualClock
from cargohold.tiers import JobKind, JobStatus, LoadOutcome, QueueConfig, StoreOutcome, Tier, TierJob, TierQueue
from cargohold.tiers.kinds import open_inventory
from cargohold.tiers.memory import PAGE_BYTES, padded
from tests.tiers.bad_medium import (
    WAIT_S,
    BadMedium,
    Crash,
    Kind,
    Trouble,
    is_superuser,
    open_files_in,
    ordinary_user,
    superuser,
)
from tests.tiers.common import CHUNK, key, payload

NUM_KEYS = 24
MOST_TRIES = 80
"""Stores until a tier whose medium is good again must have taken one: after a refusal it does not ask for room for a while."""
SECRET = bytes(range(32))
Answer = Any
seen: Counter[object] = Counter()
"""What came of calls, to tell whether all was played."""
KINDS = [JobKind.STORE] * 4 + [JobKind.LOAD] * 3 + [JobKind.REMOVE, JobKind.TOUCH, JobKind.PROBE]


@dataclass(frozen=True)
class Act:
    """What somebody else does: a call, or damage.

    Attributes:
        what: name of a method of the machine.
        seed: decides on the rest.
    """

    what: str
    seed: int


@dataclass(frozen=True)
class Step:
    """What is done next.

    Attributes:
        what: name of a method of the machine.
        trouble: what goes wrong meanwhile.
        acts: what somebody else does meanwhile, if that is the trouble.
        seed: decides on the rest.
    """

    what: str
    trouble: Trouble | None
    acts: tuple[Act, ...]
    seed: int


def payload_of(number: int) -> bytes:
    """Chunks are of several lengths."""
    return payload(number, CHUNK - 2900 * (number % 3))


class Clock:
    """The time of day, which jumps when told to."""

    def __init__(self) -> None:
        self.now_ns = 1_700_000_000 * 10**9

    def __call__(self) -> int:
        self.now_ns += 1
        return self.now_ns


class Port:
    """A tier as its user has it: by itself, or behind its queue."""

    def __init__(self, tier: Tier, *, has_queue: bool) -> None:
        self.tier = tier
        self.clock = VirtualClock()
        self.queue = TierQueue(tier, self.clock, QueueConfig(num_threads=1)) if has_queue else None
        self._num_jobs = 0

    def ask(self, kind: JobKind, numbers: Sequence[int]) -> list[Answer]:
        """What came of a call, per chunk; ``None`` where the medium failed. What was loaded must be what belongs there."""
        keys = [key(number) for number in numbers]
        chunks = [bytearray(payload_of(number)) for number in numbers]
        if kind is JobKind.LOAD:
            chunks = [bytearray(len(chunk)) for chunk in chunks]
        parents = [key(number - 1) if number % 6 else None for number in numbers]
        answers = (self._by_itself if self.queue is None else self._by_queue)(kind, keys, chunks, parents)
        for number, chunk, answer in zip(numbers, chunks, answers, strict=True):
            assert answer is not LoadOutcome.LOADED or chunk == payload_of(number), f"wrong bytes for {number}"
        return answers

    def _by_itself(
        self, kind: JobKind, keys: list[bytes], chunks: list[bytearray], parents: list[bytes | None]
    ) -> list[Answer]:
        match kind:
            case JobKind.LOAD | JobKind.STORE:
                return [self._one(kind, *one) for one in zip(keys, chunks, parents, strict=True)]
            case JobKind.PROBE:
                call: Callable[[list[bytes]], list[bool] | None] = self.tier.probe
            case JobKind.TOUCH:
                call = self.tier.touch
            case _:
                call = self.tier.remove
        try:
            return list(call(keys) or [True] * len(keys))
        except TierError:
            return [None] * len(keys)

    def _one(self, kind: JobKind, name: bytes, chunk: bytearray, parent: bytes | None) -> Answer:
        try:
            if kind is JobKind.LOAD:
                return self.tier.load(name, memoryview(chunk))
            return self.tier.store(name, memoryview(chunk), parent)
        except TierError:
            return None

    def _by_queue(
        self, kind: JobKind, keys: list[bytes], chunks: list[bytearray], parents: list[bytes | None]
    ) -> list[Answer]:
        assert self.queue is not None
        self._num_jobs += 1
        self.clock.advance(100.0)  # it may try again
        has_buffers = kind in {JobKind.LOAD, JobKind.STORE}
        job = TierJob(
            self._num_jobs,
            kind,
            keys,
            self.clock() + 10.0,
            [memoryview(chunk) for chunk in chunks] if has_buffers else [],
            parents if kind is JobKind.STORE else (),
        )
        if not self.queue.submit(job):
            assert kind is JobKind.TOUCH, "it takes a job when it had time to rest"
            return [None] * len(keys)
        assert self.queue.drain(WAIT_S), "a job does not end"
        (result,) = self.queue.poll()
        assert result.status in {JobStatus.DONE, JobStatus.FAILED}
        assert "Error" not in result.reason, "something else than the medium failed"
        return list(result.answers)

    def close(self) -> None:
        if self.queue is None:
            self.tier.close()
        else:
            self.queue.shutdown(WAIT_S)


class Complaints(logging.Handler):
    """What is logged of failures that nobody foresaw."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


class MediumMachine:
    """Files below a directory, and all that can be done to them from outside."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="cargohold-"))
        self.place = ""
        self.has_queue = False
        self.root, self.away = self.base / "kv", self.base / "away"
        self.stack = ExitStack()
        self.stack.enter_context(ordinary_user(self.base))
        self.away.mkdir()
        self.medium = BadMedium(self.root)
        self.stack.callback(self.medium.close)
        self.complaints = Complaints()
        logging.getLogger("cargohold").addHandler(self.complaints)
        self.stack.callback(logging.getLogger("cargohold").removeHandler, self.complaints)
        self.clock = Clock()
        self.ports: list[Port | None] = []
        self.moved: list[tuple[Path, Path]] = []
        self.obstacles: list[Path] = []
        self.foreign: list[Path] = []
        self.children: list[int] = []
        self.is_larger = False  # somebody put bytes there
        self.num_cut = 0  # bytes that were cut off files: they are written again
        self.num_things = 0
        gc.freeze()  # what is not of this run need not be looked through for files that are still open

    # --- what others do -----------------------------------------------------------------------------------------------

    def act(self, act: Act) -> None:
        """Let somebody else do something."""
        getattr(self, act.what)(Random(act.seed))

    def paths(self, *, files: bool = False) -> list[Path]:
        """Everything that is there."""
        with superuser():
            found = sorted(self.root.rglob("*")) if self.root.is_dir() else []
            return (
                [path for path in found if path.is_file() and not path.is_symlink()] if files else [self.root, *found]
            )

    def damages(self, random: Random) -> None:
        if paths := self.paths(files=True):
            with suppress(PermissionError):
                self.num_cut += damage(random, random.choice(paths))

    def swaps(self, random: Random) -> None:
        """Two files, with those that belong to them, have each other's contents."""
        paths = [path for path in self.paths(files=True) if "-" in path.name or not path.suffix]
        one = random.choice([*paths, self.root])
        other = random.choice([path for path in paths if path.suffix == one.suffix] or [self.root])
        if self.root in {one, other}:
            return
        self.is_larger = True
        for left in paths:
            right = other.with_suffix(left.suffix)
            if left.with_suffix("") == one.with_suffix("") and right in paths:
                with suppress(PermissionError):
                    contents = left.read_bytes()
                    left.write_bytes(right.read_bytes())
                    right.write_bytes(contents)

    def removes(self, random: Random) -> None:
        path = random.choice(self.paths())
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def moves(self, random: Random) -> None:
        path, self.num_things = random.choice(self.paths()), self.num_things + 1
        place = self.away / str(self.num_things)
        with suppress(OSError):
            path.rename(place)
            self.moved.append((path, place))

    def moves_back(self, random: Random) -> None:
        self.is_larger = True
        if self.moved:
            path, place = self.moved.pop(random.randrange(len(self.moved)))
            with suppress(OSError):
                if not path.exists():
                    place.rename(path)

    def replaces(self, random: Random) -> None:
        """Something else stands in the place of a file or directory."""
        path = random.choice(self.paths())
        self.obstacles.append(path)
        self.is_larger = True
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            match random.randrange(5):
                case 0:
                    path.mkdir()
                case 1:
                    (path / "full").mkdir(parents=True)
                case 2:
                    path.symlink_to(self.base / "no" / "where")
                case 3:
                    path.symlink_to(path.name)
                case _:
                    path.write_bytes(random.randbytes(random.choice([0, 300, 20_000])))

    def removes_all(self, path: Path) -> None:
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def withdraws(self, random: Random) -> None:
        path, modes = random.choice(self.paths()), [0, 0o500]
        if is_superuser() or not path.is_dir():  # who is not, cannot tell what is in such a directory
            modes.append(0o400)
        with suppress(OSError):
            path.chmod(random.choice(modes))

    def permits(self, _: Random) -> None:
        self.is_larger = True  # what could not be seen before counts again
        for directory in (self.root, self.away):
            permit(directory)

    def clutters(self, random: Random) -> None:
        path, self.num_things = self.root / f"foreign-{self.num_things}", self.num_things + 1
        self.is_larger = True
        with suppress(OSError):
            path.write_bytes(bytes(random.choice([1000, 50_000, 500_000])))
            self.foreign.append(path)

    def tidies(self, _: Random) -> None:
        for path in [*self.foreign, *self.obstacles]:
            self.removes_all(path)
        self.foreign.clear()
        self.obstacles.clear()

    def forks(self, random: Random) -> None:
        """A child has all our files open, or closes what it takes for its tier and goes."""
        closes = random.randrange(2) == 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # it does nothing that needs our threads
            child = os.fork()
        if not child:
            try:
                signal.alarm(int(WAIT_S))
                for port in self.ports if closes else []:
                    if port is not None:
                        port.tier.close()
                if not closes:
                    signal.pause()
            finally:
                os._exit(0)
        if closes:
            assert os.waitpid(child, 0)[1] == 0
            self.is_rivalled(random)
        else:
            self.children.append(child)

    def ends_children(self, _: Random) -> None:
        for child in self.children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self.children.clear()

    def jumps(self, random: Random) -> None:
        self.clock.now_ns = max(1, self.clock.now_ns + random.choice([-1, 1]) * 10 ** random.randrange(9, 18))

    def calls(self, random: Random) -> None:
        port = random.choice(self.ports)
        kind = random.choice([JobKind.LOAD, JobKind.STORE, JobKind.STORE, JobKind.REMOVE, JobKind.TOUCH])
        if port is not None and port.queue is None:
            port.ask(kind, random.sample(range(NUM_KEYS), 3))

    def looks(self, random: Random) -> None:
        """Somebody lists what is there, and verifies it."""
        with suppress(TierError, ConfigError):
            inventory = open_inventory(self.place)
            for holding in inventory.holdings():
                with suppress(TierError):
                    list(inventory.verify(holding.id, delete=random.randrange(2) == 0))

    def prunes(self, random: Random) -> None:
        with suppress(TierError, ConfigError):
            inventory = open_inventory(self.place)
            for holding in inventory.holdings():
                with suppress(TierError):
                    inventory.trim(holding.id, random.randrange(100_000))

    @property
    def is_withdrawn(self) -> bool:
        paths = self.paths()
        with superuser():
            return not all(path.stat().st_mode & 0o600 == 0o600 for path in paths if path.exists())

    # --- calls --------------------------------------------------------------------------------------------------------

    def meanwhile(self, acts: Sequence[Act]) -> Callable[[], None]:
        def run() -> None:
            for act in acts:
                self.act(act)

        return run

    def ask(
        self, port: Port, kind: JobKind, numbers: Sequence[int], trouble: Trouble | None, acts: Sequence[Act]
    ) -> list[Answer] | None:
        """What came of a call; ``None`` if the process died in it."""
        if port.queue is not None and trouble is not None and trouble.kind is Kind.DIES:
            trouble = replace(trouble, kind=Kind.BREAKS)
        try:
            with self.medium.during(trouble, self.meanwhile(acts)):
                answers = port.ask(kind, numbers)
        except Crash:
            seen["crash"] += 1
            return None
        seen.update((kind, answer) for answer in answers)
        if self.medium.has_struck and trouble is not None:
            seen[trouble.kind] += 1
        assert not self.complaints.texts
        return answers

    def somebody_else(self, step: Step) -> None:
        self.act(step.acts[0])

    def lose_some(self, step: Step) -> None:
        """Nothing was synchronised: a third of the files is not what was written."""
        random = Random(step.seed)
        for path in self.paths(files=True):
            if random.randrange(3) == 0:
                with suppress(PermissionError):
                    self.num_cut += damage(random, path)

    def draw_call(self, random: Random) -> tuple[Port, JobKind, list[int]]:
        """Who is asked for what of which keys; opened before, if need be."""
        at = random.randrange(len(self.ports))
        kind, numbers = random.choice(KINDS), random.sample(range(NUM_KEYS), random.randint(1, 4))
        if self.ports[at] is None:
            self.recover()
            self.open_all(None, [])
        port = self.ports[at]
        assert port is not None
        return port, kind, numbers

    def open_all(self, trouble: Trouble | None, acts: Sequence[Act]) -> None:
        """Open what is not open. It may be refused only while there is trouble."""
        if trouble is not None and trouble.kind is Kind.DIES and self.has_queue:
            trouble = None
        for at in range(len(self.ports)):
            if self.ports[at] is None:
                refusal = self.open_one(at, trouble, acts)
                may_fail = trouble is not None or self.obstacles or self.is_withdrawn
                assert not refusal or may_fail, f"it can be opened: {refusal}"

    def open_one(self, at: int, trouble: Trouble | None, acts: Sequence[Act]) -> str | None:
        """Open one worker's shard; why not, if it cannot be."""
        try:
            with self.medium.during(trouble, self.meanwhile(acts)):
                tier = self.make_one(at)
        except ConfigError as error:
            seen["not opened"] += 1
            return str(error)
        except Crash:
            seen["crash while opening"] += 1
            self.die()
        else:
            self.ports[at] = Port(tier, has_queue=self.has_queue)
        return None

    def make_one(self, at: int) -> Tier:
        raise NotImplementedError

    def is_rivalled(self, random: Random) -> None:
        raise NotImplementedError

    def die(self) -> None:
        """As after ``kill -9``: files are closed and locks gone, and nothing else was done."""
        self.ends_children(Random(0))
        assert not self.has_queue
        self.ports = [None] * len(self.ports)
        gc.collect()

    def close(self) -> None:
        for port in self.ports:
            if port is not None:
                port.close()
        self.ports = [None] * len(self.ports)

    def recover(self) -> None:
        """No trouble any more."""
        random = Random(0)
        self.ends_children(random)
        self.permits(random)
        self.tidies(random)

    def takes_chunks_again(self, port: Port, first: int = 1000) -> None:
        port.ask(JobKind.LOAD, range(NUM_KEYS))
        for number in range(first, first + MOST_TRIES):
            (answer,) = port.ask(JobKind.STORE, [number])
            assert answer in {StoreOutcome.STORED, StoreOutcome.REFUSED}, "the medium is good"
            if answer is StoreOutcome.STORED:
                assert port.ask(JobKind.LOAD, [number]) == [LoadOutcome.LOADED]
                break
        else:
            raise AssertionError("it takes nothing any more")
        for number in range(NUM_KEYS):
            outcome = port.tier.store(key(number), memoryview(payload_of(number)))
            assert outcome is not StoreOutcome.REFUSED, f"it takes no {number} any more"

    def settle(self) -> None:
        raise NotImplementedError

    def begin(self, random: Random) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self.stack:
                self.recover()
                if kind is None:
                    self.settle()
                    assert not self.complaints.texts
            if kind is None:
                gc.collect()
                assert not open_files_in(self.base)
        finally:
            self.close()  # what has failed may have left threads
            gc.unfreeze()
            shutil.rmtree(self.base)


def damage(random: Random, path: Path) -> int:
    """Change a file's bytes or length; how many bytes were cut off, on the disk."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        at = random.randrange(size) if size else 0
        length = min(random.choice([1, 300, 9000]), size - at)
        match random.randrange(5):
            case 0 | 1:
                file.seek(at)
                file.write(random.randbytes(length))
            case 2:
                file.seek(at)
                file.write(bytes(length))
            case 3:
                file.truncate(at)
                return padded(size - at) + PAGE_BYTES
            case _:
                file.truncate(0)
                return padded(size)
    return 0


def permit(directory: Path) -> None:
    """All below it may be used by its owner again."""
    if directory.is_dir() and not directory.is_symlink():
        directory.chmod(0o700)
        for path in list(directory.iterdir()):
            if not path.is_symlink():
                path.chmod(0o700 if path.is_dir() else 0o600)
                permit(path)
