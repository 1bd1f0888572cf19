"""Whether a connector's answers are of the types that the contract declares.

Others would stumble over what is not: engines that count with it, executors that carry it to another process, composed
connectors that merge it. All raise ``TypeError``, as if the connector had stumbled itself.
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
    """What ``get_finished`` answered."""
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
    """What ``get_block_ids_with_load_errors`` answered."""
    checked = frozenset(block_ids)
    if not _are_all(checked, int):
        raise TypeError(f"{block_ids!r} are no block ids")
    return checked


def checked_stats(stats: Any) -> Stats:
    """What ``get_stats`` answered, on either side."""
    if not isinstance(stats, Mapping) or not (_are_all(stats, str) and _are_all(stats.values(), int | float)):
        raise TypeError(f"{stats!r} are no names and numbers")
    return stats


def checked_number(number: Any, of: str) -> int | None:
    """What ``get_finished_count`` and the first half of what ``get_num_new_matched_tokens`` answered."""
    if number is None or isinstance(number, int):
        return number
    raise TypeError(f"{number!r} is no number of {of}")


def checked_params(params: Any) -> Mapping[str, Any] | None:
    """The second half of what ``request_finished`` answered."""
    if params is None or (isinstance(params, Mapping) and _are_all(params, str)):
        return params
    raise TypeError(f"{params!r} are no transfer parameters")


def checked_locks(report: Any) -> KVConnectorSchedulerOutput:
    """What ``report_to_scheduler`` answered; a copy, as the connector may use its own object again."""
    if isinstance(report, KVConnectorSchedulerOutput):
        copy = KVConnectorSchedulerOutput(tuple(report.lock_block_ids), tuple(report.unlock_block_ids))
        if _are_all((*copy.lock_block_ids, *copy.unlock_block_ids), int):
            return copy
    raise TypeError(f"{report!r} is no KVConnectorSchedulerOutput with block ids")


def checked_report(report: Any) -> CacheReport:
    """What ``explain`` answered."""
    if isinstance(report, CacheReport):
        restored: Any = report.restored_tokens
        notes: Any = report.notes
        is_text = isinstance(notes, Sequence) and not isinstance(notes, str) and _are_all(notes, str)
        if isinstance(restored, Mapping) and _are_all(restored, str) and _are_all(restored.values(), int) and is_text:
            return report
    raise TypeError(f"{report!r} is no CacheReport of tokens by tier and notes")


def checked_events(events: Iterable[Any], num_groups: int | None = None) -> tuple[KVEvent, ...]:
    """What ``take_events`` answered. A publisher makes bytes of all that is in them."""
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
    """Names of fields, and whether each is of its type. Of chunks stored there are many, and thousands of tokens."""
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
