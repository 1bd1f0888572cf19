"""How much code a look-up passes, with and without a disk below host memory: files, calls and levels of calls.

A look-up that one can follow is short. What is counted is the connector's code, from the contract's method down, without the
engine's view of a request and the simulator's clock. Generator expressions and comprehensions count as calls, because readers
follow them, too. ``build_connector_meta`` and ``report_to_scheduler``, where the effects of look-ups are, are counted beside
them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import cargohold
from cargohold.connector.offloading import OffloadingScheduler
from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, simulated_layout
from cargohold.protocol import KVConnectorMetadata, KVConnectorSchedulerOutput, RequestView, StepView
from cargohold.tiers.scheduler_side import TierOptions
from tests.held_tiers import SimulatedTiering

SOURCES = Path(cargohold.__file__).parent
NOT_THE_CONNECTOR = (SOURCES / "engine", SOURCES / "lab")
Tier: TypeAlias = SimulatedOffloading | SimulatedTiering
NUM_BLOCKS = 200
PROMPT = list(range(257))
IN_HOST_MEMORY = PROMPT[:129]


@dataclass(slots=True)
class Passed:
    """What a call passed.

    Attributes:
        call: what was called.
        answer: what it answered.
        files: files of the connector that it passed, from the top of the package.
        num_calls: number of calls of functions of the connector.
        num_levels: depth of the deepest, 1 for the call itself.
    """

    call: str
    answer: object = None
    files: set[str] = field(default_factory=set)
    num_calls: int = 0
    num_levels: int = 0

    def figures(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"files": sorted(self.files), "num_files": len(self.files)}


class Profile:
    """Counts what calls pass, one after the other."""

    def __init__(self) -> None:
        self.passed: list[Passed] = []
        self._level = 0

    def count(self, call: str, function: Any, *args: Any) -> Any:
        """Call a function, and count."""
        self.passed.append(Passed(call))
        self._level = 0
        sys.setprofile(self._note)
        try:
            answer = function(*args)
        finally:
            sys.setprofile(None)
        self.passed[-1].answer = answer if isinstance(answer, tuple) else None
        return answer

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        is_ours = SOURCES in file.parents and not any(part in file.parents for part in NOT_THE_CONNECTOR)
        if event not in {"call", "return"} or not is_ours:
            return
        self._level += 1 if event == "call" else -1
        if event == "call":
            passed = self.passed[-1]
            passed.files.add(str(file.relative_to(SOURCES)))
            passed.num_calls += 1
            passed.num_levels = max(passed.num_levels, self._level)


class CountedScheduler(OffloadingScheduler):
    """Counts what look-ups and the call that carries out their effects pass, while there is a profile."""

    profile: Profile | None = None

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        look_up = super().get_num_new_matched_tokens
        if self.profile is None:
            return look_up(request, num_computed_tokens)
        answer: tuple[int | None, bool] = self.profile.count("look-up", look_up, request, num_computed_tokens)
        return answer

    def build_connector_meta(self, step: StepView) -> KVConnectorMetadata:
        build = super().build_connector_meta
        return build(step) if self.profile is None else self.profile.count("build_connector_meta", build, step)

    def report_to_scheduler(self) -> KVConnectorSchedulerOutput | None:
        report = super().report_to_scheduler
        return report() if self.profile is None else self.profile.count("report_to_scheduler", report)


def run(*, quick: bool = False) -> dict[str, Any]:
    """Count, for host memory alone and with a disk below it. Returns rows of figures, and the largest of all look-ups."""
    result: dict[str, Any] = {}
    disk, store = TierOptions(name="disk", is_listed=True), TierOptions(name="store", has_index=False)
    tiers: dict[str, Tier] = {
        "host": SimulatedOffloading(NUM_BLOCKS),
        "host and disk": SimulatedTiering(NUM_BLOCKS, [disk]),
        "host and a store that must be asked": SimulatedTiering(NUM_BLOCKS, [store]),
    }
    for name, tier in tiers.items():
        passed = count_look_ups(tier)
        look_ups = [each for each in passed if each.call == "look-up"]
        result[name] = {
            "most_files": max(len(each.files) for each in look_ups),
            "files_of_all": len(set[str]().union(*(each.files for each in look_ups))),
            "most_calls": max(each.num_calls for each in look_ups),
            "most_levels": max(each.num_levels for each in look_ups),
            "rows": [each.figures() for each in passed],
        }
    return result


def count_look_ups(tier: Tier) -> list[Passed]:
    """Serve a prompt whose first half host memory has; with a lower tier, that has the other half. Then serve a new one.
    Return what each call passed."""
    if isinstance(tier, SimulatedTiering):
        serve(tier, PROMPT)  # written down; the next engine's host memory is empty
    engine = serve(tier, IN_HOST_MEMORY)
    pool = engine.scheduler.kv.pool
    pool.free_ids([block.block_id for block in pool.allocate(pool.num_free_blocks)])  # so that the device has nothing
    scheduler = engine.connector
    scheduler.__class__ = CountedScheduler
    assert isinstance(scheduler, CountedScheduler)
    profile = scheduler.profile = Profile()
    engine.add("counted", PROMPT, 1)
    engine.run()
    engine.add("new", list(range(1000, 1257)), 1)
    engine.run()
    return profile.passed


def serve(tier: Tier, prompt: Sequence[int]) -> SimulatedEngine:
    """Let a new engine serve one prompt; return the engine."""
    engine = SimulatedEngine(simulated_layout(NUM_BLOCKS), tier)
    engine.add("before", prompt, 1)
    engine.run()
    return engine
