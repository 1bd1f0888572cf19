"""Helpers that tests of tiers share."""

from __future__ import annotations

import errno
import itertools
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cargohold.tiers import DiskTierConfig, LoadOutcome, Opening, SharedTierConfig, Tier
from cargohold.tiers.chunk_format import ChunkCodec
from cargohold.tiers.disk import DiskTier
from cargohold.tiers.encryption import EncryptionKey
from cargohold.tiers.namespace import Namespace

NAMESPACE = Namespace(label="tiny", weights="w", config="c", dtype="float32", layout="16 tokens", split="rank 0 of 1")
NUMBERS = "bfloat16"
CHUNK = 10_000  # not a multiple of the page size, so that padding is tested


def key(number: int) -> bytes:
    return number.to_bytes(32, "big") + bytes(4)


@cache
def payload(number: int, size: int = CHUNK) -> bytes:
    """Numbers of about one size in bfloat16, as KV has them, so that packing makes them smaller."""
    drawn = np.random.default_rng(number).standard_normal(-(-size // 2), np.float32)
    return drawn.view(np.uint16)[1::2].tobytes()[:size]


def ticking() -> Callable[[], int]:
    """A clock in nanoseconds that advances at every call."""
    return itertools.count(1_700_000_000_000_000_000).__next__


def in_thread(action: Callable[[], object], wait_s: float, if_it_hangs: str) -> None:
    """Run ``action`` in a thread of its own, and wait for it; what it raises is raised here.

    Raises ``AssertionError`` with ``if_it_hangs`` if it takes longer than ``wait_s``.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001  # raised again by who waits
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(wait_s)
    assert not thread.is_alive(), if_it_hangs
    for failure in failures:
        raise failure


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can become somebody else")


def run_as_nobody(action: Callable[[], None]) -> int:
    """Exit status of a child process without the rights of the superuser: 0 if ``action`` went well."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        os.setgid(65534)
        os.setuid(65534)
        action()
        status = 0
    finally:
        os._exit(status)


def spoil_reads(patch: pytest.MonkeyPatch, path: Path) -> None:
    """Let every read of one file fail, as on a disk with a bad place."""
    really_read = os.pread

    def read(number: int, size: int, at: int) -> bytes:
        if Path(f"/proc/self/fd/{number}").readlink() == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really_read(number, size, at)

    patch.setattr(os, "pread", read)


def codec(
    secret: bytes | None = None, time_ns: Callable[[], int] | None = None, *, packs: bool = False, **changes: Any
) -> ChunkCodec:
    encryption = None if secret is None else EncryptionKey(secret)
    changed = replace(NAMESPACE, **changes)
    return ChunkCodec(changed, encryption, time_ns or ticking(), [NUMBERS] if packs else [])


def disk_tier(
    directory: Path,
    max_bytes: int | str = "2MiB",
    *,
    using: ChunkCodec | None = None,
    chunk_bytes: int = CHUNK,
    num_shards: int = 1,
    reserve_bytes: int | str = 0,
    policy: str = "lru",
    direct_io: bool = True,
    chunk_sizes: Sequence[int] = (),
) -> DiskTier:
    config = DiskTierConfig(
        directory=str(directory),
        max_bytes=max_bytes,
        reserve_bytes=reserve_bytes,
        policy=policy,
        direct_io=direct_io,
    )
    sizes = chunk_sizes or [chunk_bytes]
    opening = Opening(
        codec=using or codec(), chunk_sizes=sizes, num_shards=num_shards, number_types=[NUMBERS] * len(sizes)
    )
    tier = config.open(opening)
    assert isinstance(tier, DiskTier)
    return tier


def shared_tier(url: str, using: ChunkCodec, chunk_bytes: int = CHUNK, **options: Any) -> Tier:
    return SharedTierConfig(url=url, **options).open(Opening(codec=using, chunk_sizes=[chunk_bytes]))


def load(tier: Tier, number: int, size: int = CHUNK) -> bytes | LoadOutcome:
    """A chunk's bytes, or why there are none."""
    into = bytearray(size)
    outcome = tier.load(key(number), memoryview(into))
    return bytes(into) if outcome is LoadOutcome.LOADED else outcome


def slots_per_segment(root: Path) -> int:
    """Slots in each segment of a disk tier, as its description says."""
    (description,) = root.glob("*/shard.json")
    return int(json.loads(description.read_text())["slots_per_segment"])


def num_segments(root: Path) -> int:
    """Segments of all disk tiers below ``root``."""
    return len(list(root.glob("*/segment-*.data")))
