"""Numbers and nouns in what commands say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from cargohold.cli.app import describe_reuse
from cargohold.engine.outputs import RequestMetrics
from cargohold.errors import BlockNotHeldError, OutOfBlocksError
from cargohold.lab.simulation.campaign import SeedReport
from tests.command import Command


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (RequestMetrics(1583, 1), "1,583 prompt tokens: 0 on the device, 1,583 computed"),
        (RequestMetrics(1, 1), "1 prompt token: 0 on the device, 1 computed"),
        (
            RequestMetrics(5000, 1, device_tokens=1024, restored_tokens={"host": 2048}),
            "5,000 prompt tokens: 1,024 on the device, 2,048 from host, 1,928 computed",
        ),
    ],
)
def test_all_numbers_of_a_line_are_written_alike(metrics: RequestMetrics, expected: str) -> None:
    assert describe_reuse(metrics) == expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (1, "1 seed, 1 step in .*\n  1 restart, 1 restored token, 1 turned off\n  faults: 1 raises"),
        (1200, "1 seed, 1,200 steps in .*\n  1,200 restarts, 1,200 restored tokens, 1,200 turned off\n"),
    ],
)
def test_of_one_thing_a_simulation_speaks_as_of_one(
    number: int, expected: str, cargohold: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def played(*_: object) -> Iterator[SeedReport]:
        names = ("restarts", "restored tokens", "turned off")
        yield SeedReport(5, number, None, Counter({"raises": number}), Counter(dict.fromkeys(names, number)))

    monkeypatch.setattr("cargohold.cli.simulate.play_seeds", played)
    result = cargohold("simulate", "--seeds", "1")
    assert result.status == 0
    head, tail = expected.split(".*")
    assert result.out.startswith(head) and tail in result.out


def test_errors_about_blocks_need_no_plurals() -> None:
    assert str(BlockNotHeldError(7, held=1, given_back=2)).startswith(
        "block 7: references given back: 2, but only 1 held;"
    )
    assert str(OutOfBlocksError(1, 0)) == "blocks requested: 1, free: 0"
