"""``cargohold top``: against a real server, a recorded scrape of vLLM, and engines that are not there."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from cargohold import OffloadConfig
from cargohold.cli.top import _troubles, draw
from cargohold.errors import ConfigError
from cargohold.protocol import metrics
from cargohold.serve.scrape import Scrape, metrics_url
from tests.command import Command
from tests.forks import ForkedCommand
from tests.serve.running import call, running, settle

RECORDED = Path(__file__).parents[1] / "data" / "vllm_metrics.txt"


class Told(BaseHTTPRequestHandler):
    """Answers every request with a text."""

    def __init__(self, text: bytes, *args: object) -> None:
        self._text = text
        super().__init__(*args)  # type: ignore[arg-type]  # as the server calls it

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self._text)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def recorded(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server that tells what vLLM told."""
    text = getattr(request, "param", RECORDED.read_bytes())
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Told, text)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_real_server_is_shown(cargohold: Command, chat_model: str) -> None:
    with running(chat_model, offload=OffloadConfig(host_bytes="1MiB"), num_device_blocks=60) as server:
        body = {"model": "chat", "prompt": "The ship sails on. " * 40, "max_tokens": 2}
        for _ in range(2):
            assert call(server, "/v1/completions", body).status == 200
        settle(server)
        shown = cargohold("top", server.url)
    assert shown.status == 0
    assert "0 running, 0 waiting" in shown.out
    rows: dict[str, str] = {}
    for line in shown.out.splitlines():
        if line.startswith(("│ device", "│ host")):
            rows[line.split()[1]] = rows.get(line.split()[1], "") + line
    assert "944" in rows["device"] and rows.keys() == {"device", "host"}
    assert "device" in shown.out and "computed" in shown.out and "restored: " in shown.out
    assert "bypassed" not in shown.out, "nothing was"


def test_vllm_is_shown_with_our_connector_in_it(cargohold: Command, recorded: str) -> None:
    shown = cargohold("top", recorded, "--once")
    assert shown.status == 0
    for expected in RECORDED_FACTS:
        assert expected in shown.out


RECORDED_FACTS = ("1 running", "host", "restored: ")


LARGE = b"".join(
    b'cargohold_%s{tier="%s"%s} %d\n' % (name, tier, more, number)
    for tier in (b"device", b"host", b"disk", b"shared")
    for name, more, number in (
        (b"tier_ready_tokens", b"", 8_888_888),
        (b"tier_capacity_tokens", b"", 9_999_999),
        (b"tier_in_use_tokens", b"", 7_777_777),
        (b"tier_pinned_tokens", b"", 6_666_666),
        (b"tier_capacity_bytes", b"", 2**40),
        (b"moved_bytes_total", b',direction="in"', 1023 * 2**30),
        (b"moved_bytes_total", b',direction="out"', 1022 * 2**30),
        (b"removed_chunks_total", b',reason="evicted"', 5_555_555),
        (b"removed_chunks_total", b',reason="reset"', 4_444_444),
    )
)
NUMBERS = ("89%", "8,889k", "10,000k", "7,778k", "6,667k", "1023 GiB", "1022 GiB", "5,556k")


@pytest.mark.parametrize("columns", [80, 100, 160])
@pytest.mark.parametrize("recorded", [LARGE], indirect=True)
def test_numbers_stay_whole_however_narrow_the_terminal_is(
    cargohold: Command, recorded: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = cargohold("top", recorded, "--once")
    for number in NUMBERS:
        assert shown.out.count(number) == 4, shown.out
    assert "…" not in shown.out and max(map(len, shown.out.splitlines())) <= columns


@pytest.mark.parametrize("recorded", [b"cargohold_up 0\n"], indirect=True)
def test_a_server_that_loads_its_model_is_starting(cargohold: Command, recorded: str) -> None:
    shown = cargohold("top", recorded)
    assert "it is starting" in shown.out and "no Cargohold" not in shown.out


def restoring(tokens: int, seconds: float) -> bytes:
    """Metrics of an engine that restored so many tokens in so many seconds, and computed 500 tokens a second."""
    totals = {"load_tokens_total": tokens, "load_seconds_sum": seconds}
    totals |= {"prefill_tokens_total": 3000, "prefill_seconds_total": 6, 'tier_ready_bytes{tier="host"}': 1}
    return "".join(f"cargohold_{name} {value}\n" for name, value in totals.items()).encode()


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        (restoring(64, 9.0), "restored: 64 tokens in 9 s"),
        (restoring(2000, 0.2), "restored: 2,000 tokens in 200 ms, computing them takes 4 s"),
    ],
    indirect=["recorded"],
)
def test_restoring_is_compared_with_computing_in_all_and_not_for_a_few_tokens(
    cargohold: Command, recorded: str, expected: str
) -> None:
    lines = [line.strip("│ ") for line in cargohold("top", recorded, "--once").out.splitlines()]
    assert expected in lines


@pytest.mark.parametrize(("different", "style"), [(0, ""), (1, "bold red")])
def test_how_much_has_been_verified_is_shown(different: int, style: str) -> None:
    counted = {"equal": 41_000, "close": 200 - different, "different": different}
    lines = [f'cargohold_verified_chunks_total{{outcome="{of}",tier="host"}} {count}' for of, count in counted.items()]
    shown = list(_troubles(Scrape.parse(0.0, "\n".join(lines) + "\n")))
    text = f"verified since the start: 41,200 chunks, {41_200 - different:,} equal or close"
    assert [(str(line), line.style) for line in shown] == [(text, style)]


def test_what_an_engine_does_not_tell_is_not_none() -> None:
    shown = Console(width=100, file=io.StringIO())
    shown.print(draw("engine", Scrape.parse(0.0, 'cargohold_tier_capacity_bytes{tier="host"} 1\n'), None))
    text = shown.file.getvalue()  # type: ignore[attr-defined]  # of StringIO
    assert "? running, ? waiting" in text and "prompts: not known" in text


@pytest.mark.parametrize("recorded", [b"vllm:num_requests_running 3\n"], indirect=True)
def test_an_engine_without_cargohold_is_told_from_one_with(cargohold: Command, recorded: str) -> None:
    shown = cargohold("top", recorded)
    assert "3 running" in shown.out and "no Cargohold here" in shown.out


@pytest.mark.parametrize("recorded", [b"<html>not { metrics", b"\xff\xfe"], indirect=True)
def test_what_is_no_metrics_is_no_riddle(cargohold: Command, recorded: str) -> None:
    shown = cargohold("top", recorded)
    assert shown.status == 1 and "cannot be reached" in shown.out


def test_engines_that_are_not_there_leave_the_others_in_view(cargohold: Command, recorded: str) -> None:
    shown = cargohold("top", "127.0.0.1:1", recorded)
    assert shown.status == 0
    assert "cannot be reached" in shown.out and "host" in shown.out
    assert cargohold("top", "127.0.0.1:1").status == 1


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://", "host:99999", "ftp://host/metrics", ""])
def test_what_is_no_address_is_refused(cargohold: Command, url: str) -> None:
    shown = cargohold("top", url)
    assert shown.status == 2 and "such as localhost:8000" in shown.err
    with pytest.raises(ConfigError):
        metrics_url(url)


def test_addresses_are_completed() -> None:
    expected = "http://localhost:8000/metrics"
    assert {metrics_url(text) for text in ("localhost:8000", "http://localhost:8000", "localhost:8000/")} == {expected}
    assert metrics_url("https://host/prefix/metrics") == "https://host/prefix/metrics"


def test_ctrl_c_ends_the_live_view_and_gives_the_terminal_back(recorded: str) -> None:
    ours, its = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    process = ForkedCommand(("top", recorded, "--interval", "0.1"), environment, its)
    try:
        seen = ""
        while "restored:" not in seen:
            seen += os.read(ours, 65536).decode(errors="replace")
        assert "\x1b[?1049h" in seen, "it has a screen of its own"
        process.send_signal(signal.SIGINT)
        while "\x1b[?1049l" not in seen:
            seen += os.read(ours, 65536).decode(errors="replace")
        assert process.wait(30) == 130
    finally:
        process.close()
        os.close(ours)


COUNTED = """\
# TYPE cargohold_load_seconds histogram
cargohold_load_seconds_bucket{tier="host",le="0.1",engine="0"} %d
cargohold_load_seconds_bucket{tier="host",le="+Inf",engine="0"} %d
cargohold_load_seconds_count{tier="host",engine="0"} %d
"""


def test_what_happened_between_two_looks_is_told_and_a_restart_is_no_negative_number() -> None:
    first, second = Scrape.parse(0.0, COUNTED % (5, 6, 6)), Scrape.parse(1.0, COUNTED % (5, 9, 9))
    (window,) = second.since(first).times(metrics.LOAD).values()
    assert (window.num_values, window.quantile(0.5)) == (3, float("inf"))
    (window,) = first.since(second).times(metrics.LOAD).values()
    assert (window.num_values, window.quantile(0.5)) == (6, 0.1), "it has restarted: since then"
