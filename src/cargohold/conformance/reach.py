"""What an object holds, as far as Python can tell."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable
from types import FunctionType, ModuleType

_EVERYBODYS = (type, ModuleType, logging.Logger)
"""They lead to everything there is, and belong to nobody."""


def num_reachable(roots: Iterable[object]) -> int:
    """How many objects can be reached from some, without those that belong to everybody."""
    gc.collect()
    seen: dict[int, object] = {}
    pending = list(roots)
    while pending:
        found = pending.pop()
        if id(found) in seen or isinstance(found, _EVERYBODYS):
            continue
        seen[id(found)] = found
        pending += _held_by_function(found) if isinstance(found, FunctionType) else gc.get_referents(found)
    return len(seen)


def _held_by_function(function: FunctionType) -> list[object]:
    """All but the names of its module."""
    return [*(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__, function.__dict__]
