"""What the code costs its readers and the scheduler's thread, in counts that are the same on every machine.

``benchmarks/ratchets.json`` has the numbers that hold. A number that has risen fails ``tests/test_ratchets.py``: pay for it, or
raise it in the same commit, and say why in its message. ``python -m benchmarks.ratchets --write`` lowers the numbers that have
fallen; ``--raise`` also raises those that have risen.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeAlias

from benchmarks import paths
from cargohold import protocol
from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, simulated_layout
from cargohold.tiers.scheduler_side import TierOptions
from tests.held_tiers import SimulatedTiering

FILE: Final = Path(__file__).with_name("ratchets.json")
ALLOWED: Final = 1.01
"""A count may rise by one per cent without a word."""
EXACT: Final = ("size", "names")
"""Kinds that may not."""
PER_VERSION: Final = ("instructions", "calls", "quiet step")
"""Kinds that are the same only in one version of Python."""
PYTHON: Final = (3, 11)
"""The version that they are counted in."""
_WITH_STATEMENTS: Final = ("body", "orelse", "finalbody", "handlers", "cases")
"""The fields of nodes that have statements, or what has some."""

SOURCES: Final = paths.SOURCES
HOOKS: Final = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "report_to_scheduler",
    "request_finished",
)
_WORKER_HOOKS: Final = (
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
)
Counts: TypeAlias = dict[str, float]


def count() -> dict[str, Any]:
    """Return all counts, by kind."""
    result: dict[str, Any] = {"instructions": {}, "calls": {}, "quiet step": {}, "files": {}}
    for name, tier, num_prompts, num_tokens, num_generated in _scenes():
        scene = Scene(tier)
        scene.play(num_prompts, num_tokens, num_generated)
        instructions, calls = scene.instructions, scene.calls
        result["instructions"][name] = sum(instructions.values())
        result["calls"][name] = sum(calls.values())
        for hook in HOOKS:
            result["instructions"][f"{name}: {hook}"] = round(instructions[hook] / max(1, scene.times[hook]))
        if "generate" in name:
            result["quiet step"][name] = min(scene.of_steps)
    for where, tier in _tiers():
        passed = paths.count_look_ups(tier)
        for call, name in (("look-up", "look-up"), ("build_connector_meta", "step that stores")):
            result["files"][f"{name}, {where}"] = max(len(each.files) for each in passed if each.call == call)
    result["types"] = {road: len(types) for road, types in roads().items()}
    result["names"] = {"cargohold.protocol": len(protocol.__all__)}
    result["size"] = {"package": _statements(SOURCES.rglob("*.py")), "loaded by vLLM": _statements(loaded_by_vllm())}
    return result


def _scenes() -> Iterator[tuple[str, paths.Tier, int, int, int]]:
    for where in ("host", "host+disk"):
        for name, num_prompts, num_tokens, num_generated in (
            ("4 long prompts", 4, 400, 8),
            ("16 generate 64", 16, 24, 64),
        ):
            disk = TierOptions(name="disk", is_listed=True)
            tier = SimulatedOffloading(2000) if where == "host" else SimulatedTiering(400, [disk])
            yield f"{where}, {name}", tier, num_prompts, num_tokens, num_generated


class Scene:
    """An engine that serves prompts, and then the same ones again, and counts what its connector executes meanwhile.

    Attributes:
        instructions, calls, times: by hook, instructions of bytecode, calls of functions, and how often it was called.
        of_steps: calls in each ``build_connector_meta``.
    """

    def __init__(self, tier: paths.Tier) -> None:
        self._engine = SimulatedEngine(simulated_layout(4000), tier)
        self.instructions: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.times: Counter[str] = Counter()
        self.of_steps: list[int] = []
        for hook in HOOKS:
            setattr(self._engine.connector, hook, self._counted(hook, getattr(self._engine.connector, hook)))

    def play(self, num_prompts: int, num_tokens: int, num_generated: int) -> None:
        """Serve so many prompts of so many tokens, each twice; the second time with a token more."""
        for again in ((), (5,)):
            for number in range(num_prompts):
                first = number * 7919 % 50000
                self._engine.add(f"{number}{again}", [*range(first, first + num_tokens), *again], num_generated)
            self._engine.run()

    def _counted(self, hook: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            before = self.calls[hook]
            sys.settrace(trace)
            try:
                return method(*args)
            finally:
                sys.settrace(None)
                self.times[hook] += 1
                if hook == "build_connector_meta":
                    self.of_steps.append(self.calls[hook] - before)

        def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
            if not _is_connector(frame.f_code.co_filename):
                return None
            self.calls[hook] += 1
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return count_instruction

        def count_instruction(_frame: FrameType, event: str, _: object) -> Callable[..., Any]:
            self.instructions[hook] += event == "opcode"
            return count_instruction

        return call


@cache
def _is_connector(filename: str) -> bool:
    file = Path(filename)
    return SOURCES in file.parents and not any(part in file.parents for part in paths.NOT_THE_CONNECTOR)


# --- roads ------------------------------------------------------------------------------------------------------------


_NO_ROAD: Final = ("policies", "deadlines", "pace", "meters")
"""Modules whose objects order chunks, or measure."""


def _tiers() -> Iterator[tuple[str, paths.Tier]]:
    yield "host", SimulatedOffloading(paths.NUM_BLOCKS)
    yield "host and disk", SimulatedTiering(paths.NUM_BLOCKS, [TierOptions(name="disk", is_listed=True)])


def roads() -> dict[str, set[str]]:
    """Return, by road, the connector's types of which objects are made while chunks are on it.

    A store begins with the step that completes its chunks; a load when its request gets blocks; a write when it has ended.
    """
    (_, host), (_, both) = _tiers()
    prompt = paths.PROMPT[:33]
    made = _Made(host)
    made.serve(prompt)
    store = {"RequestState"} | made.since("build_connector_meta")
    pool = made.engine.scheduler.kv.pool
    pool.free_ids([block.block_id for block in pool.allocate(pool.num_free_blocks)])  # so that the device has nothing
    made.serve(prompt)
    load = {"RequestState", "Lookup"} | made.since("update_state_after_alloc")
    made = _Made(both)
    made.serve(prompt)
    return {"store": store, "load": load, "write": made.since("CopyResult")}


class _Made:
    """Notes the types of objects that a connector makes in each hook."""

    def __init__(self, tier: paths.Tier) -> None:
        self.engine = SimulatedEngine(simulated_layout(paths.NUM_BLOCKS), tier)
        self._made: list[tuple[str, set[str]]] = []
        for side, hooks in ((self.engine.connector, HOOKS), (self.engine.worker_sides[0], _WORKER_HOOKS)):
            for hook in hooks:
                setattr(side, hook, self._noted(hook, getattr(side, hook)))

    def serve(self, prompt: list[int]) -> None:
        """Serve a prompt, and let all transfers end."""
        self._made.clear()
        self.engine.add(f"request {len(self.engine.outputs)}", prompt, 1)
        self.engine.run()

    def since(self, what: str) -> set[str]:
        """Return the types of what was made from the first call of a hook on, or behind the one in which a type was made."""
        first = next(
            at if what == hook else at + 1 for at, (hook, kinds) in enumerate(self._made) if what in {hook, *kinds}
        )
        return set[str]().union(*(kinds for _, kinds in self._made[first:]))

    def _noted(self, hook: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            kinds: set[str] = set()
            self._made.append((hook, kinds))
            sys.setprofile(lambda frame, event, _: kinds.update(_made_by(frame)) if event == "call" else None)
            try:
                return method(*args)
            finally:
                sys.setprofile(None)

        return call


def _made_by(frame: FrameType) -> set[str]:
    """Return the name of the connector's type of which a frame makes an object; nothing if it makes none."""
    known, code = frame.f_locals, frame.f_code
    if code.co_name == "__init__":
        kind = type(known[code.co_varnames[0]])
    elif "_cls" in known:  # a ``NamedTuple``
        kind = known["_cls"]
    else:
        return set()
    where = {*kind.__module__.split(".")}
    is_ours = "cargohold" in where and where.isdisjoint(("engine", "lab", "protocol", *_NO_ROAD))
    return {kind.__name__} if is_ours else set()


# --- size -------------------------------------------------------------------------------------------------------------


def _statements(files: Iterable[Path]) -> int:
    """Return the number of statements in files, without docstrings: however they are formatted."""
    return sum(_statements_in(_module(file)) for file in files)


def _statements_in(node: ast.AST) -> int:
    """Return the number of statements within a node, expressions apart: they have none."""
    number = 0
    for inner in (each for name in _WITH_STATEMENTS for each in getattr(node, name, ())):
        is_docstring = isinstance(inner, ast.Expr) and isinstance(getattr(inner.value, "value", None), str)
        number += (isinstance(inner, ast.stmt) and not is_docstring) + _statements_in(inner)
    return number


@cache
def _module(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def loaded_by_vllm() -> set[Path]:
    """Return the files that are imported with the adapter for vLLM, as far as imports at the top of modules lead."""
    found: set[Path] = set()
    left = ["cargohold.integrations.vllm", "cargohold.integrations.vllm.connector"]
    while left:
        name = left.pop()
        parts = name.split(".")
        left += [".".join(parts[:end]) for end in range(1, len(parts))]
        path = SOURCES.joinpath(*parts[1:])
        module = path.with_suffix(".py")
        file = (
            module if module.is_file() else path / "__init__.py"
        )  # a folder may be left of a package that is a module now
        if parts[0] != "cargohold" or file in found or not file.is_file():
            continue
        found.add(file)
        for node in _module(file).body:
            if isinstance(node, ast.Import):
                left += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                left += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


# --- comparing --------------------------------------------------------------------------------------------------------


def risen(held: Mapping[str, Any], counted: Mapping[str, Any]) -> list[str]:
    """Return a line for each number that is higher than it may be, or that is not held yet."""
    lines = []
    for kind, name, number in _each(counted):
        limit = held.get(kind, {}).get(name)
        if limit is None:
            lines.append(f"{kind} of {name}: {number}, which is new")
        elif number > limit * (1.0 if kind in EXACT else ALLOWED):
            lines.append(f"{kind} of {name}: {number}, and {limit} holds")
    return lines


def _each(counted: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    is_counted = sys.version_info[:2] == PYTHON
    for kind, numbers in counted.items():
        if is_counted or kind not in PER_VERSION:
            yield from ((kind, name, number) for name, number in numbers.items())


def write(held: dict[str, Any], counted: Mapping[str, Any], *, also_risen: bool) -> None:
    """Change the numbers that hold to those that were counted, where these are lower, or else if they are ``also_risen``."""
    for kind, name, number in _each(counted):
        limit = held.setdefault(kind, {}).get(name, number)
        held[kind][name] = number if also_risen or number < limit else limit


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.ratchets", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--write", action="store_true", help="lower the numbers that have fallen")
    parser.add_argument("--raise", action="store_true", help="also raise those that have risen; the commit says why")
    arguments = vars(parser.parse_args())
    held, counted = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}, count()
    print(json.dumps(counted, indent=2))
    if lines := risen(held, counted):
        print("\n".join(["", "risen:", *lines]), file=sys.stderr)
    if arguments["write"] or arguments["raise"]:
        write(held, counted, also_risen=arguments["raise"])
        FILE.write_text(json.dumps(held, indent=2) + "\n", encoding="utf-8")
        print(f"written to {FILE.name}", file=sys.stderr)
        return 0
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
