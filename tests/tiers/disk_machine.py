"""The disk tier on a bad medium."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from cargohold.errors import ConfigError
from cargohold.tiers import JobKind, LoadOutcome, StoreOutcome
from cargohold.tiers.chunk_format import ChunkCodec
from cargohold.tiers.disk import DiskTier
from cargohold.tiers.disk.root import bytes_in
from cargohold.tiers.inventory import Verification
from cargohold.tiers.kinds import open_inventory
from tests.tiers.bad_medium import (
    superuser,
)
from tests.tiers.common import codec, disk_tier
from tests.tiers.medium_machine import MOST_TRIES, NUM_KEYS, SECRET, MediumMachine, Port, Step, payload_of

BUDGETS = [200 * 1024, 400 * 1024, 1024**2]
DESCRIPTION_BYTES = 4 * 4096  # of all engines that come; no segment is so small


def taken(directory: Path) -> int:
    """Bytes of all files below a directory."""
    with superuser():
        return bytes_in(directory) if directory.is_dir() else 0


class DiskMachine(MediumMachine):
    """The disk tier of one or two workers."""

    def begin(self, random: Random) -> None:
        self.place = str(self.root)
        self.policy = random.choice(["lru", "arc", "reuse-index"])
        self.direct_io, self.has_queue = random.random() < 0.5, random.random() < 0.5
        self.secret = SECRET if random.random() < 0.3 else None
        self.max_bytes = random.choice(BUDGETS)
        self.ports = [None] * random.choice([1, 1, 2])
        self.chunk_sizes = random.choice([[], [len(payload_of(number)) for number in range(3)]])
        self.packs = random.random() < 0.5
        self.open_all(None, [])
        for port in self.ports:
            assert port is not None
            port.ask(JobKind.STORE, range(random.randrange(NUM_KEYS)))

    def codec_of(self, shard: int) -> ChunkCodec:
        return codec(self.secret, self.clock, packs=self.packs, split=f"rank {shard} of {len(self.ports)}")

    def make_one(self, at: int) -> DiskTier:
        return self.make(self.codec_of(at))

    def make(self, using: ChunkCodec) -> DiskTier:
        return disk_tier(
            self.root,
            self.max_bytes,
            using=using,
            num_shards=len(self.ports),
            policy=self.policy,
            direct_io=self.direct_io,
            chunk_sizes=self.chunk_sizes,
        )

    # --- what other processes do --------------------------------------------------------------------------------------

    def is_rivalled(self, random: Random) -> None:
        """Another engine wants the same."""
        shard = random.randrange(len(self.ports))
        try:
            tier = self.make(self.codec_of(shard))
        except ConfigError:
            return
        assert not self.is_held(shard), "two have the same files"
        rival = Port(tier, has_queue=False)
        rival.ask(JobKind.STORE, [3, 4])
        rival.ask(JobKind.LOAD, [2, 3, 4])
        rival.close()

    def is_held(self, shard: int) -> bool:
        """Whether a tier is open whose files are still where they were."""
        port = self.ports[shard]
        if port is None:
            return False
        assert isinstance(port.tier, DiskTier)
        return not port.tier._shard.is_deleted()

    def is_joined(self, random: Random) -> None:
        """An engine with another model comes and goes."""
        try:
            tier = self.make(codec(self.secret, self.clock, weights="other"))
        except ConfigError:
            return
        other = Port(tier, has_queue=False)
        for _ in range(3):
            other.ask(JobKind.STORE, random.sample(range(NUM_KEYS), 4))
        other.close()

    # --- rules --------------------------------------------------------------------------------------------------------

    def call(self, step: Step) -> None:
        random = Random(step.seed)
        port, kind, numbers = self.draw_call(random)
        with self.within_budget():
            answers = self.ask(port, kind, numbers, step.trouble, step.acts)
            if answers is None:
                del port
                self.die()
                return
        assert isinstance(port.tier, DiskTier)
        port.tier.check()
        if step.trouble is None and answers[-1] is StoreOutcome.STORED:
            assert port.ask(JobKind.LOAD, numbers[-1:]) == [LoadOutcome.LOADED], "what was just stored"
        if step.trouble is None and kind is JobKind.REMOVE:
            assert port.ask(JobKind.PROBE, numbers) == [False] * len(numbers)

    def reopen(self, step: Step) -> None:
        self.close()
        random = Random(step.seed)
        self.max_bytes, self.packs = random.choice(BUDGETS), random.random() < 0.5
        with self.within_budget():
            self.open_all(step.trouble, step.acts)

    def lose_power(self, step: Step) -> None:
        """Nothing was synchronised: of all that was written anything may be lost."""
        if self.has_queue:
            return
        self.die()
        self.lose_some(step)

    @contextmanager
    def within_budget(self) -> Iterator[None]:
        """What is called does not exceed the budget, nor makes it worse where others have but for a new description."""
        before, self.is_larger = taken(self.root), False
        yield
        after = taken(self.root)
        most = max(before + DESCRIPTION_BYTES + self.num_cut, self.max_bytes)
        # What may not be seen does not count.
        assert self.is_larger or after <= most or self.is_withdrawn, f"{after} bytes are too many"

    def settle(self) -> None:
        for at, port in enumerate(self.ports):
            if port is not None and self.is_held(at):  # else it is off until a restart
                self.takes_chunks_again(port)
        self.close()
        found = []
        for _ in range(2):
            self.open_all(None, [])
            found.append([self.loadable(port) for port in self.ports if port is not None])
            self.close()
        assert found[0] == found[1], "what was good is found again"
        assert self.root.is_dir() and taken(self.root) <= self.max_bytes
        inventory = open_inventory(self.place)
        holdings = {holding.id: holding for holding in inventory.holdings()}
        for shard, numbers in enumerate(found[0]):
            name = self.codec_of(shard).namespace.id
            assert list(inventory.verify(name, delete=False)) == [Verification.GOOD] * len(numbers)
            # Of a file with headers the end is not used; what damage leaves there seems to be one.
            assert (holdings[name].num_chunks or 0) >= len(numbers) and not holdings[name].is_in_use
        self.only_our_files()

    def loadable(self, port: Port) -> list[int]:
        numbers = [*range(NUM_KEYS), *range(1000, 1000 + MOST_TRIES)]
        return [number for number in numbers if port.ask(JobKind.LOAD, [number]) == [LoadOutcome.LOADED]]

    def only_our_files(self) -> None:
        for path in self.paths(files=True):
            assert path.name in {".lock", "lock", "shard.json", "shard.json.new"} or path.name.startswith("segment-")
