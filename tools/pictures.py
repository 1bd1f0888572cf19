"""Renews docs/pictures: the page, ``cargohold dashboard`` and ``cargohold top`` while people come back, and the demo's run.

A real model is served, and the demo is really run, so take them on a quiet machine. ``--only demo`` takes one kind.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import sync_playwright
from rich.console import Console

from cargohold.cli.top import draw
from cargohold.serve.scrape import metrics_url, scrape

PICTURES: Final = Path(__file__).parents[1] / "docs" / "pictures"
TEXTS: Final = Path(__file__).parents[1] / "src" / "cargohold" / "cli" / "texts"
VIEWS: Final[dict[str, dict[str, Any]]] = {
    "page-light": {"color_scheme": "light", "viewport": {"width": 1180, "height": 1000}},
    "page-dark": {"color_scheme": "dark", "viewport": {"width": 1180, "height": 1000}},
    "page-phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 1000}},
}
SERVER: Final = ("--port", "0", "--num-device-blocks", "100", "--max-model-len", "1500")
KINDS: Final = ("page", "dashboard", "top", "demo")
AT: Final = re.compile(r"at (http://[\d.]+:\d+)")
COLUMNS: Final = 92
"""Width of a terminal whose picture can be read on a page."""
LOOK_S: Final = 10.0
"""Seconds between two looks of ``cargohold top``: long enough for something to happen in them."""
PART: Final = 1800
"""Characters of one text: some 450 tokens."""


def main() -> None:
    """Serve, ask, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="what is served")
    parser.add_argument("--host-bytes", default="60MiB", help="host memory, which holds some of the texts")
    parser.add_argument("--seconds", type=float, default=100, help="how long people ask")
    parser.add_argument("--to", type=Path, default=PICTURES, help="where the pictures go")
    parser.add_argument("--only", choices=KINDS, action="append", help="only this kind of picture; may be repeated")
    arguments = parser.parse_args()
    arguments.to.mkdir(parents=True, exist_ok=True)
    kinds = set(arguments.only or KINDS)
    if "demo" in kinds:
        record_demo(arguments.to)
    if kinds - {"demo"}:
        with serving(arguments.model, arguments.host_bytes) as url:
            take_of_server(url, kinds, arguments.seconds, arguments.to)


def take_of_server(url: str, kinds: set[str], seconds: float, directory: Path) -> None:
    """Let people ask, and take the pictures of a server."""
    sys.stderr.write(f"serving at {url}\n")
    until = time.monotonic() + seconds
    with telling_where("dashboard", url, "--port", "0") as dashboard:
        people = [threading.Thread(target=ask, args=(url, number, until)) for number in range(3)]
        for one in people:
            one.start()
        pin(url)
        time.sleep(max(0.0, until - 2 * LOOK_S - time.monotonic()))
        if "top" in kinds:
            draw_top(url, directory)
        for one in people:
            one.join()
        if "page" in kinds:
            take(url, VIEWS, directory)
        if "dashboard" in kinds:
            take(dashboard, {"dashboard": VIEWS["page-light"]}, directory)


@contextmanager
def serving(model: str, host_bytes: str) -> Iterator[str]:
    """A server with a disk below host memory, each too small for all that is asked; yields where it is."""
    with tempfile.TemporaryDirectory() as disk:
        below = ("--host-bytes", host_bytes, "--disk-dir", disk, "--disk-bytes", "2GiB")
        with telling_where("serve", model, *SERVER, *below) as url:
            yield url


@contextmanager
def telling_where(*arguments: str) -> Iterator[str]:
    """Run a command of ours that serves, until the end of the context; yields the address that it tells."""
    process = subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True)  # noqa: S603  # our own command
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        while (found := AT.search(line)) is None:
            assert line, "the command has ended"
            line = process.stderr.readline()
        yield found[1]
    finally:
        process.terminate()
        process.communicate(timeout=60)


def command(*arguments: str) -> list[str]:
    """A command of ours, in this Python."""
    return [sys.executable, "-m", "cargohold", *arguments]


def ask(url: str, number: int, until: float) -> None:
    """One of some people, who talk about some texts, about the first ones most often."""
    connection, choose = HTTPConnection(url.removeprefix("http://"), timeout=600), random.Random(number)  # noqa: S311
    texts = [file.read_text(encoding="utf-8") for file in sorted(TEXTS.glob("*.txt"))]
    parts = [text[start : start + PART] for start in (0, PART) for text in texts]
    model = model_of(connection)
    while time.monotonic() < until:
        part = parts[min(int(choose.expovariate(0.4)), len(parts) - 1)]
        question = f"Question {choose.randrange(1000)}: who is it about?"
        messages = [{"role": "system", "content": part}, {"role": "user", "content": question}]
        body = {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        told = reply.read()
        assert reply.status == 200, told
    connection.close()


def pin(url: str) -> None:
    """Pin one of the texts for an agent."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=600)
    text = next(iter(sorted(TEXTS.glob("*.txt")))).read_text(encoding="utf-8")[:PART]
    body = {"messages": [{"role": "system", "content": text}], "lease": "agent 7", "ttl_s": 900}
    reply: dict[str, Any] = {}
    while reply.get("status") != "accepted":  # as soon as there is something to pin
        connection.request("POST", "/cache/pins", json.dumps(body), {"content-type": "application/json"})
        (reply,) = json.load(connection.getresponse())["outcomes"]
        time.sleep(1)
    connection.close()


def draw_top(url: str, directory: Path) -> None:
    """Draw what ``cargohold top`` shows while people ask."""
    before = scrape(metrics_url(url))
    time.sleep(LOOK_S)
    console = terminal(128)
    console.print(draw("localhost:8000", scrape(metrics_url(url)), before))
    write_svg(console, "cargohold top localhost:8000", directory / "top.svg")


def record_demo(directory: Path) -> None:
    """Run the demo, and draw what a terminal shows of it at the end."""
    console, seen = terminal(COLUMNS), {**os.environ, "COLUMNS": str(COLUMNS)}
    run = subprocess.run(command("demo"), capture_output=True, text=True, env=seen, check=True)  # noqa: S603  # ours
    console.print("$ make demo\n", style="bold", highlight=False)
    console.print(run.stdout, end="", markup=False, highlight=False, no_wrap=False)
    write_svg(console, "make demo", directory / "demo.svg")


def terminal(columns: int) -> Console:
    """A terminal whose picture can be taken."""
    return Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)


def write_svg(console: Console, title: str, path: Path) -> None:
    """Write the picture of a terminal, without the fonts that it would fetch from elsewhere."""
    drawn = re.sub(r"\s*@font-face \{.*?\}", "", console.export_svg(title=title), flags=re.DOTALL)
    path.write_text(drawn.replace("Fira Code, monospace", "monospace"), encoding="utf-8")
    sys.stderr.write(f"{path}\n")


def model_of(connection: HTTPConnection) -> str:
    """The name of the model."""
    connection.request("GET", "/v1/models")
    name: str = json.load(connection.getresponse())["data"][0]["id"]
    return name


def take(url: str, views: Mapping[str, Mapping[str, Any]], directory: Path) -> None:
    """Take pictures of a page in a browser, each in its own view."""
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for name, view in views.items():
            page = browser.new_page(**view)
            page.goto(url)
            page.wait_for_selector("#requests li" if name != "dashboard" else "svg", state="attached")
            page.wait_for_timeout(3000)  # until vessels have filled
            if name != "dashboard":
                page.locator("summary").nth(1).click()
            page.screenshot(path=directory / f"{name}.png", full_page=True)
            page.close()
            sys.stderr.write(f"{directory / name}.png\n")
        browser.close()


if __name__ == "__main__":
    main()
