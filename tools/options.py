"""Write the documentation's tables of options from the classes that declare them: ``python tools/options.py``.

A table stands below a line ``<!-- options: MODULE:CLASS -->``; behind the class, ``json`` writes defaults as in JSON, and
``without BASE`` leaves out what another class declares.
The table of deadlines stands below ``<!-- deadlines -->``.

``--check`` writes nothing, and exits with 1 if a table is not what would be written.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from typing import Any

from cargohold.deadlines import DEFAULTS, TIMERS, Timer
from cargohold.options import Options, declared

ROOT = Path(__file__).resolve().parent.parent
TABLE = re.compile(r"(<!-- options: ([\w.]+):(\w+)( json)?(?: without (\w+))? -->\n\n)(?:\|.*\n)*")
DEADLINES = re.compile(r"(<!-- deadlines -->\n\n)(?:\|.*\n)*")
HELP = re.compile(r"(?ms)^    (\w+): (.*?)(?=^    \w|\Z|^\w)")


def main() -> int:
    """Write the tables, or check them; returns the exit status."""
    status = 0
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        made = TABLE.sub(renewed, text)
        made = DEADLINES.sub(lambda found: found[1] + "".join(deadlines()), made)
        if made != text and "--check" in sys.argv:
            sys.stderr.write(f"{page.relative_to(ROOT)}: a table of options is old; run python tools/options.py\n")
            status = 1
        elif made != text:
            page.write_text(made, encoding="utf-8")
    return status


def renewed(found: re.Match[str]) -> str:
    """What is to stand in place of a table."""
    head, module, name, is_json, base = found.groups()
    return head + "".join(rows(getattr(import_module(module), name), bool(is_json), base))


def deadlines() -> Iterator[str]:
    """The lines of the table of deadlines."""
    yield "| what must not take longer | than | by the clock | or else |\n|---|---|---|---|\n"
    for timer in TIMERS:
        what, then = (text.replace("``", "`") for text in (timer.what, timer.then))
        steps = f", and {timer.steps} steps" if timer.steps else ""
        yield f"| {what} | {length(timer)}{steps} | {timer.clock} | {then} |\n"


def length(timer: Timer) -> str:
    """A deadline as it follows from a time of the users, and its seconds by default."""
    if not timer.of:
        return f"{timer.plus_s:g} s"
    part = {1.0: "", 0.5: "half of ", 1 / 3: "a third of ", 2.0: "twice "}[timer.part]
    plus = f" and {timer.plus_s:g} s" if timer.plus_s else ""
    return f"{part}`{timer.of}`{plus} ({timer.seconds(DEFAULTS[timer.of]):g} s)"


def rows(kind: type, is_json: bool, base: str | None) -> Iterator[str]:
    """The lines of a class's table, what must be given first."""
    yield "| option | default | meaning |\n|---|---|---|\n"
    for option, of in sorted(declared(kind).items(), key=lambda each: each[1].default is not MISSING):
        if of.owner.__name__ != base:
            yield f"| `{option}` | {shown(of.default, is_json)} | {meaning(of.owner, option)} |\n"


def meaning(owner: type, option: str) -> str:
    """An option's line of help: what the docstring of its class says of it."""
    attributes = cleandoc(owner.__doc__ or "").partition("Attributes:\n")[2]
    help_of = dict(HELP.findall(attributes))
    return " ".join(help_of[option].split()).rstrip(".").replace("``", "`")


def shown(default: Any, is_json: bool) -> str:
    """A default as the user would write it; nothing if the option must be given."""
    if default is MISSING:
        return ""
    if isinstance(default, Options):
        return f"`{type(default).__name__}()`"
    if isinstance(default, int | float) and not isinstance(default, bool):
        return f"{default:g}"
    if default in ((), {}):
        return "none"
    if default == "":
        return '`""`'
    return f"`{json.dumps(default).strip(chr(34)) if is_json else default}`"


if __name__ == "__main__":
    sys.exit(main())
