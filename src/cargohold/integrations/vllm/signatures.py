"""Checks that vLLM calls connectors, and can be called, as this adapter expects. They look at signatures alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from inspect import Parameter, Signature, signature
from types import FunctionType
from typing import Any

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def refused_call(what: str, function: Callable[..., Any], num_args: int = 0, keywords: Iterable[str] = ()) -> list[str]:
    """A sentence if ``function`` does not take ``num_args`` arguments by position and these keywords; else none.

    The function is not called.
    """
    try:
        signature(function).bind(*[None] * num_args, **dict.fromkeys(keywords))
    except (TypeError, ValueError) as error:
        return [f"{what} wants other arguments: {error}"]
    return []


def changed_hooks(ours: type, *, later: Iterable[str] = ()) -> list[str]:
    """Hooks whose signature in a class does not fit its bases', and hooks that the bases demand and it lacks, as sentences.

    Args:
        ours: the class. Its own public methods and properties are taken for hooks, and its bases must have all of them.
        later: hooks that the bases of some versions do not have yet.
    """
    changed = [sentence for name in vars(ours) if name not in later for sentence in _changed_hook(name, ours)]
    changed += [sentence for name in later if _inherited(name, ours) for sentence in _changed_hook(name, ours)]
    return changed + [f"vLLM demands a hook {name}" for name in sorted(_demanded(ours))]


@contextmanager
def waived_demands(ours: type) -> Iterator[None]:
    """Within the ``with`` block, the class can be instantiated although it lacks hooks that its bases demand."""
    demanded = _demanded(ours)
    ours.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]  # every class has it that ABCMeta made
    try:
        yield
    finally:
        ours.__abstractmethods__ = demanded  # type: ignore[attr-defined]  # see above


def _demanded(ours: type) -> frozenset[str]:
    return frozenset(getattr(ours, "__abstractmethods__", ()))


def _inherited(name: str, ours: type) -> Any:
    """The attribute that the class would inherit under this name, had it none of its own; ``None`` if there is none."""
    return next((vars(base)[name] for base in ours.__mro__[1:] if name in vars(base)), None)


def _changed_hook(name: str, ours: type) -> list[str]:
    own = vars(ours).get(name)
    if name.startswith("_") or not isinstance(own, FunctionType | classmethod | property):
        return []
    theirs = _inherited(name, ours)
    if theirs is None:
        return [f"vLLM has no hook {name}"]
    if type(own) is not type(theirs):
        return [f"vLLM's hook {name} is a {type(theirs).__name__} now"]
    if isinstance(own, property):
        return []
    problem = _misfit(_signature(own), _signature(theirs))
    return [] if problem is None else [f"vLLM's hook {name} {problem}"]


def _signature(hook: Any) -> Signature:
    return signature(hook.__func__ if isinstance(hook, classmethod) else hook)


def _misfit(ours: Signature, theirs: Signature) -> str | None:
    """Why a function of signature ``ours`` may fail where one of signature ``theirs`` is expected."""
    if ours == theirs:
        return None
    own, expected = list(ours.parameters.values()), list(theirs.parameters.values())
    for at, parameter in enumerate(expected):
        if not _takes(own, at, parameter):
            return f"has a parameter {parameter.name} at place {at}"
    names = {parameter.name for parameter in expected}
    for parameter in own:
        is_needed = parameter.default is Parameter.empty and parameter.kind in (*_BY_POSITION, Parameter.KEYWORD_ONLY)
        if is_needed and parameter.name not in names:
            return f"has no parameter {parameter.name} any more"
    return None


def _takes(own: list[Parameter], at: int, parameter: Parameter) -> bool:
    """Whether what is passed for ``parameter``, at place ``at``, finds one of ``own``."""
    kinds = {candidate.kind for candidate in own}
    if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
        return parameter.kind in kinds
    if parameter.kind is Parameter.KEYWORD_ONLY:
        named = any(candidate.name == parameter.name and candidate.kind in _BY_NAME for candidate in own)
        return named or Parameter.VAR_KEYWORD in kinds
    same = at < len(own) and own[at].kind in _BY_POSITION and own[at].name == parameter.name
    return same or {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD} <= kinds
