"""The documentation says what the code does: its examples run, and its tables list the options there are."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cargohold import (
    LLM,
    AsyncLLM,
    EngineStatus,
    OffloadConfig,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
)
from cargohold.engine.config import EngineConfig
from tests.command import Command
from tests.data.make_trace import TRACE
from tests.servers import capacity, metrics_server

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
USAGE = (REPOSITORY / "docs" / "usage.md").read_text(encoding="utf-8")
TROUBLESHOOTING = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
NOTES = (REPOSITORY / "docs" / "api" / "notes.md").read_text(encoding="utf-8")


def code_blocks(text: str) -> list[str]:
    """Indented blocks, dedented."""
    blocks = re.findall(r"(?:(?<=\n\n)|^)((?:    .*\n|\n(?=    ))+)", text)
    return [re.sub(r"(?m)^    ", "", block) for block in blocks]


def snippets(text: str) -> list[str]:
    return [block for block in code_blocks(text) if "from cargohold import" in block]


@pytest.mark.parametrize("document", [README, USAGE], ids=["README", "usage"])
def test_library_examples_run(
    document: str, chat_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["Once upon a time", "In 1969,"]
    names: dict[str, Any] = {}
    for snippet in snippets(document):
        # The examples that readers will try first, one after the other, as in one session.
        exec(snippet.replace('"smollm2"', repr(chat_model)).replace("/nvme/kv", str(tmp_path)), names)
    names["llm"].close()
    outputs = names.get("outputs")
    if outputs is None:
        assert capsys.readouterr().out.count("RequestMetrics(") == len(prompts)
    else:
        assert [output.prompt for output in outputs] == prompts


def test_there_is_an_example_in_the_readme_and_in_the_manual() -> None:
    assert len(snippets(README)) >= 1 and len(snippets(USAGE)) >= 1


def commands(text: str) -> list[list[str]]:
    lines = [line for block in code_blocks(text) for line in block.splitlines() if line.startswith("cargohold ")]
    # As a shell does, and not shlex: a comment begins behind a space.
    return [shlex.split(re.sub(r"\s#.*", "", line))[1:] for line in lines]


SHORTER = {
    "demo": ["--turns", "2", "--answer-tokens", "1", "--num-device-blocks", "300"],
    "simulate": ["--seeds", "2", "--jobs", "1"],
}


@pytest.mark.parametrize("args", commands(README), ids=" ".join)
def test_commands_in_the_readme_work(args: list[str], cargohold: Command, chat_model: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(TRACE.read_text().splitlines()[:100]))
    stand_ins = {"smollm2": chat_model, "M": chat_model, "trace.jsonl": str(trace), "/nvme/kv": str(tmp_path)}
    args = [stand_ins.get(arg, arg) for arg in args] + SHORTER.get(" ".join(args), [])
    if args[0] == "demo":
        args += ["--model", chat_model]
    with metrics_server(capacity("device", 0, 200_000), capacity("host", 0, 100_000)) as address:
        args = [address if arg == "localhost:8000" else arg for arg in args]
        result = cargohold(*args)
    assert result.status == 0, result.err


def options_in_table(heading: str) -> dict[str, str]:
    """Name and default of each row of the first table under a heading of the manual."""
    section = USAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return {name: default.strip() for name, default in re.findall(r"(?m)^\| `(\w+)` \|([^|]*)\|", section)}


def test_the_manual_gives_options_the_defaults_that_they_have() -> None:
    fields = {field.name: field for field in dataclasses.fields(EngineConfig)}
    listed = options_in_table("LLM")
    assert listed.pop("offload") == listed.pop("record") == "`None`"
    assert listed.pop("traces") == "`False`"
    assert len(listed) > 3 and listed.keys() <= fields.keys()
    for name, default in listed.items():
        if re.fullmatch(r"`\w+`|[0-9.]+", default):
            value = fields[name].default
            assert default.strip("`") == (f"{value:g}" if isinstance(value, float) else str(value)), name


def test_tables_of_options_are_those_that_the_classes_declare() -> None:
    made = subprocess.run([sys.executable, "tools/options.py", "--check"], cwd=REPOSITORY, check=False)
    assert made.returncode == 0


@pytest.mark.parametrize("kind", [SamplingParams, RequestMetrics])
def test_the_manual_mentions_every_field(kind: type) -> None:
    assert [field.name for field in dataclasses.fields(kind) if f"`{field.name}`" not in USAGE] == []


def test_the_manual_does_not_mention_what_is_not_there() -> None:
    names = {name for kind in (EngineConfig, OffloadConfig, SamplingParams) for name in _fields(kind)}
    methods = {
        name
        for kind in (LLM, AsyncLLM, EngineStatus, RequestOutput, RequestMetrics)
        for name in (*dir(kind), *_fields(kind))
    }
    written = set(re.findall(r"`(\w+_\w+)`", USAGE))
    elsewhere = {"if_faster", "template_options"}
    assert written - names - methods - elsewhere == set()


def _fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def texts_of_the_source() -> str:
    """All texts in the source, with a gap for each value that is filled in."""
    texts = []
    for path in sorted((REPOSITORY / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%[a-z]", "...", node.value))
    return "\n".join(texts)


@pytest.mark.parametrize(("page", "least"), [(TROUBLESHOOTING, 10), (NOTES, 70)], ids=["troubleshooting", "notes"])
def test_every_line_that_is_explained_can_come(page: str, least: int) -> None:
    rows = re.findall(r"(?m)^\| (`.+?) \|", page)
    lines = [line for row in rows for line in re.findall(r"`([^`]+)`", row)]
    assert len(lines) >= least
    source = texts_of_the_source()
    pieces = [piece.strip(" :;,") for line in lines for piece in re.split(r"\.\.\.|\d+", line)]
    assert [piece for piece in pieces if piece not in source] == []


TELLING = re.compile(r"(\bnotes\.append|\bnote_once|\b_told\.note|\bself\.note|\bwaiting\.limit)$")
"""Calls that give a request one of its notes, as they are written."""
PASSED_ON = {
    "sentence",  # what another of these calls says
    "str(self.guard.broken)",  # a line of the log
    "str(outcome)",  # the answer to a hint
    "tier.trouble",  # what is wrong with a tier
    "no_room if self.needs_slots else self.timeout_note",
    "done + _why_no_more(state, handoff.num_tokens, promises)",
}
"""Notes whose words stand elsewhere; the table has them, too."""
SAYS_WHY = ("as the end of a sentence", "Why requests find nothing")
"""What docstrings of functions say whose answers become part of a note."""


def text_of(told: ast.expr | None) -> str | None:
    """A text as it stands in the source, with a gap for each value that is filled in."""
    if isinstance(told, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in told.values)
    return (
        re.sub(r"\{\w*\}", "...", told.value)
        if isinstance(told, ast.Constant) and isinstance(told.value, str)
        else None
    )


def answers(function: ast.AST) -> list[str]:
    """Texts that a function returns, if they become part of a note."""
    if not isinstance(function, ast.FunctionDef) or not any(w in (ast.get_docstring(function) or "") for w in SAYS_WHY):
        return []
    values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    values = [part for v in values for part in ((v.body, v.orelse) if isinstance(v, ast.IfExp) else (v,))]
    return [text for value in values if (text := text_of(value))]


def notes_in_the_source() -> tuple[list[str], set[str]]:
    """What requests are told, with a gap for each value that is filled in; and expressions that have no words of their own."""
    texts, others = [], set[str]()
    for path in sorted((REPOSITORY / "src").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            texts += answers(node)
            if isinstance(node, ast.Call) and node.args and TELLING.search(ast.unparse(node.func)):
                told = node.args[-1]
                if isinstance(told, ast.Call) and isinstance(told.func, ast.Attribute) and told.func.attr == "format":
                    told = told.func.value
                told = constants.get(told.id, told) if isinstance(told, ast.Name) else told
                if (text := text_of(told)) is not None:
                    texts.append(text)
                else:
                    others.add(ast.unparse(told))
    return texts, others


def test_every_note_of_a_request_is_explained() -> None:
    section = NOTES.split("## Notes of a request")[1].split("\n## ")[0]
    lines = [line for row in re.findall(r"(?m)^\| (.*?`.+?) \|", section) for line in re.findall(r"`([^`]+)`", row)]
    pieces_of = [[piece.strip(" :;,") for piece in re.split(r"\.\.\.|\d+", line)] for line in lines]
    explained = [[piece for piece in pieces if piece] for pieces in pieces_of]
    texts, others = notes_in_the_source()
    assert len(texts) > 30
    assert [text for text in texts if not any(all(piece in text for piece in pieces) for pieces in explained)] == []
    assert others <= PASSED_ON, "notes that no table can be compared with: see where their words come from"
