"""A server under load for ten minutes, whose clients go away and whose shared store fails: what is left of it at the end."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil

from benchmarks.serve import NAME, serving
from tests.chat_model import save_chat_model

STREAMS = 64
MINUTES = 10.0
GONE = 0.1
"""Share of the clients that go away in the middle of their answer."""
DOCUMENTS = 40
STUCK_S = 120.0
FAILS = ((0.2, 0.4), (0.6, 0.7))
"""When the store fails and comes back, as parts of the whole time."""
OPTIONS = ("--num-device-blocks", "1500", "--max-model-len", "1000", "--host-bytes", "4MiB", "--max-queue", "16")


def run(*, quick: bool) -> dict[str, Any]:
    minutes = 0.1 if quick else MINUTES
    with tempfile.TemporaryDirectory() as place:
        store = Path(place) / "store"
        store.mkdir()
        model = save_chat_model(Path(place))
        with serving(model, (*OPTIONS, "--shared-url", f"file://{store}")) as (port, process):
            return asyncio.run(_soak(port, process, store, minutes * 60))


async def _soak(port: int, process: psutil.Process, store: Path, seconds: float) -> dict[str, Any]:
    ended, start = Counter[str](), time.monotonic()
    await asyncio.gather(*(_client(port, number, start, ended) for number in range(8)))  # what is made once is made now
    begun = _state(port, process)
    start, ended = time.monotonic(), Counter()
    clients = [asyncio.create_task(_client(port, number, start + seconds, ended)) for number in range(STREAMS)]
    rows = [await _minute(port, process, store, start, seconds, part / 10) for part in range(1, 11)]
    await asyncio.gather(*clients)
    waited = time.monotonic()
    while (left := _state(port, process))["requests"] or left["held_blocks_bytes"]:
        assert time.monotonic() < waited + STUCK_S, f"not everything has ended: {left}"
        await asyncio.sleep(0.5)
    await asyncio.sleep(1)
    left = _state(port, process)
    assert left["descriptors"] <= begun["descriptors"] + 2, (begun, left)
    assert not ended["failed"] and not ended["stuck"], ended
    assert ended["answered"] and ended["went_away"]
    assert any(row["store_suspended"] for row in rows), "the store has not failed"
    return {
        "workload": {"model": "tiny", "streams": STREAMS, "minutes": round(seconds / 60, 1), "went_away": GONE},
        "requests": dict(ended),
        "before": begun,
        "rows": rows,
        "after": left,
    }


async def _minute(
    port: int, process: psutil.Process, store: Path, start: float, seconds: float, until: float
) -> dict[str, Any]:
    """Let a tenth of the time go by, in which the store may fail or come back; how the server is then."""
    should_fail = any(begin < until <= end for begin, end in FAILS)
    await asyncio.to_thread(_put, store, is_there=not should_fail)
    await asyncio.sleep(max(0.0, start + until * seconds - time.monotonic()))
    state = await asyncio.to_thread(_state, port, process)
    row = {"after_s": round(time.monotonic() - start), "store_fails": should_fail, **state}
    print(json.dumps(row), flush=True)
    return row


def _put(store: Path, *, is_there: bool) -> None:
    """Have the store fail, or work again."""
    away = store.with_name("away")
    if is_there and away.exists():
        store.unlink()
        away.rename(store)
    elif not is_there and not away.exists():
        store.rename(away)
        store.write_text("no directory", encoding="utf-8")


async def _client(port: int, number: int, until: float, ended: Counter[str]) -> None:
    """Ask again and again, each time about one of some documents; at least once."""
    choose = random.Random(number)
    while True:
        document = choose.randrange(DOCUMENTS)
        prompt = f"Document {document}: {'the ship sails on ' * 60}. Question {choose.random()}"
        body = {"model": NAME, "prompt": prompt, "max_tokens": choose.randrange(8, 64), "stream": True}
        try:
            async with asyncio.timeout(STUCK_S):
                how = await _ask(port, body, leaves=choose.random() < GONE)
        except TimeoutError:
            how = "stuck"
        except OSError:
            how = "failed"
        ended[how] += 1
        if time.monotonic() >= until:
            return
        if how == "refused":
            await asyncio.sleep(1)


async def _ask(port: int, body: dict[str, Any], *, leaves: bool) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        sent = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: soak\r\nconnection: close\r\ncontent-length: {len(sent)}\r\n"
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + sent)
        status = int((await reader.readline()).split()[1])
        if status in {429, 503}:
            return "refused"
        if status != 200:
            return "failed"
        if leaves:
            await reader.readuntil(b"data: ")
            return "went_away"
        text = await reader.read()
        return "answered" if b"data: [DONE]" in text and b'"error"' not in text else "failed"
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def _state(port: int, process: psutil.Process) -> dict[str, Any]:
    """What the server holds now."""
    connection = HTTPConnection("127.0.0.1", port, timeout=STUCK_S)
    connection.request("GET", "/cache")
    shown = json.load(connection.getresponse())
    connection.close()
    engine, device = shown["engine"], shown["tiers"][0]
    (shared,) = (tier for tier in shown["tiers"] if tier["name"] == "shared")
    return {
        "memory_mib": round(process.memory_info().rss / 2**20),
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "requests": engine["running"] + engine["waiting"] + engine["loading"],
        "held_blocks_bytes": device["used_bytes"],
        "store_suspended": shared["suspended"],
    }
