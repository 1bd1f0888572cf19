"""Count the objects that an object holds, as far as Python can tell."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable
from types import FunctionType, ModuleType

_EVERYBODYS = (type, ModuleType, logging.Logger)
"""Types of objects that are not followed: they are shared by everybody, and everything can be reached from them."""


def num_reachable(roots: Iterable[object]) -> int:
    """The number of objects that can be reached from ``roots``, themselves included; shared ones such as modules are not."""
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
    """The objects that a function refers to, except the globals of its module."""
    return [*(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__, function.__dict__]
