"""``cargohold cache`` and the documentation's commands, over a real Mooncake Store."""

from __future__ import annotations

import json
import re
import shlex
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from cargohold.errors import TierError
from cargohold.tiers.inventory import Verification
from cargohold.tiers.kinds import open_inventory
from cargohold.tiers.stores.mooncake import ClientProcess
from tests.command import Command
from tests.mooncake.cluster import BIN, WAIT_S, Cluster, cluster, until
from tests.mooncake.test_tier import open_tier
from tests.servers import Server, free_port
from tests.tiers.common import CHUNK, codec, key
from tests.tiers.shared import store

PAGE = (Path(__file__).parents[2] / "docs" / "mooncake.md").read_text(encoding="utf-8")


@pytest.fixture
def filled(usable: None) -> Iterator[Cluster]:
    """Three chunks of one model, and two of another."""
    with cluster() as own:
        for weights, numbers in {"w": range(3), "other": range(2)}.items():
            with closing(open_tier(own, weights)) as tier:
                for number in numbers:
                    store(tier, number)
        yield own


def test_namespaces_are_listed_verified_and_deleted(filled: Cluster, cargohold: Command) -> None:
    ids = {weights: codec(weights=weights).namespace.id for weights in ("w", "other")}
    shown = cargohold("cache", "ls", filled.place)
    assert all(each[:8] in shown.out for each in ids.values()) and "tiny" in shown.out, shown
    assert cargohold("cache", "verify", filled.place).status == 0
    holdings = {each.id: each for each in open_inventory(filled.place).holdings()}
    assert holdings[ids["w"]].num_chunks == 3 and holdings[ids["w"]].num_bytes > 3 * CHUNK
    assert holdings[ids["w"]].facts["weights"] == "w"
    assert cargohold("cache", "rm", filled.place, ids["other"]).status == 0
    assert [each.id for each in open_inventory(filled.place).holdings()] == [ids["w"]]
    assert cargohold("cache", "prune", filled.place, "--max-bytes", "16KiB").status == 0
    assert open_inventory(filled.place).holdings() == []


def test_damage_is_found_and_deleted(filled: Cluster) -> None:
    name = f"cargohold:{codec().namespace.id}:{key(1).hex()}"
    with closing(ClientProcess(filled.url, {}, num_bytes=2 * CHUNK)) as client:
        size = client.call("get", name, 0, 2 * CHUNK)
        client.memory[size // 2] ^= 1
        client.call("remove", [name])
        client.call("put", name, 0, size, False)
    inventory = open_inventory(filled.place)
    expected = sorted([Verification.GOOD, Verification.DAMAGED, Verification.GOOD], key=str)
    assert sorted(inventory.verify(codec().namespace.id, delete=True), key=str) == expected
    assert list(inventory.verify(codec().namespace.id, delete=False)) == [Verification.GOOD] * 2


def test_a_list_that_cannot_be_had_is_said(filled: Cluster) -> None:
    with pytest.raises(TierError, match="metrics_port"):
        open_inventory(f"{filled.url}?metrics_port={free_port()}").holdings()


@pytest.mark.real_model
def test_the_documented_commands_share_prompts(usable: None) -> None:
    (block,) = re.findall(r"(?:^    .*\n)+", PAGE, re.MULTILINE)
    ports = {port: str(free_port()) for port in ("50051", "9003", "8001", "8002")}
    text = re.sub("|".join(ports), lambda found: ports[found[0]], block)
    (master, lending, other) = (shlex.split(each) for each in text.replace("\\\n", "").splitlines())
    assert master[0] == "mooncake_master"
    with ExitStack() as running:
        for command, port in (
            ([str(BIN / master[0]), *master[1:]], ports["9003"]),
            ([sys.executable, "-m", *lending], ports["8001"]),
            ([sys.executable, "-m", *other], ports["8002"]),
        ):
            server = started(command, port)
            running.callback(server.stop)
            server.start()
        prompt = "The berths of Antwerp are long and many. " * 40
        first = usage_of(ports["8001"], prompt)
        place = f"mooncake://127.0.0.1:{ports['50051']}?metrics_port={ports['9003']}"
        until(lambda: chunks_in(place) == first.prompt_tokens // 16, "not all chunks are written")
        again = usage_of(ports["8002"], prompt)
        assert first.cached_tokens == 0 and again.cached_tokens == first.prompt_tokens // 16 * 16


def started(command: list[str], port: str) -> Server:
    return Server(lambda _: command, lambda _: answers(port))


def answers(port: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=WAIT_S) as answer:
        return int(answer.status) == 200
    return False


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int


def usage_of(port: str, prompt: str) -> Usage:
    """What a server says of a prompt, for which it makes a completion."""
    body = json.dumps({"model": "smollm2", "prompt": prompt, "max_tokens": 2, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        usage = json.load(answer)["usage"]
    return Usage(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def chunks_in(place: str) -> int:
    return sum(holding.num_chunks or 0 for holding in open_inventory(place).holdings())
