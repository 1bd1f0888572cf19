"""What the manual of the server says is so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cargohold.serve.interfaces import NEUTRAL, WITHOUT_EFFECT
from cargohold.serve.server import Server
from cargohold.serve.settings import ServeConfig
from tests.serve.running import call, running

MANUAL = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"(?m)^    from \w+ import (?:.*\n)(?:    .*\n)+", MANUAL)


@pytest.fixture(scope="module")
def named(chat_model: str) -> Iterator[Server]:
    """A server whose model has the name that the manual uses."""
    with running(chat_model, ServeConfig(port=0, served_names=("smollm2",))) as server:
        yield server


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["openai", "anthropic"])
def test_examples_run(named: Server, snippet: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = re.sub(r"(?m)^    ", "", snippet).replace("http://127.0.0.1:8000", named.url)
    names: dict[str, object] = {}
    exec(code.replace("messages=[", "timeout=60, messages=["), names)
    names["client"].close()  # type: ignore[attr-defined]  # both clients have that
    assert re.search(r"\d+\n$", capsys.readouterr().out)


def test_every_path_is_listed_and_there(named: Server) -> None:
    listed = {path for row in re.findall(r"(?m)^\| (`/.*?) \|", MANUAL) for path in re.findall(r"`(/[\w/]+)", row)}
    served = set(call(named, "/openapi.json").json["paths"])
    assert {re.sub(r"/\{.*", "", path) for path in served} == {path.removesuffix("/ID") for path in listed} | {"/"}


def test_fields_that_it_names_are_those_of_the_code() -> None:
    for field in re.findall(r"`(\w+)`", MANUAL.split("never change an answer:")[1].split("\n\n")[0]):
        assert field in WITHOUT_EFFECT
    assert not WITHOUT_EFFECT & NEUTRAL.keys()
