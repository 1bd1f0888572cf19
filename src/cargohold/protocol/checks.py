"""Checks that a connector's answers have the types that the contract declares.

A wrong type would make others fail later: the engine that counts with the answer, the executor that carries it to another
process, the composed connector that merges it. Each check returns the answer, or raises ``TypeError`` as if the connector
itself had raised it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

from cargohold.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from cargohold.protocol.messages import (
    NOTHING_ENDED,
    CacheReport,
    FinishedTransfers,
    KVConnectorSchedulerOutput,
    Stats,
    TransferOutcome,
)
from cargohold.protocol.request import Adapter

_LOCALITIES: Final = (None, "LOCAL", "REMOTE")


def checked_transfers(finished: object) -> FinishedTransfers:
    """Check the answer of ``get_finished``, and return it."""
    if finished is NOTHING_ENDED:
        return NOTHING_ENDED
    if not isinstance(finished, FinishedTransfers):
        raise TypeError(f"{finished!r} is no FinishedTransfers")
    for name in ("finished_sending", "finished_recving", "failed_recving"):
        ids = getattr(finished, name)
        if not isinstance(ids, AbstractSet) or not _are_all(ids, str):
            raise TypeError(f"{name}={ids!r} is no set of request ids")
    jobs: Any = finished.jobs
    if not isinstance(jobs, Mapping) or not (_are_all(jobs, int) and _are_all(jobs.values(), TransferOutcome)):
        raise TypeError(f"jobs={jobs!r} are no whole numbers and their outcomes")
    count: Any = finished.expected_finished_count
    if not isinstance(count, int):
        raise TypeError(f"expected_finished_count={count!r} is no number")
    return finished


def checked_block_ids(block_ids: Iterable[Any]) -> frozenset[int]:
    """Check the answer of ``get_block_ids_with_load_errors``, and return it as a frozen set."""
    checked = frozenset(block_ids)
    if not _are_all(checked, int):
        raise TypeError(f"{block_ids!r} are no block ids")
    return checked


def checked_stats(stats: Any) -> Stats:
    """Check the answer of either side's ``get_stats``, and return it."""
    if not isinstance(stats, Mapping) or not (_are_all(stats, str) and _are_all(stats.values(), int | float)):
        raise TypeError(f"{stats!r} are no names and numbers")
    return stats


def checked_number(number: Any, of: str) -> int | None:
    """Check the answer of ``get_finished_count``, or the first half of that of ``get_num_new_matched_tokens``; return it.

    Args:
        number: the answer.
        of: the unit that it counts, for the error.
    """
    if number is None or isinstance(number, int):
        return number
    raise TypeError(f"{number!r} is no number of {of}")


def checked_params(params: Any) -> Mapping[str, Any] | None:
    """Check the second half of the answer of ``request_finished``, and return it."""
    if params is None or (isinstance(params, Mapping) and _are_all(params, str)):
        return params
    raise TypeError(f"{params!r} are no transfer parameters")


def checked_locks(report: Any) -> KVConnectorSchedulerOutput:
    """Check the answer of ``report_to_scheduler``; return a copy, because the connector may reuse its own object."""
    if isinstance(report, KVConnectorSchedulerOutput):
        copy = KVConnectorSchedulerOutput(tuple(report.lock_block_ids), tuple(report.unlock_block_ids))
        if _are_all((*copy.lock_block_ids, *copy.unlock_block_ids), int):
            return copy
    raise TypeError(f"{report!r} is no KVConnectorSchedulerOutput with block ids")


def checked_report(report: Any) -> CacheReport:
    """Check the answer of ``explain``, and return it."""
    if isinstance(report, CacheReport):
        restored: Any = report.restored_tokens
        notes: Any = report.notes
        is_text = isinstance(notes, Sequence) and not isinstance(notes, str) and _are_all(notes, str)
        if isinstance(restored, Mapping) and _are_all(restored, str) and _are_all(restored.values(), int) and is_text:
            return report
    raise TypeError(f"{report!r} is no CacheReport of tokens by tier and notes")


def checked_events(events: Iterable[Any], num_groups: int | None = None) -> tuple[KVEvent, ...]:
    """Check the answer of ``take_events``, and return it as a tuple. A publisher encodes every field, so each is checked.

    Args:
        events: the answer.
        num_groups: number of KV-cache groups; ``None`` leaves the upper end of ``group`` unchecked.
    """
    checked = tuple(events)
    for event in checked:
        if not isinstance(event, BlockStored | BlockRemoved | AllBlocksCleared):
            raise TypeError(f"{event!r} is no KV event")
        for name, is_right in _fields_of_event(event, num_groups):
            if not is_right:
                # The value is not shown: it may be a prompt.
                raise TypeError(f"{name} of a {type(event).__name__} is not of its type, or not in its range")
    return checked


def _fields_of_event(event: Any, num_groups: int | None) -> Iterator[tuple[str, bool]]:
    """Yield each field's name, and whether its value is of its type and in its range.

    Must be fast, because there are many ``BlockStored`` events with thousands of tokens: hence exact types, compared in sets.
    """
    yield "medium", type(event.medium) is str
    if type(event) is AllBlocksCleared:
        return
    group = event.group
    yield "block_hashes", _is_sequence_of(event.block_hashes, {bytes})
    yield "group", type(group) is int and group >= 0 and (num_groups is None or group < num_groups)
    yield "locality", event.locality in _LOCALITIES
    if type(event) is BlockStored:
        yield "parent_block_hash", event.parent_block_hash is None or type(event.parent_block_hash) is bytes
        yield "token_ids", _is_sequence_of(event.token_ids, {int})
        yield "block_tokens", type(event.block_tokens) is int
        yield "adapter", event.adapter is None or isinstance(event.adapter, Adapter)
        yield "extra_keys", all(_is_sequence_of(keys, {str, bytes, tuple}) for keys in event.extra_keys)


def _is_sequence_of(items: object, kinds: AbstractSet[type]) -> bool:
    return isinstance(items, (tuple, list)) and set(map(type, items)) <= kinds


def _are_all(items: Iterable[object], kind: Any) -> bool:
    return all(isinstance(item, kind) for item in items)
