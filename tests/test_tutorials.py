"""The tutorials work as they are written: their programs run, and their commands print what is shown."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command import Command
from tests.example_runs import differences

REPOSITORY = Path(__file__).parents[1]
TUTORIALS = sorted((REPOSITORY / "docs" / "tutorials").glob("*.md"))
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ cargohold (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


def programs(document: Path) -> list[tuple[str, str]]:
    """Each piece of program with the lines of ``text`` that are shown right behind it, if there are some."""
    blocks = _BLOCK.findall(document.read_text(encoding="utf-8"))
    return [
        (code, shown if is_text == "text" else "")
        for (language, code), (is_text, shown) in zip(blocks, [*blocks[1:], ("", "")], strict=True)
        if language == "python"
    ]


def commands(document: Path) -> list[tuple[str, str]]:
    """Each command with the lines shown below it."""
    return [
        found for _, block in _BLOCK.findall(document.read_text(encoding="utf-8")) for found in _COMMAND.findall(block)
    ]


@pytest.fixture
def stand_in(chat_model: str, tmp_path: Path) -> Callable[[str], str]:
    """Puts the tiny model and temporary places where a tutorial names others."""
    there = {
        '"smollm2"': repr(chat_model),
        '"kv"': repr(str(tmp_path / "kv")),
        "smollm2": chat_model,
        "kv": str(tmp_path / "kv"),
        "file:///tmp/cargohold-shared": f"file://{tmp_path}/shared",
        "tests/data/made_trace.jsonl": str(REPOSITORY / "tests" / "data" / "made_trace.jsonl"),
    }

    def replaced(text: str) -> str:
        if " " not in text:
            return there.get(text, text)
        for name, value in there.items():
            if name[0] == '"':
                text = text.replace(name, value)
        return text

    return replaced


@pytest.mark.parametrize("document", TUTORIALS, ids=lambda path: path.stem)
def test_programs(document: Path, stand_in: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for program, shown in programs(document):
        exec(stand_in(program), names)  # our own pages, one block after the other, as in one session
        assert differences(shown, capsys.readouterr().out) == [], program


PLANNING = {"sizing"}
"""It plans for the whole trace, for half a minute; in the quick tests, ``test_documentation`` plans for a part of it."""


@pytest.mark.parametrize(
    "document",
    [pytest.param(path, id=path.stem, marks=pytest.mark.long if path.stem in PLANNING else ()) for path in TUTORIALS],
)
def test_commands(document: Path, stand_in: Callable[[str], str], cargohold: Command) -> None:
    for command, shown in commands(document):
        line, _, source = command.partition(" < ")
        stdin = (REPOSITORY / source).read_text(encoding="utf-8") if source else ""
        args = [stand_in(word) for word in shlex.split(line)]
        result = cargohold(*args, stdin=stdin)
        assert result.status == 0, (command, result.err)
        if args[:2] != ["cache", "ls"]:  # names of models and namespaces
            assert differences(shown, result.out + result.err) == [], command


def test_there_are_tutorials_with_both() -> None:
    assert len(TUTORIALS) >= 4
    assert sum(len(programs(document)) for document in TUTORIALS) >= 4
    assert sum(len(commands(document)) for document in TUTORIALS) >= 8
