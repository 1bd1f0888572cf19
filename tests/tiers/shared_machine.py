"""A shared directory on a bad medium."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from random import Random

from cargohold.errors import ConfigError
from cargohold.tiers import JobKind, LoadOutcome, StoreOutcome, Tier
from cargohold.tiers.chunk_format import HEADER_BYTES, ChunkCodec
from cargohold.tiers.inventory import Verification
from cargohold.tiers.kinds import open_inventory
from cargohold.tiers.stores.directory import LEFT_AFTER_S
from tests.tiers.bad_medium import Trouble, superuser
from tests.tiers.common import CHUNK, codec, shared_tier
from tests.tiers.medium_machine import MOST_TRIES, NUM_KEYS, SECRET, Act, MediumMachine, Port, Step


class SharedMachine(MediumMachine):
    """Engines that share a directory, with a limit or without; they may be of two models."""

    def begin(self, random: Random) -> None:
        self.place = f"file://{self.root}"
        self.secret = SECRET if random.random() < 0.3 else None
        self.has_queue = random.random() < 0.5
        self.limit = random.choice([None, 60_000, 120_000, 200_000])
        self.num_engines = random.choice([1, 2, 2])
        self.ports = [None] * self.num_engines
        self.packs = random.random() < 0.5
        self.open_all(None, [])
        for port in self.ports:
            assert port is not None
            port.ask(JobKind.STORE, range(random.randrange(NUM_KEYS)))

    def make_one(self, at: int) -> Tier:
        return self.make(codec(self.secret, self.clock, packs=self.packs is (at == 0)))

    def open_all(self, trouble: Trouble | None, acts: Sequence[Act]) -> None:
        super().open_all(trouble, acts)
        self.home = self.identity()

    def identity(self) -> int | None:
        with superuser():
            return self.root.stat().st_ino if self.root.is_dir() else None

    def make(self, using: ChunkCodec) -> Tier:
        return shared_tier(self.place, using, max_bytes=self.limit)

    def is_joined(self, random: Random) -> None:
        """An engine with another model comes and goes."""
        try:
            other = Port(self.make(codec(self.secret, self.clock, weights="other")), has_queue=False)
        except ConfigError:
            return
        other.ask(JobKind.STORE, random.sample(range(NUM_KEYS), 4))

    def is_rivalled(self, random: Random) -> None:
        """Another process stops in the middle of a chunk, now or long ago."""
        names = sorted(self.root.glob("*/*/*"))
        with suppress(OSError, IndexError):
            name = random.choice(names)
            left = name.with_name(f"{name.name.partition('#')[0]}#{random.randrange(3)}")
            left.write_bytes(random.randbytes(random.randrange(CHUNK)))
            self.is_larger = True
            if random.randrange(2):
                os.utime(left, (1, 1))

    def call(self, step: Step) -> None:
        random = Random(step.seed)
        port, kind, numbers = self.draw_call(random)
        with self.within_limit():
            answers = self.ask(port, kind, numbers, step.trouble, step.acts)
        if answers is None:
            self.die()
            return
        is_there = self.home is not None and self.home == self.identity()  # else nothing is kept there until a restart
        is_calm = step.trouble is None and not self.obstacles and not self.is_withdrawn and is_there
        if is_calm and kind is not JobKind.TOUCH:  # while look-ups are suspended it is not told what is used
            assert None not in answers, "the medium is good"
        if step.trouble is None and answers[-1] is StoreOutcome.STORED:
            assert port.ask(JobKind.LOAD, numbers[-1:]) == [LoadOutcome.LOADED], "what was just stored"
        if step.trouble is None and kind is JobKind.LOAD:
            for number, answer in zip(numbers, answers, strict=True):
                stays = answer is LoadOutcome.CORRUPT and self.is_withdrawn  # it may not be deleted
                if answer in {LoadOutcome.CORRUPT, LoadOutcome.ABSENT} and not stays:
                    assert port.ask(JobKind.PROBE, [number]) == [False], "the next store replaces it"

    def reopen(self, step: Step) -> None:
        self.close()
        self.limit = Random(step.seed).choice([None, 60_000, 120_000, 200_000])
        self.open_all(step.trouble, step.acts)

    def lose_power(self, step: Step) -> None:
        self.lose_some(step)

    @contextmanager
    def within_limit(self) -> Iterator[None]:
        """Chunks do not exceed the limit: each engine but one may, by what it writes between two looks."""
        before, self.is_larger = self.num_chunk_bytes(), False
        yield
        if self.limit is not None:
            slack = len(self.ports) * (self.limit // 16 + CHUNK + HEADER_BYTES)
            after = self.num_chunk_bytes()
            assert self.is_larger or after <= max(before, self.limit) + slack, f"{after} bytes of chunks are too many"

    def num_chunk_bytes(self) -> int:
        paths = [path for path in self.paths(files=True) if path.parent.parent.parent == self.root]
        with superuser():
            return sum(path.stat().st_size for path in paths if "#" not in path.name)

    def settle(self) -> None:
        for path in self.paths(files=True):
            os.utime(path, (path.stat().st_mtime - 2 * LEFT_AFTER_S,) * 2)
        for at, port in enumerate(self.ports):
            if port is not None and self.home == self.identity():
                self.takes_chunks_again(port, 1000 * (at + 1))
        self.close()
        self.ports = self.ports[:1]
        self.open_all(None, [])
        (port,) = self.ports
        assert port is not None
        self.takes_chunks_again(port, first=3000)
        numbers = [
            *range(NUM_KEYS),
            *range(1000, 1000 + MOST_TRIES),
            *range(2000, 2000 + MOST_TRIES),
            *range(3000, 3000 + MOST_TRIES),
        ]
        good = [number for number in numbers if port.ask(JobKind.LOAD, [number]) == [LoadOutcome.LOADED]]
        inventory, name = open_inventory(self.place), codec(self.secret).namespace.id
        assert list(inventory.verify(name, delete=False)) == [Verification.GOOD] * len(good)
        assert [holding.num_chunks for holding in inventory.holdings() if holding.id == name] == [len(good)]
        if self.limit is not None:
            assert self.num_chunk_bytes() <= self.limit
            assert not list(self.root.rglob("*#*"))
        inventory.remove(name)
        assert not [path for path in self.paths(files=True) if path.parts[-3] == name]
        self.close()
