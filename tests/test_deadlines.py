"""The table of deadlines: all of them are in use, and what follows from the times that users choose."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import cargohold
from cargohold import OffloadConfig
from cargohold import deadlines as table
from cargohold.connector.factory import load_timeout_s
from cargohold.deadlines import DEFAULTS, END, REQUEST, TRANSFER, Timer
from cargohold.protocol import NULL_CONNECTOR
from cargohold.tiers.config import REQUEST_S

NAMES = {name: timer for name, timer in vars(table).items() if isinstance(timer, Timer)}


def test_the_table_lists_every_deadline_once() -> None:
    assert list(NAMES.values()) == list(table.TIMERS)


def test_every_deadline_in_the_table_is_kept_somewhere() -> None:
    source = Path(cargohold.__file__).parent
    code = "".join(file.read_text() for file in source.rglob("*.py") if file.name != "deadlines.py")
    assert [name for name in NAMES if not re.search(rf"\b{name}\b.*\.seconds\(", code)] == []


@pytest.mark.parametrize(
    ("offload", "expected"),
    [
        (None, 120.0),
        (NULL_CONNECTOR, 120.0),
        (OffloadConfig(host_bytes="1MiB"), 120.0),
        (OffloadConfig(host_bytes="1MiB", transfer_timeout_s=5), 70.0),
        (
            [OffloadConfig(host_bytes="1MiB", transfer_timeout_s=100), OffloadConfig(mode="lazy", host_bytes="1MiB")],
            260.0,
        ),
    ],
)
def test_an_engine_turns_a_connector_off_after_twice_what_a_copy_may_take(offload: object, expected: float) -> None:
    assert load_timeout_s(offload) == expected  # type: ignore[arg-type]  # of several kinds


def test_what_a_connector_does_about_a_late_copy_comes_before_it_is_turned_off() -> None:
    for transfer_timeout_s in (0.001, 30.0, 1e6):
        config = OffloadConfig(host_bytes="1MiB", transfer_timeout_s=transfer_timeout_s)
        assert transfer_timeout_s < END.seconds(transfer_timeout_s) < load_timeout_s(config)


def test_a_request_to_a_store_may_take_a_part_of_what_a_write_may_take() -> None:
    assert REQUEST_S == REQUEST.seconds(DEFAULTS[TRANSFER]) == 10.0
    assert REQUEST.seconds(6.0) == 2.0
