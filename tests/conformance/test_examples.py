"""The examples of docs/conformance.md pass their suites, and are what the document shows."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cargohold.cache.chunk_table import ChunkTable
from cargohold.cache.policies import ReplacementPolicy
from cargohold.lab.conformance import GuestConformance, PolicyConformance, TierConformance
from cargohold.lab.conformance.policy import Tree, key
from cargohold.tiers import Namespace, Tier
from cargohold.tiers.chunk_format import ChunkCodec
from examples.own_policy.oldest_ends import OldestEnds
from examples.own_tier.folder import Folder

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
DOCUMENT = (DOCS / "conformance.md").read_text(encoding="utf-8")


class TestOldestEnds(PolicyConformance):
    def policy(self, table: ChunkTable) -> ReplacementPolicy:
        return OldestEnds(table)


class TestEvictedUnused(GuestConformance):
    num_seeds = 1

    def guest(self) -> str:
        return "examples.own_guest.unused:EvictedUnused"


NAMESPACE = Namespace(
    label="any",
    weights="w",
    config="c",
    dtype="bfloat16",
    layout="l",
    split="rank 0 of 1",
)


class TestFolder(TierConformance):
    is_shared = True

    def open(self, place: Path) -> Tier:
        return Folder(place / "chunks", ChunkCodec(NAMESPACE, None, time.time_ns), self.chunk_bytes)

    def damage(self, place: Path, chunk: bytes) -> None:
        file = place / "chunks" / chunk.hex()
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)

    def break_medium(self, place: Path) -> None:
        shutil.rmtree(place / "chunks")
        (place / "chunks").touch()  # a file where a folder is wanted


def python_blocks(document: str = DOCUMENT) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document, re.DOTALL)


def test_the_examples_for_authors_of_policies_run() -> None:
    names: dict[str, Any] = {}
    for block in python_blocks((DOCS / "api" / "policies.md").read_text(encoding="utf-8")):
        exec(block, names)  # our own document
    path = Tree(Random(1)).paths[0]
    counting = names["counting"]
    counting.prepare_store(path).commit()
    counting.prepare_load(path).release()
    assert counting.num_loaded == len(path)
    assert names["codec"].encode(key("a"), memoryview(b"abc"), None)[1] == b"abc"


@pytest.mark.parametrize("suite", ["TestShelf", "TestOldestEnds", "TestEvictedUnused"])
def test_the_document_shows_their_suites_as_they_are(suite: str) -> None:
    (shown,) = (block for block in python_blocks() if f"class {suite}(" in block)
    file = "test_connectors.py" if suite == "TestShelf" else "test_examples.py"
    assert shown in (HERE / file).read_text(encoding="utf-8")
