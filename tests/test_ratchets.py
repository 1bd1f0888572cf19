"""What the code costs does not rise without a word: instructions, calls, files and types on the way of a chunk, statements."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import ratchets

HELD = json.loads(ratchets.FILE.read_text(encoding="utf-8"))


def test_nothing_costs_more_than_it_may() -> None:
    # In a process of its own, where nothing has been computed and kept before.
    counted = subprocess.run(
        [sys.executable, "-m", "benchmarks.ratchets"],
        cwd=ratchets.FILE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = counted.stderr.partition("risen:")[2] or counted.stderr
    assert counted.returncode == 0, (
        f"{lines}\npay for it; or raise it with `python -m benchmarks.ratchets --raise`, and say why in the commit's message"
    )


@pytest.mark.parametrize("kind", HELD)
def test_each_kind_of_number_is_held(kind: str) -> None:
    name, number = next(iter(HELD[kind].items()))
    if kind in ratchets.PER_VERSION and sys.version_info[:2] != ratchets.PYTHON:
        pytest.skip(f"counted in Python {'.'.join(map(str, ratchets.PYTHON))} alone: others have other instructions")
    assert ratchets.risen(HELD, {kind: {name: number}}) == []
    assert ratchets.risen(HELD, {kind: {name: number * 1.02}}) == [
        f"{kind} of {name}: {number * 1.02}, and {number} holds"
    ]
    assert ratchets.risen(HELD, {kind: {"another": 1}}) == [f"{kind} of another: 1, which is new"]


def test_what_has_fallen_is_held_from_then_on_and_what_has_risen_only_if_asked_for() -> None:
    held = {"size": {"package": 100}, "files": {"look-up": 8}}
    ratchets.write(held, {"size": {"package": 90}, "files": {"look-up": 9}}, also_risen=False)
    assert held == {"size": {"package": 90}, "files": {"look-up": 8}}
    ratchets.write(held, {"files": {"look-up": 9}}, also_risen=True)
    assert held["files"] == {"look-up": 9}
