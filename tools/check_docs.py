"""Check the documentation: links lead somewhere, files and lines keep to their length, and named files exist.

Run from the repository's root. Prints one line per problem, and exits with 1 if there are any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SOURCE_PATH = re.compile(r"`((?:src|tests|benchmarks|docs|examples|tools)/[\w./-]+)`")
MAX_LINES = {"README.md": 120}
MAX_COLUMNS = 140
MAX_CODE_COLUMNS = 102
"""What fits beside the site's menu in a window of 1,280 pixels: ``docs/_static/cargohold.css``."""
AS_PRINTED = {"CHANGELOG.md"}
TABLE = "|"


def main() -> int:
    """Check every Markdown file; returns the exit status."""
    problems = [problem for file in sorted(markdown_files()) for problem in problems_of(file)]
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    return 1 if problems else 0


def markdown_files() -> Iterator[Path]:
    """Markdown files that belong to the repository."""
    yield from ROOT.glob("*.md")
    yield from (ROOT / "docs").rglob("*.md")
    yield from (ROOT / "examples").rglob("*.md")


def problems_of(file: Path) -> Iterator[str]:
    """Problems in one file, as sentences."""
    text = file.read_text(encoding="utf-8")
    name = file.relative_to(ROOT)
    num_lines = text.count("\n")
    if num_lines >= MAX_LINES.get(str(name), num_lines + 1):
        yield f"{name}: {num_lines} lines; it must stay under {MAX_LINES[str(name)]}"
    for number, line in code_lines(text):
        if len(line) > MAX_CODE_COLUMNS and str(name) not in AS_PRINTED:
            yield f"{name}:{number}: {len(line)} columns of code; a reader's window cuts it behind {MAX_CODE_COLUMNS}"
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_COLUMNS and not line.startswith(TABLE):
            yield f"{name}:{number}: {len(line)} columns; it must stay within {MAX_COLUMNS}"
    for target in LINK.findall(CODE.sub("", text)):
        if not target.startswith(("http://", "https://", "mailto:")) and not leads_somewhere(file, target):
            yield f"{name}: link to {target} leads nowhere"
    for path in SOURCE_PATH.findall(text):
        if not (ROOT / path).exists():
            yield f"{name}: {path} does not exist"


def code_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines of code, without their indentation in the text, each with its number."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fence = "" if fence else line.strip()
        elif fence and fence != "```{raw} html":
            yield number, line
        elif not fence and line.startswith("    "):
            yield number, line[4:]


def leads_somewhere(file: Path, target: str) -> bool:
    """Whether a relative link's file exists and has the heading it names."""
    path, _, anchor = target.partition("#")
    destination = file if not path else file.parent / path
    if not destination.exists():
        return False
    return not anchor or anchor in anchors(destination)


def anchors(file: Path) -> set[str]:
    """Anchors of a file's headings, as Markdown renderers make them."""
    headings = HEADING.findall(CODE.sub("", file.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


if __name__ == "__main__":
    sys.exit(main())
