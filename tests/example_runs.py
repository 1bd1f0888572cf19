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
NAMES = sorted(str(script.relative_to(EXAMPLES).with_suffix("")) for script in EXAMPLES.glob("*/run*.py"))
"""The scripts: ``first_restore/run``, and where an example has one for another engine, ``agent_pauses/run_vllm``."""
_SHOWN = r"^## {}\n.*?^```text\n(.*?)^```$"
_NUMBER = re.compile(r"\d[\d,.]*\d|\d")


def imports(name: str) -> set[str]:
    """Packages that a script and the modules beside it import."""
    found = set[str]()
    for file in (_script(name), *_modules(name)):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module or "")
    return {module.partition(".")[0] for module in found} - {file.stem for file in _modules(name)}


def missing(name: str) -> list[str]:
    """Packages that a script imports and this environment lacks."""
    return sorted(package for package in imports(name) if find_spec(package) is None)


def run(
    name: str, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> str:
    """Run a script in this process, as ``python run.py MODEL`` with options does; returns what it printed."""
    script = _script(name)
    monkeypatch.setattr(sys, "argv", [str(script), model, *options])
    monkeypatch.syspath_prepend(str(script.parent))
    known = set(sys.modules)
    capsys.readouterr()
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        for module in {file.stem for file in _modules(name)} - known:
            sys.modules.pop(module, None)  # the next example may have a module of the same name
    return capsys.readouterr().out


def shown(name: str) -> str:
    """What a script prints, according to its README."""
    script = _script(name)
    heading = "What you see" if script.stem == "run" else f"What you see with `{script.name}`"
    text = script.with_name("README.md").read_text(encoding="utf-8")
    found = re.search(_SHOWN.format(heading), text, re.MULTILINE | re.DOTALL)
    assert found, f"{script.with_name('README.md')} has no block of `text` under `## {heading}`"
    return found[1]


def differences(shown: str, printed: str, *, numbers: bool = False) -> list[str]:
    """Lines that were shown and not printed, in this order; ``...`` stands for any text, and numbers may differ.

    With ``numbers``, they may not.
    """
    plain = _spaced if numbers else _plain
    lines = [plain(line) for line in printed.splitlines()]
    wrong = []
    for line in filter(str.strip, shown.splitlines()):
        pattern = ".*".join(re.escape(part) for part in plain(line).split("..."))
        at = next((at for at, candidate in enumerate(lines) if re.fullmatch(pattern, candidate)), None)
        if at is None:
            wrong.append(line)
        else:
            lines = lines[at + 1 :]
    return wrong


def _script(name: str) -> Path:
    return EXAMPLES / f"{name}.py"


def _modules(name: str) -> list[Path]:
    """The files beside a script, or beside all of them, that it may import: all but scripts."""
    beside = [*_script(name).parent.glob("*.py"), *EXAMPLES.glob("*.py")]
    return [file for file in beside if not file.stem.startswith("run")]


def _plain(line: str) -> str:
    return _spaced(_NUMBER.sub("0", line))


def _spaced(line: str) -> str:
    return " ".join(line.split())
