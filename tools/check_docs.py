"""Check the documentation: links lead somewhere, pages, files and lines keep to their length, and named files exist.

Run from the repository's root. Prints one line per problem, and exits with 1 if there are any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SOURCE_PATH = re.compile(r"`((?:src|tests|benchmarks|docs|examples|tools)/[\w./-]+)`")
MAX_LINES = {"README.md": 120}
MAX_README_WORDS = 900
MAX_MANUAL_WORDS = 27_500
"""Of all pages together, without the reference in docs/api: who adds a page shortens others."""
MAX_COLUMNS = 140
MAX_CODE_COLUMNS = 102
"""What fits beside the site's menu in a window of 1,280 pixels: ``docs/_static/cargohold.css``."""
AS_PRINTED = {"CHANGELOG.md"}
TABLE = "|"
NOT_CODE = re.compile(r"^```.*?^```$|^    [^\n]*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
UNNATURAL = re.compile(
    r"\b(whoever|somebody|nobody|everybody|but for|anew|of one's own|heard?|hears|told by|(?:is|are|was|were|be) told)\b",
    re.IGNORECASE,
)
"""Words that a native writer of technical English would not have chosen in these pages."""
SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+|\n\n|\n *(?:\*|\d+\.) ")
MAX_WORDS = 45


def main() -> int:
    """Check every Markdown file; returns the exit status."""
    problems = [problem for file in sorted(markdown_files()) for problem in problems_of(file)]
    manual = [file for file in (ROOT / "docs").rglob("*.md") if file.parent.name != "api"]
    problems += [
        *too_long("README.md", [ROOT / "README.md"], MAX_README_WORDS),
        *too_long("docs", manual, MAX_MANUAL_WORDS),
    ]
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
    yield from unnatural(text, name)
    for path in SOURCE_PATH.findall(text):
        if not (ROOT / path).exists():
            yield f"{name}: {path} does not exist"


def unnatural(text: str, name: Path) -> Iterator[str]:
    """Sentences that are hard to read: with words of a list, or longer than anyone remembers.

    No package of the index does this for a list of our own without fetching itself first.
    """
    prose = NOT_CODE.sub(lambda code: "\n" * code[0].count("\n"), text)
    for number, line in enumerate(prose.splitlines(), 1):
        for word in UNNATURAL.findall(line):
            yield f"{name}:{number}: {word!r}: say it in plain English: name the subject, or use *except*, *again*, *reported*"
    for sentence in SENTENCE_END.split("\n".join(line for line in prose.splitlines() if not line.startswith(TABLE))):
        if len(words := sentence.split()) > MAX_WORDS:
            yield f"{name}: {len(words)} words in one sentence, which begins {' '.join(words[:6])!r}: make two of it"


def too_long(name: str, files: Iterable[Path], limit: int) -> Iterator[str]:
    """Whether files have more words than they may, code and tables included."""
    if (words := sum(len(file.read_text(encoding="utf-8").split()) for file in files)) > limit:
        yield f"{name}: {words:,} words; at most {limit:,}: shorten what readers need least"


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
