"""The hooks of both sides as tables, from which guards, forwarders and compositions are made.

For each method of ``KVConnectorScheduler`` the table says how its answer is checked, what a connector answers that is turned
off, and what several connectors answer together. A class that treats all hooks alike derives from ``HookDispatcher``, or from
``WorkerHookDispatcher``, and says that once; a hook that it treats otherwise it overrides::

    forwarder      the inner connector's answer
    guard          the inner connector's answer, checked; what is answered when off, once it has broken a rule
    composition    the children's answers, merged
"""

from __future__ import annotations

from abc import abstractmethod, update_abstractmethods
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from inspect import signature
from itertools import chain
from operator import attrgetter
from types import FunctionType
from typing import Any, Final, TypeVar, cast

from cargohold.errors import ContractError, RequestError
from cargohold.protocol.checks import (
    checked_block_ids,
    checked_contents,
    checked_hint_events,
    checked_locks,
    checked_matched,
    checked_number,
    checked_outages,
    checked_outcomes,
    checked_params,
    checked_report,
    checked_stats,
    checked_transfers,
)
from cargohold.protocol.connector import KVConnectorScheduler, KVConnectorWorker
from cargohold.protocol.hints import Hint, HintOutcome, answers_to, best_outcome
from cargohold.protocol.messages import CacheReport, EmptyMetadata

Method = TypeVar("Method", bound=Callable[..., Any])
Member = TypeVar("Member", bound=Any)
Answering = TypeVar("Answering")


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_: answer


def _none(*_: Any) -> None:
    return None


def _own(_: Sequence[Any]) -> Any:
    raise NotImplementedError("a composed connector answers this hook with a method of its own")


@dataclass(frozen=True, slots=True)
class Hook:
    """One method of one side.

    Attributes:
        name: its name.
        check: called with the answer and the call's arguments; returns the answer, or raises as if the connector had.
        off: called with the broken rule and the call's arguments; returns the answer of a connector that is turned off.
        merge: called with the answers of several connectors, the most preferred first; returns what they answer together.
        passes: what it may raise about its arguments: the caller's fault, not the connector's.
    """

    name: str
    check: Callable[..., Any] = lambda answer, *_: answer
    off: Callable[..., Any] = _none
    merge: Callable[[Sequence[Any]], Any] = _own
    passes: tuple[type[Exception], ...] = ()


def _no_hints(broken: ContractError, _: object, hints: Sequence[Hint]) -> Sequence[HintOutcome]:
    return answers_to(hints, reason=f"the connector {broken.connector} is off")


def _why_off(broken: ContractError, _: str) -> CacheReport:
    return CacheReport(notes=(str(broken),))


def _checked_finished(answer: Any, *_: object) -> tuple[bool, Mapping[str, Any] | None]:
    keeps_blocks, params = answer
    return bool(keeps_blocks), checked_params(params)


def _best_outcomes(answers: Sequence[Sequence[HintOutcome]]) -> list[HintOutcome]:
    return [best_outcome(of_hint) for of_hint in zip(*answers, strict=True)]


def _united(answers: Sequence[Iterable[Any]]) -> list[Any]:
    return list(chain.from_iterable(answers))


HOOKS: Final[Mapping[str, Hook]] = {
    hook.name: hook
    for hook in (
        Hook("bind_scheduler_context", merge=_none),
        Hook("on_new_request", passes=(RequestError,)),
        Hook("on_hints", lambda answer, _, hints: checked_outcomes(answer, hints), _no_hints, _best_outcomes),
        Hook("take_hint_events", checked_hint_events, _always(()), _united),
        Hook("get_num_new_matched_tokens", checked_matched, _always((0, False))),
        Hook("get_shared_prefix_end", lambda answer, _: checked_number(answer, "tokens") or 0, lambda *_: 0, max),
        Hook("expect_tokens", merge=_none),
        Hook("update_state_after_alloc"),
        Hook("build_connector_meta", off=_always(EmptyMetadata())),
        Hook("update_connector_output"),
        Hook("report_to_scheduler", lambda answer: None if answer is None else checked_locks(answer)),
        Hook("request_finished", _checked_finished, _always((False, None))),
        Hook("explain", lambda answer, _: checked_report(answer), _why_off),
        Hook("take_events", off=_always(()), merge=_united),  # the guard knows the number of groups, and checks it
        Hook("has_pending_work", bool, _always(False), any),  # the answer
        Hook("num_stuck_references", lambda answer: checked_number(answer, "references") or 0, _always(0), sum),
        Hook("on_pause", merge=_none),
        Hook("give_up_transfers", merge=_none),
        Hook("reset_cache", bool, _always(True), all),  # the answer
        Hook("use_weights", lambda answer, _: bool(answer), _always(True), all),
        Hook("get_kv_connector_stats", checked_stats, lambda _: {}),
        Hook("get_outages", checked_outages, _always(()), _united),
        Hook("get_contents", checked_contents, _always(()), _united),
        Hook("get_finished_count", lambda answer: checked_number(answer, "reports")),
        Hook("shutdown", merge=_none),
    )
}
"""The hooks by name, in the order in which ``KVConnectorScheduler`` has them."""


WORKER_HOOKS: Final[Mapping[str, Hook]] = {
    hook.name: hook
    for hook in (
        *(Hook(name, merge=_none) for name in ("register_kv_caches", "unregister_kv_caches", "restore_kv_caches")),
        *(Hook(name, merge=_none) for name in ("bind_connector_metadata", "handle_preemptions")),
        *(
            Hook(name, merge=_none)
            for name in ("start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save")
        ),
        Hook("get_transfer_results", checked_transfers),
        Hook("get_block_ids_with_load_errors", checked_block_ids),
        Hook("get_kv_connector_stats", checked_stats),
        Hook("build_connector_worker_meta"),
        *(Hook(name, merge=_none) for name in ("clear_connector_metadata", "shutdown")),
    )
}
"""The same for ``KVConnectorWorker``. ``NullConnectorWorker`` has the answers of a worker's guard that is off."""


def _dispatched(method: Method, hooks: Mapping[str, Hook] = HOOKS) -> Method:
    """Return a method that leaves the hook of this name to ``dispatch``."""
    hook, arguments = hooks[method.__name__], signature(method)

    def call(self: Any, *args: Any, **named: Any) -> Any:
        return self.dispatch(hook, arguments.bind(self, *args, **named).args[1:] if named else args)

    return cast("Method", update_wrapper(call, method, updated=()))  # its ``__dict__`` says that it is abstract


def answered(port: type, answer: Callable[[Any], Any]) -> Callable[[type[Answering]], type[Answering]]:
    """Let a class have what ``answer`` makes of each method and property of a port, except those that it has itself.

    Final methods call the others.
    """

    def decorate(answering: type[Answering]) -> type[Answering]:
        for name, member in vars(port).items():
            is_final = name.startswith("_") or getattr(member, "__final__", False)
            if isinstance(member, FunctionType | property) and not is_final and name not in vars(answering):
                setattr(answering, name, answer(member))
        return update_abstractmethods(answering)

    return decorate


def passed_on(member: Member) -> Member:
    """Return a method or property that ``self.inner`` answers, for classes that pass the calls of any port on."""
    if isinstance(member, property):
        return cast("Member", property(attrgetter(f"inner.{getattr(member.fget, '__name__', '')}")))
    name = member.__name__

    def call(self: Any, *args: Any, **named: Any) -> Any:
        return getattr(self.inner, name)(*args, **named)

    return cast("Member", update_wrapper(call, member, updated=()))


@answered(KVConnectorScheduler, _dispatched)
class HookDispatcher(KVConnectorScheduler):
    """A scheduler side whose hooks all do the same; see ``dispatch``."""

    @abstractmethod
    def dispatch(self, hook: Hook, args: tuple[Any, ...]) -> Any:
        """Answer a hook.

        Args:
            hook: which one.
            args: the arguments of the call, in the contract's order.
        """


@answered(KVConnectorWorker, partial(_dispatched, hooks=WORKER_HOOKS))
class WorkerHookDispatcher(KVConnectorWorker):
    """A worker side whose hooks all do the same; see ``HookDispatcher``."""

    @abstractmethod
    def dispatch(self, hook: Hook, args: tuple[Any, ...]) -> Any:
        """Answer a hook."""

    clear_connector_metadata = _dispatched(KVConnectorWorker.clear_connector_metadata, WORKER_HOOKS)


class ForwardingWorker(WorkerHookDispatcher):
    """Passes every call on to an inner worker side. Subclasses override the methods that they change.

    Args:
        inner: the worker side that answers.
    """

    def __init__(self, inner: KVConnectorWorker) -> None:
        self.inner = inner
        self.name = inner.name
        self.metadata_type = inner.metadata_type

    def dispatch(self, hook: Hook, args: tuple[Any, ...]) -> Any:
        """Return the inner worker side's answer."""
        return getattr(self.inner, hook.name)(*args)


class ForwardingScheduler(HookDispatcher):
    """Passes every call on to an inner connector. Subclasses override the methods that they change.

    Args:
        inner: the connector that answers.
    """

    def __init__(self, inner: KVConnectorScheduler) -> None:
        self.inner = inner
        self.name = inner.name
        self.worker_metadata_type = inner.worker_metadata_type

    def dispatch(self, hook: Hook, args: tuple[Any, ...]) -> Any:
        """Return the inner connector's answer."""
        return getattr(self.inner, hook.name)(*args)
