"""Runs the examples of ``examples/`` on a tiny model, and compares what they print with what their READMEs show."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = sorted(script.parent.name for script in EXAMPLES.glob("*/run.py"))
_SHOWN = re.compile(r"^## What you see\n.*?^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d[\d,.]*\d|\d")


def imports(name: str) -> set[str]:
    """Packages that the files of an example import."""
    found = set[str]()
    for file in (EXAMPLES / name).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module or "")
    own = {file.stem for file in (EXAMPLES / name).glob("*.py")}
    return {module.partition(".")[0] for module in found} - own


def missing(name: str) -> list[str]:
    """Packages that an example imports and this environment lacks."""
    return sorted(package for package in imports(name) if find_spec(package) is None)


def run(name: str, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Run an example in this process, as ``python run.py MODEL`` does; returns what it printed."""
    folder = EXAMPLES / name
    monkeypatch.setattr(sys, "argv", [str(folder / "run.py"), model])
    monkeypatch.syspath_prepend(str(folder))
    known = set(sys.modules)
    capsys.readouterr()
    try:
        runpy.run_path(str(folder / "run.py"), run_name="__main__")
    finally:
        for module in {file.stem for file in folder.glob("*.py")} - known:
            sys.modules.pop(module, None)  # the next example may have a module of the same name
    return capsys.readouterr().out


def shown(name: str) -> str:
    """What an example prints, according to its README."""
    text = (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
    found = _SHOWN.search(text)
    assert found, f"examples/{name}/README.md has no block of `text` under `## What you see`"
    return found[1]


def differences(shown: str, printed: str) -> list[str]:
    """Lines that were shown and not printed, in this order. Numbers may differ, and ``...`` stands for any text."""
    lines = [_plain(line) for line in printed.splitlines()]
    wrong = []
    for line in filter(str.strip, shown.splitlines()):
        pattern = ".*".join(re.escape(part) for part in _plain(line).split("..."))
        at = next((at for at, candidate in enumerate(lines) if re.fullmatch(pattern, candidate)), None)
        if at is None:
            wrong.append(line)
        else:
            lines = lines[at + 1 :]
    return wrong


def _plain(line: str) -> str:
    return " ".join(_NUMBER.sub("0", line).split())
