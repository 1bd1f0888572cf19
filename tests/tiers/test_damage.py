"""A medium that spoils all it is given says so, and does not fill the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from cargohold.errors import NUM_TOLD
from cargohold.tiers import LoadOutcome, Tier
from examples.own_tier.folder import Folder
from tests.tiers.common import CHUNK, codec, disk_tier, key, load, payload

COUNT = 40


@pytest.fixture(params=["disk", "disk-packed", "shared", "shared-packed"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    kind, _, packed = request.param.partition("-")
    using = codec(packs=bool(packed))
    return (
        disk_tier(tmp_path, 8 * 1024**2, using=using) if kind == "disk" else Folder(tmp_path / "chunks", using, CHUNK)
    )


def test_damaged_chunks_are_told_ever_more_rarely(tier: Tier, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(COUNT):
        tier.store(key(number), memoryview(payload(number)))
    for file in tmp_path.rglob("*"):
        if file.is_file() and file.suffix in {".data", ""} and file.stat().st_size > CHUNK // 2:
            data = file.read_bytes()
            file.write_bytes(data[:256] + bytes(byte ^ 1 for byte in data[256:]))
    assert [load(tier, number) for number in range(COUNT)] == [LoadOutcome.CORRUPT] * COUNT
    told = [number for number in range(COUNT) if any(key(number).hex() in line for line in caplog.messages)]
    assert told == [*range(NUM_TOLD), 15, 31] and len(caplog.messages) == len(told)
