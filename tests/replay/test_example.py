"""The example in the manual is what the command prints before its tables. Renew it with ``CARGOHOLD_RENEW_DOCS=1``."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from textwrap import wrap

import pytest

from tests.command import Command

ROOT = Path(__file__).parents[2]
MANUAL = ROOT / "docs" / "replay.md"
EXAMPLE = re.compile(r"(?<=^```\n)\$ (cargohold plan (?:.*\\\n)*.*)\n((?:[* ] .*\n)*)(?=^```$)", re.MULTILINE)
COLUMNS = 86


def printed(lines: list[str]) -> str:
    """The sentences as in a narrow terminal, without what differs from machine to machine."""
    kept = [line for line in lines if line.startswith("* ") and not line.startswith("* This machine")]
    return "".join(f"{text}\n" for line in kept for text in wrap(line, COLUMNS, subsequent_indent="  "))


@pytest.mark.long  # it plans for the whole trace; in the quick tests, ``TestPlan`` and ``test_documentation`` plan for a part
def test_the_manual_shows_what_plan_prints(cargohold: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    manual = MANUAL.read_text()
    example = EXAMPLE.search(manual)
    assert example is not None
    result = cargohold(*shlex.split(example[1].replace("\\\n", " "))[1:])
    assert result.status == 0, result.err
    output = printed([line.rstrip() for line in result.out.splitlines()])
    if os.environ.get("CARGOHOLD_RENEW_DOCS"):
        MANUAL.write_text(manual.replace(example[0], f"$ {example[1]}\n{output}"))
    else:
        assert example[2] == output
