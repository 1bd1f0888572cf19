"""Attackers who change KV that is kept: in host memory, and on a disk, where they make the checksums good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cargohold.connector.offloading.factory as factory_module
from cargohold.tiers import HostMemory
from cargohold.tiers.chunk_format import payload_checksum, unpack_header
from cargohold.tiers.disk.files import Segment
from cargohold.tiers.disk.root import read_description

Attack = Callable[[list[bytearray]], object]
"""Changes the payloads of chunks."""


def kept_memories(patch: pytest.MonkeyPatch) -> list[HostMemory]:
    """A list that gets the host memory of each engine that is made in this process."""
    made: list[HostMemory] = []

    class Kept(HostMemory):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    patch.setattr(factory_module, "HostMemory", Kept)
    return made


def flip(payloads: list[bytearray]) -> None:
    """Change the exponent of a number in the first chunk, of four bytes or, as its upper half, of two."""
    payloads[0][4 * 40 + 3] ^= 0x40


def exchange(payloads: list[bytearray]) -> None:
    """Exchange two chunks."""
    payloads[0], payloads[1] = payloads[1], payloads[0]


def lie_on_disk(directory: Path, attack: Attack) -> int:
    """Change the chunks of a disk tier that no engine uses, each in a slot of its own; returns their number."""
    slots, payloads = [], []
    for file in sorted(directory.glob("*/segment-*.headers")):
        geometry = read_description(file.parent).geometry
        assert geometry is not None
        segment = Segment(file.with_suffix(""), geometry, direct_io=False)
        for at in range(segment.num_slots):
            if (header := unpack_header(segment.read_header(at))) is not None:
                payload = bytearray(header.num_bytes)
                segment.read_payload(at, memoryview(payload))
                slots.append((segment, at, header))
                payloads.append(payload)
    attack(payloads)
    for (segment, at, header), payload in zip(slots, payloads, strict=True):
        segment.write_payload(at, memoryview(payload))
        segment.write_header(at, replace(header, checksum=payload_checksum(memoryview(payload))).pack())
    return len(slots)
