"""A log that somebody else could fill stays short, and says that it leaves warnings out."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from cargohold.errors import NUM_TOLD, SparingLog

logger = logging.getLogger(__name__)


def test_the_first_are_told_one_by_one_and_then_each_doubling(caplog: pytest.LogCaptureFixture) -> None:
    log = SparingLog(logger)
    for number in range(1, 101):
        log.warning("request %d is refused", number)
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [
        *range(1, NUM_TOLD + 1),
        16,
        32,
        64,
    ]
    assert caplog.messages[NUM_TOLD - 2] == "request 7 is refused"
    assert caplog.messages[NUM_TOLD - 1] == (
        "request 8 is refused (warning 8 of this kind; the next one logged is number 16)"
    )
    assert {record.filename for record in caplog.records} == {"test_sparing_log.py"}, "the line of the caller is lost"


def test_each_log_counts_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(100):
        SparingLog(logger).warning("once")
    assert len(caplog.messages) == 100


def test_warnings_of_several_threads_are_counted_once_each(caplog: pytest.LogCaptureFixture) -> None:
    log = SparingLog(logger)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: log.warning("again"), range(1024)))
    assert len(caplog.messages) == NUM_TOLD + 7
