"""``kill -9`` at any moment: what is found afterwards is right, within budget, and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from random import Random

import pytest

from cargohold.tiers import LoadOutcome, StoreOutcome
from cargohold.tiers.disk import files as disk_files
from cargohold.tiers.disk.root import bytes_in
from tests.tiers.common import codec, disk_tier, key, load, payload
from tests.tiers.crash import MAX_BYTES, NUM_KEYS

NUM_KILLS = 6
PACKS = ["none", "exponent"]
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("mode", ["direct", "buffered"])
@pytest.mark.parametrize("pack", PACKS)
def test_killed_at_random_moments(tmp_path: Path, mode: str, pack: str) -> None:
    random = Random(mode + pack)
    restored = []
    command = [sys.executable, "-m", "tests.tiers.crash"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        for seed in range(NUM_KILLS):
            run_and_kill(parent, f"{tmp_path} {mode} {pack} {seed}", random.uniform(0.0, 0.1))
            assert bytes_in(tmp_path) <= MAX_BYTES
            restored.append(check_contents(tmp_path, mode))
        assert parent.stdin
        parent.stdin.close()
    assert max(restored) > 20, "the processes were killed before they had done anything"


def run_and_kill(parent: subprocess.Popen[str], line: str, after_s: float) -> None:
    assert parent.stdin and parent.stdout
    parent.stdin.write(f"{line}\n")
    parent.stdin.flush()
    child = int(parent.stdout.readline())
    timer = threading.Timer(after_s, os.kill, [child, signal.SIGKILL])
    timer.start()
    assert parent.stdout.readline() == f"ended {-signal.SIGKILL}\n", "a process loaded something wrong"
    timer.join()


def check_contents(directory: Path, mode: str) -> int:
    """Not even a damaged chunk may be there: a crash leaves a good one or none."""
    tier = disk_tier(directory, MAX_BYTES, direct_io=mode == "direct")
    tier.check()
    found = tier.probe([key(number) for number in range(NUM_KEYS)])
    for number, is_there in enumerate(found):
        assert load(tier, number) == (payload(number) if is_there else LoadOutcome.ABSENT)
    tier.close()
    return sum(found)


class Crash(BaseException):
    """Ends a call as a power cut would: nothing after it happens."""


STEPS = ["write_header", "write_payload"]


@pytest.mark.parametrize("step", range(3))
@pytest.mark.parametrize("is_torn", [False, True])
@pytest.mark.parametrize("pack", PACKS)
def test_a_store_that_ends_between_any_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, is_torn: bool, pack: str
) -> None:
    tier = disk_tier(tmp_path, MAX_BYTES, using=codec(packs=pack == "exponent"))
    number = 0
    while tier.usage().num_bytes < (tier.usage().capacity_bytes or 0):
        assert tier.store(key(number), memoryview(payload(number))) is StoreOutcome.STORED
        number += 1
    before = number
    steps = iter(range(3))
    originals = {name: getattr(disk_files.Segment, name) for name in STEPS}

    def crashing(name: str):  # type: ignore[no-untyped-def]  # stands in for two methods
        def method(self: disk_files.Segment, slot: int, *data: bytes) -> None:
            if next(steps) != step:
                originals[name](self, slot, *data)
                return
            if is_torn and name == "write_payload":
                torn = bytes(data[0])[: len(data[0]) // 2]
                originals[name](self, slot, memoryview(torn))
            raise Crash

        return method

    with monkeypatch.context() as patch:
        for name in STEPS:
            patch.setattr(disk_files.Segment, name, crashing(name))
        with pytest.raises(Crash):
            tier.store(key(before), memoryview(payload(before)))
    tier.close()
    tier = disk_tier(tmp_path, MAX_BYTES)
    tier.check()
    # Its victim, the oldest, is whole or gone; the new one is not there; the others are as they were.
    assert load(tier, 0) == (payload(0) if step == 0 else LoadOutcome.ABSENT)
    assert load(tier, before) is LoadOutcome.ABSENT
    assert all(load(tier, other) == payload(other) for other in range(1, before))


def test_a_segment_that_was_not_made_whole_is_made_anew(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path, MAX_BYTES)
    for number in range(3):
        tier.store(key(number), memoryview(payload(number)))
    tier.close()
    (shard,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (shard / "segment-00001.headers").write_bytes(b"")
    (shard / "segment-00002.data").write_bytes(bytes(5))
    (shard / "shard.json.new").write_text("{")
    tier = disk_tier(tmp_path, MAX_BYTES)
    tier.check()
    for number in range(80):
        tier.store(key(number), memoryview(payload(number)))
        assert bytes_in(tmp_path) <= MAX_BYTES
    assert load(tier, 79) == payload(79)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"slot_bytes": "many", "slots_per_segment": 3}', '{"slot_bytes": -1}']
)
def test_a_damaged_description_costs_the_contents_and_nothing_else(tmp_path: Path, text: str) -> None:
    tier = disk_tier(tmp_path, MAX_BYTES)
    tier.store(key(1), memoryview(payload(1)))
    tier.close()
    (description,) = tmp_path.glob("*/shard.json")
    description.write_text(text)
    tier = disk_tier(tmp_path, MAX_BYTES)
    assert load(tier, 1) is LoadOutcome.ABSENT
    assert tier.store(key(1), memoryview(payload(1))) is StoreOutcome.STORED
    tier.close()
    assert load(disk_tier(tmp_path, MAX_BYTES), 1) == payload(1)
