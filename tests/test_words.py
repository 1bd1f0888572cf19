"""The words of the code: a class has a name of its own, and the glossary's words are those that the code uses."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "src" / "cargohold"
GLOSSARY = REPOSITORY / "docs" / "glossary.md"
SHARED = {
    "Limits": "of a tenant's chunks; and of a server's clients",
    "WorkerPart": "of our worker side; and of the adapter's",
}
"""Names of classes in two files of which a reader meets one alone."""


@cache
def modules() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(PACKAGE.rglob("*.py"))]


def test_a_class_name_means_one_class() -> None:
    files = defaultdict[str, set[str]](set)
    for path, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].add(str(path.relative_to(PACKAGE)))
    twice = {name: sorted(where) for name, where in files.items() if len(where) > 1}
    assert {name: where for name, where in twice.items() if name not in SHARED} == {}
    assert twice.keys() >= SHARED.keys(), "a name in the list above means one class by now"


def test_the_glossary_has_the_words_of_the_code() -> None:
    rows = re.findall(r"^\| (\*\*.*?\*\*) \|", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    words = {word for row in rows for word in re.findall(r"\*\*(.+?)\*\*", row)}
    assert len(words) > 20, "the table has another form"
    names = {_plain(name) for _, tree in modules() for name in _names(tree)}
    unused = {word for word in words if not any(_plain(word) in name for name in names)}
    assert not unused


def _names(tree: ast.Module) -> Iterator[str]:
    """Names of classes, of functions, and of what a module or a class has."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z]", "", name.lower())


def test_the_road_map_links_each_type_to_its_file() -> None:
    text = (REPOSITORY / "ARCHITECTURE.md").read_text(encoding="utf-8")
    linked = re.findall(r"\[`(\w+)`s?\]\((src/[\w/]+\.py)\)", text)
    names = [(name, path) for name, path in linked if name[0].isupper()]
    assert len(names) > 15, "the links have another form"
    for name, path in names:
        file = (REPOSITORY / path).read_text(encoding="utf-8")
        assert re.search(rf"(?m)^class {name}\b", file), f"{name} is not in {path}"
