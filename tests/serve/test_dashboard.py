"""The page for engines that run elsewhere: of a server what its own page shows, of vLLM what its metrics tell."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest
import uvicorn

from cargohold import DiskTierConfig, OffloadConfig
from cargohold.serve.dashboard import Engine, make_dashboard
from cargohold.serve.scrape import Scrape, metrics_url
from cargohold.serve.server import Server, listening
from cargohold.serve.settings import ServeConfig
from tests.serve.running import call, running, settle, wait_until
from tests.serve.test_page import browsing

TEXT = "The ship sails on. " * 40
OF_VLLM = """
vllm:num_requests_running{engine="0",model_name="m"} 3
vllm:num_requests_waiting{engine="0",model_name="m"} 2
cargohold_prompt_tokens_total{engine="0",model_name="m",tier="host"} 300
cargohold_prompt_tokens_total{engine="0",model_name="m",tier="computed"} 100
cargohold_prompt_tokens_total{engine="0",model_name="m",tier="bypassed"} 0
cargohold_tier_ready_bytes{engine="0",model_name="m",tier="host"} 1000
cargohold_tier_capacity_bytes{engine="0",model_name="m",tier="host"} 4000
cargohold_tier_ready_bytes{engine="0",model_name="m",tier="disk"} 500
cargohold_moved_bytes_total{direction="in",engine="0",model_name="m",tier="host"} 700
cargohold_moved_bytes_total{direction="out",engine="0",model_name="m",tier="host"} 200
cargohold_removed_chunks_total{engine="0",model_name="m",reason="evicted",tier="host"} 5
cargohold_verified_chunks_total{engine="0",model_name="m",outcome="equal",tier="host"} 41000
cargohold_verified_chunks_total{engine="0",model_name="m",outcome="close",tier="host"} 197
cargohold_verified_chunks_total{engine="0",model_name="m",outcome="different",tier="host"} 3
cargohold_outage_since_timestamp_seconds{engine="0",model_name="m",tier="disk",what="writes",reason="it is full"} 1000
cargohold_outage_retry_timestamp_seconds{engine="0",model_name="m",tier="disk",what="writes",reason="it is full"} 1060
"""


@pytest.fixture(scope="module")
def tiered(chat_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    disk = DiskTierConfig(directory=tmp_path_factory.mktemp("disk"), max_bytes="64MiB", reserve_bytes=0)
    offload = OffloadConfig(host_bytes="1MiB", tiers=[disk], restore="always")
    with running(chat_model, offload=offload, num_device_blocks=30, max_model_len=350) as server:
        ask(server, "First. ", "Second. ", "First. ")
        yield server


def ask(server: Server, *starts: str, **more: Any) -> None:
    for start in starts:
        body = {"model": "chat", "prompt": start + TEXT, "max_tokens": 2, "temperature": 0, **more}
        assert call(server, "/v1/completions", body).status == 200


def test_a_server_looks_as_on_its_own_page(tiered: Server) -> None:
    engine = Engine("one", metrics_url(tiered.url))
    assert engine.state == "connecting"
    engine.look()
    ask(tiered, "Third. ", "First. ")
    ask(tiered, "Second. ", kv_transfer_params={"max_load_tokens": 32})
    settle(tiered)
    own = call(tiered, "/cache").json
    engine.look()
    shown = engine.as_json()
    assert re.fullmatch(r"(\d+) chunks, \1 equal or close", own["verified"]), own["verified"]
    assert shown["verified"] == own["verified"], "what was computed although it was kept"
    assert (shown["state"], shown["requests"], shown["log"]) == ("serving", None, [])
    for here, there in zip(shown["tiers"], own["tiers"], strict=True):
        assert here["name"] == there["name"]
        for what in ("held_bytes", "capacity_bytes", "used_bytes", "in_bytes", "out_bytes", "suspended"):
            assert here[what] == there[what], (here["name"], what)
    tokens = [request["prompt_tokens"] for request in own["requests"]]
    assert sum(shown["totals"]["tokens"].values()) == sum(tokens)
    assert sum(sum(bucket["tokens"].values()) for bucket in shown["history"]) == sum(tokens[:3])  # since the first look
    assert sum(bucket["requests"] for bucket in shown["history"]) == 3
    for what in ("restored_tokens", "restore_s", "prefill_tokens", "prefill_s"):
        total = sum(bucket[what] for bucket in own["history"])
        assert shown["totals"][what] == pytest.approx(total) and total > 0, what


def test_vllm_with_the_connector_is_understood() -> None:
    texts = iter([OF_VLLM.replace("300", "100"), OF_VLLM])
    engine = Engine("vllm", "", lambda _: Scrape.parse(0.0, next(texts)), clock=lambda: 1001.0)
    engine.look()
    engine.look()
    shown = engine.as_json()
    assert (shown["engine"]["running"], shown["engine"]["waiting"]) == (3, 2)
    assert shown["engine"]["loading"] is None is shown["engine"]["refused"], "vLLM does not tell, which is not none"
    host, disk = shown["tiers"]
    assert (host["held_bytes"], host["capacity_bytes"], host["in_bytes"], host["evicted_chunks"]) == (
        1000,
        4000,
        700,
        5,
    )
    assert (disk["capacity_bytes"], disk["suspended"], disk["is_off"]) == (None, 1, False)
    assert [line["text"] for line in shown["log"]] == ["tier disk: writes: it is full"]
    assert shown["verified"] == "41,200 chunks, 41,197 equal or close"
    (bucket,) = shown["history"]
    assert bucket["tokens"]["host"] == 200 and shown["totals"]["tokens"] == {"host": 300, "computed": 100}
    assert (bucket["up_bytes"], bucket["requests"]) == (0, 0)


def test_an_engine_that_goes_away_and_begins_anew_takes_nothing_back() -> None:
    scrapes = iter(
        [
            Scrape.parse(0.0, OF_VLLM),
            Scrape(0.0, error="refused"),
            Scrape.parse(0.0, OF_VLLM.replace("300", "10")),
            Scrape.parse(0.0, OF_VLLM.replace("300", "30")),
        ]
    )
    engine = Engine("vllm", "", lambda _: next(scrapes), clock=lambda: 1001.0)
    states = []
    for _ in range(4):
        engine.look()
        states.append(engine.state)
    assert states == ["serving", "not reachable: refused", "serving", "serving"]
    assert [bucket["tokens"]["host"] for bucket in engine.as_json()["history"]] == [20]


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("cargohold_up 0\n", "starting"),
        (f"cargohold_up 0\n{OF_VLLM}", "not serving"),
        (f"cargohold_up 1\n{OF_VLLM}", "serving"),
        (OF_VLLM, "serving"),
    ],
)
def test_a_server_that_loads_its_model_is_starting(text: str, state: str) -> None:
    engine = Engine("one", "", lambda _: Scrape.parse(0.0, text))
    engine.look()
    assert engine.state == state


def test_of_an_engine_that_does_not_answer_nothing_is_known() -> None:
    scrapes = iter([Scrape.parse(0.0, OF_VLLM), Scrape.parse(0.0, OF_VLLM), Scrape(0.0, error="refused")])
    engine = Engine("vllm", "", lambda _: next(scrapes), clock=lambda: 1001.0)
    for is_known in (False, True, True, False):
        shown = engine.as_json()
        assert (shown["engine"] is not None, shown["totals"] is not None) == (is_known, is_known)
        if engine.state != "not reachable: refused":
            engine.look()
    assert len(engine.as_json()["history"]) == 1, "what was seen before"


@contextmanager
def dashboard(engines: Sequence[Engine]) -> Iterator[Any]:
    """The dashboard in a thread; has a ``url``, as servers have."""
    with listening(ServeConfig(port=0)) as listener:
        server: Any = uvicorn.Server(
            uvicorn.Config(make_dashboard(engines, 0.5), ws="none", log_config=None, access_log=False)
        )
        server.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = Thread(target=server.run, args=([listener],))
        thread.start()
        wait_until(lambda: server.started)
        yield server
        server.should_exit = True
        thread.join()


def test_each_engine_can_be_asked_for(tiered: Server) -> None:
    dead = Engine("dead", "", lambda _: Scrape(time.monotonic(), error="refused"))
    with dashboard([Engine("one", metrics_url(tiered.url)), dead]) as server:
        wait_until(lambda: call(server, "/cache").json["state"] == "serving")
        assert call(server, "/cache?engine=1").json["state"] == "not reachable: refused"
        shown = call(server, "/cache").json
        assert [one["name"] for one in shown["engines"]] == ["one", "dead"]
        assert [line["text"] for line in shown["log"]] == ["dead is not reachable: refused"], "whichever is looked at"
        for which in ("2", "-1", "", "9" * 5000):
            missing = call(server, f"/cache?engine={which}")
            assert (missing.status, missing.json["error"]["message"]) == (404, "there are engines 0 to 1")
        assert call(server, "/").body == call(tiered, "/").body


@pytest.mark.browser
def test_the_page_shows_one_engine_after_the_other(tiered: Server) -> None:
    of_vllm = Engine("of vLLM", "", lambda _: Scrape.parse(time.monotonic(), OF_VLLM))
    dead = Engine("dead", "", lambda _: Scrape(time.monotonic(), error="refused"))
    with dashboard([Engine("one", metrics_url(tiered.url)), of_vllm, dead]) as server, browsing(server) as page:
        page.wait_for_selector("#vessels li:nth-child(3)")
        assert page.locator("#chat-section").is_hidden() and page.locator("#requests-section").is_hidden()
        assert "prompt tokens were restored from tiers below the device" in page.inner_text("#answer")
        page.select_option("#which", label="of vLLM")
        page.wait_for_selector("text=75 %")
        assert "it is full" in page.inner_text("#vessels")
        page.select_option("#which", label="dead (not reachable)")
        page.wait_for_selector("text=Nothing is known: the engine does not answer.")
        assert not page.locator("#kept-title, #past").filter(visible=True).count()


@pytest.mark.parametrize("url", ["ftp://here", "http://", ":x"])
def test_addresses_that_are_none_are_refused(cargohold: Any, url: str) -> None:
    result = cargohold("dashboard", url)
    assert result.status == 2 and "it must be an engine's address" in result.err


def test_a_port_that_is_taken_is_told(tiered: Server, cargohold: Any) -> None:
    port = tiered.url.rpartition(":")[2]
    result = cargohold("dashboard", tiered.url, "--port", port)
    assert result.status == 2 and f"port={port} is not possible" in result.err
