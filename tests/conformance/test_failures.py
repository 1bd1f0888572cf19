"""What a suite says when something fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BROKEN = """
from cargohold.lab.conformance import PolicyConformance
from cargohold.cache.policies.base import LRUPolicy

class Nameless(LRUPolicy):
    name = ""

class TestNameless(PolicyConformance):
    def policy(self, table):
        return Nameless(table)
"""


def test_failures_show_what_was_compared(tmp_path: Path) -> None:
    test = tmp_path / "test_nameless.py"
    test.write_text(BROKEN, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "has_a_name", str(test)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Nameless object at" in result.stdout and ".name" in result.stdout, result.stdout
