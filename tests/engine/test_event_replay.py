"""Followers that ask for what they have missed, all at once, and do not read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

from cargohold.engine.events import ReplayBuffer, ReplayServer

zmq = pytest.importorskip("zmq", reason="publishing events needs the extra cargohold[events]")

NUM_MESSAGES = 10_000
PAYLOAD = bytes(6_500)
"""All of them together are as many bytes as are kept at most."""
NUM_IDLE = 12
PATIENCE_MS = 60_000


@pytest.fixture
def replays() -> Iterator[ReplayServer]:
    buffer = ReplayBuffer(all_cleared=b"forget")
    for at in range(NUM_MESSAGES):
        buffer.add(at, PAYLOAD)
    server = ReplayServer("tcp://127.0.0.1:*", buffer, b"kv", patience_s=3600.0)
    yield server
    server.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def follower(server: ReplayServer, stack: ExitStack, *, takes: int = 10) -> Any:
    """A follower whose end holds as many messages that were not read."""
    dealer = stack.enter_context(zmq.Context.instance().socket(zmq.DEALER))
    for option, value in ((zmq.RCVHWM, takes), (zmq.RCVBUF, 4096), (zmq.LINGER, 0), (zmq.RCVTIMEO, PATIENCE_MS)):
        dealer.setsockopt(option, value)
    dealer.connect(server.endpoint)
    return dealer


def ask(dealer: Any, first: int) -> None:
    dealer.send_multipart((b"", first.to_bytes(8, "big")))


def read_all(dealer: Any) -> list[int]:
    """The numbers of the messages up to the end mark."""
    numbers: list[int] = []
    while (number := int.from_bytes(dealer.recv_multipart()[2], "big", signed=True)) != -1:
        numbers.append(number)
    return numbers


def test_followers_that_do_not_read_delay_nobody_and_cost_no_memory(replays: ReplayServer, stack: ExitStack) -> None:
    """Each kept the others waiting for a second, and took 64 MiB."""
    before = psutil.Process().memory_info().rss
    idle = [follower(replays, stack, takes=1) for _ in range(NUM_IDLE)]
    for dealer in idle:
        ask(dealer, 0)
        assert dealer.poll(PATIENCE_MS), "its answer has begun"
    reading = follower(replays, stack)
    for first in (NUM_MESSAGES - 3, 0):
        ask(reading, first)
        assert read_all(reading) == list(range(first, NUM_MESSAGES))
    assert psutil.Process().memory_info().rss - before < len(PAYLOAD) * NUM_MESSAGES


def test_more_followers_than_are_answered_at_once_wait_for_their_turn(
    replays: ReplayServer, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cargohold.engine.events._MAX_FOLLOWERS", 1)
    first, second = follower(replays, stack, takes=1), follower(replays, stack)
    ask(first, NUM_MESSAGES - 500)
    assert first.poll(PATIENCE_MS)
    ask(second, NUM_MESSAGES - 1)
    assert len(read_all(first)) == 500
    assert read_all(second) == [NUM_MESSAGES - 1]


def test_a_follower_that_takes_nothing_is_given_up(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    buffer = ReplayBuffer()
    for at in range(NUM_MESSAGES):
        buffer.add(at, PAYLOAD)
    server = ReplayServer("tcp://127.0.0.1:*", buffer, b"kv", patience_s=0.0)
    stack.callback(server.close)
    idle, reading = follower(server, stack, takes=1), follower(server, stack)
    ask(idle, 0)
    assert idle.poll(PATIENCE_MS)
    while "is dropped" not in caplog.text:
        ask(reading, NUM_MESSAGES - 1)
        read_all(reading)


@pytest.mark.parametrize("first", [NUM_MESSAGES, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_number_that_is_far_off_is_answered_with_nothing(replays: ReplayServer, stack: ExitStack, first: int) -> None:
    reading = follower(replays, stack)
    for _ in range(2):
        ask(reading, first)
        assert read_all(reading) == []


def test_what_is_dropped_in_the_middle_of_an_answer_is_told(stack: ExitStack) -> None:
    buffer = ReplayBuffer(max_messages=1000, all_cleared=b"forget")
    for at in range(1000):
        buffer.add(at, PAYLOAD)
    server = ReplayServer("tcp://127.0.0.1:*", buffer, b"kv", patience_s=3600.0)
    stack.callback(server.close)
    slow = follower(server, stack, takes=1)
    ask(slow, 0)
    assert slow.poll(PATIENCE_MS)
    for at in range(1000, 1900):
        buffer.add(at, PAYLOAD)
    messages = []
    while (message := slow.recv_multipart())[2] != (-1).to_bytes(8, "big", signed=True):
        messages.append((int.from_bytes(message[2], "big"), message[3]))
    numbers = [number for number, _ in messages]
    assert numbers == sorted(numbers)
    gap = next(at for at, number in enumerate(numbers) if number != at)
    assert messages[gap] == (899, b"forget")
    assert numbers[gap + 1 :] == list(range(900, 1000)), "what came later goes to all followers"
