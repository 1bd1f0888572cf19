"""A metric of one's own is declared in one place, and is then in everything that shows metrics; inside vLLM, see there."""

from __future__ import annotations

from rich.console import Console

from cargohold import LLM, OffloadConfig, SamplingParams
from cargohold.cli.top import draw
from cargohold.serve.scrape import Scrape
from tests.counting import ENDED, CountsEnds
from tests.serve.running import call, running, settle

OFFLOAD = OffloadConfig(host_bytes="1MiB", guests=[f"{CountsEnds.__module__}:{CountsEnds.__name__}"])
TEXT = 'cargohold_ended_requests_total{how="quietly"} '


def test_servers_and_top_show_it(chat_model: str) -> None:
    with running(chat_model, offload=OFFLOAD, num_device_blocks=60) as server:
        assert TEXT + "0.0" in call(server, "/metrics").body.decode(), "from the start"
        assert call(server, "/v1/completions", {"model": "chat", "prompt": "The ship", "max_tokens": 2}).status == 200
        settle(server)
        text = call(server, "/metrics").body.decode()
    assert TEXT + "1.0" in text
    console = Console(width=160)
    with console.capture() as shown:
        console.print(draw("engine", Scrape.parse(0.0, text), None))
    assert "own: ended_requests_total quietly 1" in shown.get()


def test_stats_have_it(chat_model: str) -> None:
    with LLM(chat_model, offload=OFFLOAD, num_device_blocks=60) as llm:
        llm.generate([[1, 2, 3]] * 2, SamplingParams(max_tokens=1))
        assert llm.stats()[ENDED.of("quietly")] == 2
