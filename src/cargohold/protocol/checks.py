"""What a connector is held to: types of its answers, its references and events, and how long it may take.

A wrong type would make others fail later: the engine that counts with the answer, the executor that carries it to another
process, the composed connector that merges it. Each check returns the answer, or raises ``TypeError`` as if the connector
itself had raised it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import isfinite
from typing import Any, Final, get_type_hints

from cargohold.protocol.engine_view import Adapter, RequestView
from cargohold.protocol.hints import Hint, HintEvent, HintOutcome
from cargohold.protocol.messages import (
    NOTHING_ENDED,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheReport,
    KVConnectorSchedulerOutput,
    KVConnectorTransferResults,
    KVEvent,
    Locality,
    TransferOutcome,
)
from cargohold.protocol.metrics import Stats, is_countable
from cargohold.protocol.reports import KeptPrefix, Outage, Pin, TenantUse, TierContents

_LOCALITIES: Final = (None, "LOCAL", "REMOTE")
_FIELDS: Final[Mapping[type, Mapping[str, Any]]] = {
    kind: {name: int | float if of is float else of for name, of in get_type_hints(kind).items()}
    for kind in (Pin, TenantUse, KeptPrefix)
}
"""What the fields of these must be: texts and numbers."""


def checked_transfers(finished: object) -> KVConnectorTransferResults:
    """Check the answer of ``get_transfer_results``, and return it."""
    if finished is NOTHING_ENDED:
        return NOTHING_ENDED
    if not isinstance(finished, KVConnectorTransferResults):
        raise TypeError(f"{finished!r} is not a KVConnectorTransferResults")
    for name in ("finished_sending", "finished_recving", "failed_recving"):
        ids = getattr(finished, name)
        if not isinstance(ids, AbstractSet) or not _are_all(ids, str):
            raise TypeError(f"{name}={ids!r} is not a set of request ids")
    jobs: Any = finished.jobs
    if not isinstance(jobs, Mapping) or not (_are_all(jobs, int) and _are_all(jobs.values(), TransferOutcome)):
        raise TypeError(f"jobs={jobs!r} are not whole numbers and their outcomes")
    count: Any = finished.expected_finished_count
    if not isinstance(count, int):
        raise TypeError(f"expected_finished_count={count!r} is not a number")
    return finished


def checked_block_ids(block_ids: Iterable[Any]) -> frozenset[int]:
    """Check the answer of ``get_block_ids_with_load_errors``, and return it as a frozen set."""
    checked = frozenset(block_ids)
    if not _are_all(checked, int):
        raise TypeError(f"{block_ids!r} are not block ids")
    return checked


def checked_stats(stats: Any) -> Stats:
    """Check the answer of either side's ``get_kv_connector_stats``, and return it: a counter that falls would end a server."""
    if not isinstance(stats, Mapping) or not all(map(is_countable, stats, stats.values())):
        raise TypeError(
            f"{stats!r} are not time series and numbers that can be added: finite ones, for counters from 0 on"
        )
    return stats


def checked_outages(outages: Any) -> Sequence[Outage]:
    """Check the answer of ``get_outages``, and return it."""
    if (
        not isinstance(outages, Sequence)
        or not _are_all(outages, Outage)
        or not _are_all((text for outage in outages for text in (outage.tier, outage.what, outage.reason)), str)
        or not _are_all((time for outage in outages for time in (outage.since, outage.retry_at or 0)), int | float)
    ):
        raise TypeError(f"{outages!r} is not a sequence of Outage")
    return outages


def checked_contents(contents: Any) -> Sequence[TierContents]:
    """Check the answer of ``get_contents``, and return it. A server encodes every field, so each is checked."""
    if not isinstance(contents, Sequence) or not _are_all(contents, TierContents):
        raise TypeError(f"{contents!r} is not a sequence of TierContents")
    for of_tier in contents:
        if not all(isinstance(found, kind) for found, kind in _fields_of_contents(of_tier)):
            raise TypeError(f"{of_tier!r:.500} has a field of another type")
    return contents


def _fields_of_contents(of_tier: Any) -> Iterator[tuple[object, Any]]:
    """Yield each field's value, and what type it must have."""
    yield of_tier.tier, str
    yield of_tier.max_pinned_chunks, int
    yield of_tier.max_pinned_chunks_each, int
    for items, kind in ((of_tier.pins, Pin), (of_tier.tenants, TenantUse), (of_tier.prefixes, KeptPrefix)):
        yield items, Sequence
        for item in items if isinstance(items, Sequence) else ():
            yield item, kind
            if isinstance(item, kind):
                yield from ((getattr(item, name), of) for name, of in _FIELDS[kind].items())


def checked_number(number: Any, of: str) -> int | None:
    """Check the answer of ``get_finished_count``, or the first half of that of ``get_num_new_matched_tokens``; return it.

    Args:
        number: the answer.
        of: the unit that it counts, for the error.
    """
    if number is None or isinstance(number, int):
        return number
    raise TypeError(f"{number!r} is not a number of {of}")


def checked_matched(answer: Any, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
    """Check the answer of ``get_num_new_matched_tokens``, and return it: at most the tokens that the request has left."""
    promised, is_async = answer
    num_tokens = checked_number(promised, "tokens")
    num_left = request.num_tokens - num_computed_tokens
    if num_tokens is not None and not 0 <= num_tokens <= num_left:
        raise ValueError(f"promised {num_tokens} tokens for request {request.request_id}, which has {num_left} left")
    return num_tokens, bool(is_async and num_tokens)


def checked_params(params: Any) -> Mapping[str, Any] | None:
    """Check the second half of the answer of ``request_finished``, and return it: it is carried to clients as JSON."""
    if params is None or (isinstance(params, Mapping) and is_plain(params)):
        return params
    raise TypeError(f"{params!r} are not transfer parameters: texts, numbers, lists, and mappings from texts to such")


def is_plain(value: object) -> bool:
    """Whether every executor and server can carry a value: as msgpack, and as JSON."""
    if isinstance(value, Mapping):
        return _are_all(value, str) and all(map(is_plain, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, str):
        return value.encode(errors="replace").decode() == value  # it has no half of a pair
    return value is None or (isinstance(value, int | float) and isfinite(value) and -(2**63) <= value < 2**64)


def checked_outcomes(outcomes: Iterable[Any], hints: Sequence[Hint]) -> tuple[HintOutcome, ...]:
    """Check the answer of ``on_hints``, and return it: one outcome per hint, in their order."""
    checked = tuple(outcomes)
    if not _are_all(checked, HintOutcome) or [outcome.action_id for outcome in checked] != [h.action_id for h in hints]:
        raise TypeError(f"{len(checked)} outcomes are not one for each of {len(hints)} hints")
    return checked


def checked_hint_events(events: Iterable[Any]) -> tuple[HintEvent, ...]:
    """Check the answer of ``take_hint_events``, and return it."""
    checked = tuple(events)
    if not _are_all(checked, HintEvent):
        raise TypeError(f"{checked!r} are not ends of hints")
    return checked


def checked_locks(report: Any) -> KVConnectorSchedulerOutput:
    """Check the answer of ``report_to_scheduler``; return a copy, because the connector may reuse its own object."""
    if isinstance(report, KVConnectorSchedulerOutput):
        copy = KVConnectorSchedulerOutput(tuple(report.block_ids_to_lock), tuple(report.block_ids_to_unlock))
        if _are_all((*copy.block_ids_to_lock, *copy.block_ids_to_unlock), int):
            return copy
    raise TypeError(f"{report!r} is not a KVConnectorSchedulerOutput with block ids")


def checked_report(report: Any) -> CacheReport:
    """Check the answer of ``explain``, and return it."""
    if isinstance(report, CacheReport):
        restored: Any = report.restored_tokens
        notes: Any = report.notes
        is_text = isinstance(notes, Sequence) and not isinstance(notes, str) and _are_all(notes, str)
        if isinstance(restored, Mapping) and _are_all(restored, str) and _are_all(restored.values(), int) and is_text:
            return report
    raise TypeError(f"{report!r} is not a CacheReport of tokens by tier and notes")


def checked_events(events: Iterable[Any], num_groups: int | None = None) -> tuple[KVEvent, ...]:
    """Check the answer of ``take_events``, and return it as a tuple. A publisher encodes every field, so each is checked.

    Args:
        events: the answer.
        num_groups: number of KV-cache groups; ``None`` leaves the upper end of ``group`` unchecked.
    """
    checked = tuple(events)
    for event in checked:
        if not isinstance(event, BlockStored | BlockRemoved | AllBlocksCleared):
            raise TypeError(f"{event!r} is not a KV event")
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
    return all(issubclass(found, kind) for found in {*map(type, items)})


# --- which blocks a connector has announced as stored -----------------------------------------------------------------


class AnnouncedBlocks:
    """The index that a follower of a connector's events has built: how often each block hash is stored, and where."""

    def __init__(self) -> None:
        # Counts per block hash, by medium, locality and group.
        self._held: dict[tuple[str, Locality | None, int], Counter[bytes]] = {}

    def follow(self, events: Iterable[KVEvent]) -> None:
        """Update the index with events that the connector's guard passes on."""
        for event in events:
            match event:
                case AllBlocksCleared():
                    self._held = {place: held for place, held in self._held.items() if place[0] != event.medium}
                case BlockStored():
                    self._held.setdefault((event.medium, event.locality, event.group), Counter()).update(
                        event.block_hashes
                    )
                case BlockRemoved():
                    held = self._held.setdefault((event.medium, event.locality, event.group), Counter())
                    for block_hash in event.block_hashes:
                        if held[block_hash] > 1:
                            held[block_hash] -= 1
                        else:
                            del held[block_hash]

    def withdraw(self) -> list[BlockRemoved]:
        """Empty the index; return the events that remove everything in it from a follower's index."""
        held, self._held = self._held, {}
        return [
            BlockRemoved(tuple(blocks.elements()), group, medium, locality)
            for (medium, locality, group), blocks in held.items()
            if blocks
        ]


# --- a count of the references that a connector holds on blocks -------------------------------------------------------
