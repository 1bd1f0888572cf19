"""A failing run for readers who know vLLM and not Cargohold: a script that shows it alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.metadata import version
from textwrap import fill
from typing import Any

from cargohold.integrations.vllm import compat
from cargohold.lab.simulation.world import Scenario


def script(scenario: Scenario, failure: str, command: str) -> str:
    """Python text that plays a scenario and ends with status 1 if it fails. It needs vLLM and Cargohold alone."""
    modules: dict[str, set[str]] = {}
    text = _text(scenario, modules)
    imports = "\n".join(f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(modules.items()))
    vllm, own = compat.VLLM_VERSION, version("cargohold")
    return f'''"""Found by Cargohold {own} in vLLM {vllm}: {failure}

Found with: {command}
Play it with: python THIS_FILE
It needs vllm {vllm} and cargohold[lab]; no GPU and no model. Ends with status 1 if it fails, after a table of the last steps.
"""

from vllm import __version__

{imports}
from cargohold.lab.vllm.others.recipe import show

SCENARIO = {text}

if __name__ == "__main__":
    print(f"vLLM {{__version__}}; this was found in {vllm}")
    raise SystemExit(show(SCENARIO))
'''


def _text(value: Any, modules: dict[str, set[str]], indent: str = "") -> str:
    """Python text that makes ``value``. Notes in ``modules`` what it needs to import.

    Fields of dataclasses that are at their defaults are left out.
    """
    kind, deeper = type(value), indent + "    "
    match value:
        case Enum():
            modules.setdefault(kind.__module__, set()).add(kind.__name__)
            return f"{kind.__name__}.{value.name}"
        case Mapping():
            parts = [f"{_text(key, modules)}: {_text(item, modules, deeper)}" for key, item in value.items()]
            return _joined("{", parts, "}", indent)
        case tuple() | list():
            parts = [_text(item, modules, deeper) for item in value]
            opening, closing = "[]" if isinstance(value, list) else "()"
            return _joined(opening, parts, closing, indent)
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    modules.setdefault(kind.__module__, set()).add(kind.__name__)
    given = [
        (part.name, getattr(value, part.name)) for part in fields(value) if getattr(value, part.name) != part.default
    ]
    return _joined(f"{kind.__name__}(", [f"{name}={_text(item, modules, deeper)}" for name, item in given], ")", indent)


def _joined(opening: str, parts: Sequence[str], closing: str, indent: str) -> str:
    """In one line if that is short, or one part to a line."""
    line = f"{opening}{', '.join(parts)}{',' if opening == '(' and len(parts) == 1 else ''}{closing}"
    if len(line) + len(indent) <= 100 and "\n" not in line:
        return line
    if all(part.isdecimal() for part in parts):
        return fill(line, 116, subsequent_indent=indent + " ", break_long_words=False)
    return "\n".join([opening, *(f"{indent}    {part}," for part in parts), indent + closing])
