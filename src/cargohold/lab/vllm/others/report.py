"""A failing run for somebody who knows vLLM and not us: a table of its steps, and a script that shows it alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.metadata import version
from textwrap import fill
from typing import Any, Final

from cargohold.engine.core.request import RequestStatus, SchedulerStep, StepOutput
from cargohold.integrations.vllm import compat
from cargohold.lab.simulation.replica import Replica
from cargohold.lab.simulation.timeline import RecentTimeline
from cargohold.lab.simulation.transfers import CopiesInFlight
from cargohold.lab.simulation.world import Scenario
from cargohold.transfer import Direction

LEGEND: Final = """\
Every line is one step of vLLM's scheduler, or what a client did before it. "r1 8-12 in 3 4 5" computes tokens 8 to 12 of
request r1, whose block table is 3 4 5; with several KV-cache groups, "/" is between their tables, and block 0 keeps nothing.
Copies are those that begin in this step: "3 4 <- 8 9" loads rows 8 and 9 of host memory into blocks 3 and 4, "->" stores.
"""
_HEAD: Final = ("step", "computes", "waits", "copies", "free")


class StepTable(RecentTimeline):
    """Keeps the last lines of a table of steps."""

    def lines(self) -> list[str]:
        return [*LEGEND.splitlines(), " | ".join(_HEAD), *super().lines()]

    def note(self, now: float, what: str) -> None:
        self._last = ""
        self._lines.append(f"     | {what}")

    def step(self, now: float, engine: Replica, step: SchedulerStep, output: StepOutput) -> None:
        pool, report = engine.scheduler.kv.pool, output.connector
        loading = {name for name, request in engine.requests.items() if request.status is RequestStatus.LOADING}
        waiting = [request.request_id for request in engine.scheduler.waiting_requests()]
        cells = (
            ", ".join(_computed(step)),
            ", ".join(f"{name} for its load" if name in loading else name for name in waiting),
            ", ".join(_begun(engine.copies)) or "-",
            f"{pool.num_free_blocks} of {pool.num_usable_blocks}",
        )
        told = "".join(
            f"; {word} {' '.join(sorted(names))}"
            for word, names in (
                ("preempted", step.preempted_req_ids),
                ("loaded", report.finished_recving),
                ("load failed", report.failed_recving),
                ("sent", report.finished_sending),
            )
            if names
        )
        self._add(f"{engine.num_steps:4d} | ", " | ".join(cells) + told, is_idle=not step.scheduled)


def _computed(step: SchedulerStep) -> Iterator[str]:
    for share in step.scheduled:
        end = share.num_computed_tokens + share.num_scheduled_tokens
        tables = " / ".join(" ".join(map(str, table)) for table in share.block_ids)
        yield f"{share.request_id} {share.num_computed_tokens}-{end - 1} in {tables}"


def _begun(ranks: Sequence[CopiesInFlight]) -> Iterator[str]:
    """Copies that have begun since the last call."""
    for rank, copies in enumerate(ranks):
        while copies.begun:
            job = copies.begun.popleft()
            arrow = "<-" if job.direction is Direction.LOAD else "->"
            where = f" on rank {rank}" if len(ranks) > 1 else ""
            yield f"{' '.join(map(str, job.block_ids))} {arrow} {' '.join(map(str, job.rows))}{where}"


# --- a script that stands alone ---------------------------------------------------------------------------------------


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
