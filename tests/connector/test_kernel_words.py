"""The kernel knows no guest: not by import, and not by a word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import cargohold.connector.kernel

FILES = sorted(Path(cargohold.connector.kernel.__file__).parent.glob("*.py"))
WORDS = (
    r"hints?|leases?|hand-?offs?|handed off|promises?d?|another engine|events?|announce\w*|lower tiers?|tiers? below|disks?|"
    r"prefetch\w*|meters?|traces?|tracing|record(s|ed|ing|er)"
)


@pytest.mark.parametrize("file", FILES, ids=[file.name for file in FILES])
def test_no_file_of_the_kernel_mentions_a_feature(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    found = [f"{at}: {line}" for at, line in enumerate(lines, 1) if re.search(rf"\b({WORDS})\b", line, re.IGNORECASE)]
    assert not found, found
