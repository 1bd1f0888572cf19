"""Tiers on a medium that goes bad at any operation: seeds of random steps, shortened when one fails."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from random import Random

import pytest

from tests.tiers.bad_medium import Kind, Trouble
from tests.tiers.disk_machine import DiskMachine
from tests.tiers.medium_machine import Act, MediumMachine, Step
from tests.tiers.shared_machine import SharedMachine

SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 40))]
NUM_STEPS = 40
ERRORS = [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EMFILE, errno.EROFS, errno.EDQUOT, errno.ESTALE, errno.ENOMEM]
DAMAGE = ["damages", "damages", "swaps", "removes", "moves", "moves_back", "replaces", "withdraws", "clutters"]
OTHERS = [
    "permits",
    "tidies",
    "forks",
    "ends_children",
    "jumps",
    "calls",
    "looks",
    "prunes",
    "is_rivalled",
    "is_joined",
]


def draw_act(random: Random) -> Act:
    return Act(random.choice(random.choice([DAMAGE, OTHERS])), random.randrange(1000))


def draw_trouble(random: Random) -> Trouble | None:
    if random.randrange(2):
        return None
    kind = random.choice([*Kind, *Kind, Kind.MEANWHILE, Kind.MEANWHILE])
    most = random.choice([3, 10, 30])
    return Trouble(kind, random.randrange(most), random.choice(ERRORS), random.choice([0.0, 0.4, 0.8, 1.0]))


def draw_step(random: Random) -> Step:
    what = random.choice(["call"] * 12 + ["somebody_else"] * 3 + ["reopen", "lose_power"])
    acts = tuple(draw_act(random) for _ in range(random.choice([1, 1, 2])))
    return Step(what, draw_trouble(random), acts, random.randrange(10**6))


def draw_steps(seed: int) -> list[Step]:
    random = Random(seed)
    return [draw_step(random) for _ in range(NUM_STEPS)]


def draw_damage(seed: int) -> list[Step]:
    """Calls, and files that are changed between them."""
    random = Random(seed)
    kinds = random.choices(["call", "call", "somebody_else"], k=NUM_STEPS)
    return [Step(what, None, (Act("damages", random.randrange(1000)),), random.randrange(10**6)) for what in kinds]


def play(make: Callable[[], MediumMachine], seed: int, steps: Sequence[Step]) -> None:
    """Everything from a world that a seed decides on."""
    with make() as machine:
        machine.begin(Random(seed))
        for step in steps:
            getattr(machine, step.what)(step)


def failure_of(make: Callable[[], MediumMachine], seed: int, steps: Sequence[Step]) -> Exception | None:
    try:
        play(make, seed, steps)
    except Exception as error:  # noqa: BLE001  # whatever escapes is what is looked for
        return error
    return None


def play_and_shorten(make: Callable[[], MediumMachine], seed: int) -> None:
    """Play a seed; if it fails, tell how with no step more than it takes."""
    steps = draw_steps(seed)
    failure = failure_of(make, seed, steps)
    if failure is None:
        return
    for at in reversed(range(NUM_STEPS)):
        fewer = [*steps[:at], *steps[at + 1 :]]
        if (simpler := failure_of(make, seed, fewer)) is not None:
            steps, failure = fewer, simpler
    told = "\n".join(map(str, steps))
    raise AssertionError(f"seed {seed} fails with these steps:\n{told}") from failure


@pytest.mark.parametrize("seed", SEEDS)
def test_a_disk_on_a_bad_medium_is_never_wrong(seed: int) -> None:
    play_and_shorten(DiskMachine, seed)


# An event loop that could not be made for want of files complains when it is forgotten.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_shared_directory_on_a_bad_medium_is_never_wrong(seed: int) -> None:
    play_and_shorten(SharedMachine, seed)


@pytest.mark.parametrize("make", [DiskMachine, SharedMachine])
def test_a_tier_without_checksums_is_found_out(
    make: Callable[[], MediumMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cargohold.tiers.chunk_format.payload_checksum", lambda _: bytes(16))
    failures = (failure_of(make, seed, draw_damage(seed)) for seed in range(40))
    assert any("wrong bytes" in str(failure) for failure in failures)
