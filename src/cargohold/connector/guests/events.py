"""KV events of tiers: what a router's own index needs to know of each chunk, whichever way it came into a tier.

A manager, and what is known of a tier, have only keys. A request has the tokens: so a chunk's *contents* are noted when a
request brings them, just before the chunk is stored, asked for or fetched, and they are kept as long as a tier has the chunk
or a caller asks for it::

    request --note--> contents --chunk is ready--> BlockStored: tokens, parent, one hash per engine block
                         |                             |
                         |                             +--chunk is gone--> BlockRemoved: the same hashes
                         +--neither announced nor asked for--> forgotten

Of a chunk whose contents are not known nothing is announced. It is announced when they are brought and its tier is heard of
again. Chunks of salted requests have no contents here unless they are to be published.

Contents are written down with their chunks, so a tier that lists what an earlier engine has left brings them, too.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol

import msgspec

from cargohold.cache.manager import ChunkKeys, ChunksRemoved, ChunksStored, OffloadKey, namespace_of_key, split_key
from cargohold.connector.kernel.guest import Guest
from cargohold.connector.kernel.jobs import Store
from cargohold.connector.kernel.requests import Offer
from cargohold.connector.kernel.shared import Shared
from cargohold.protocol import (
    MEDIUM_HOST,
    MEDIUM_STORAGE,
    Adapter,
    BlockRemoved,
    BlockStored,
    ExtraKey,
    KVCacheLayout,
    KVEvent,
    Locality,
    RequestView,
    SchedulerEnvironment,
    TransferOutcome,
)
from cargohold.tiers.chunk_format import NO_NOTE, TOKEN_TYPE, Details, Note, pack_tokens, unpack_tokens
from cargohold.tiers.port import Found
from cargohold.tiers.scheduler_side import MAX_ANNOUNCED, ChunksFound, LowerTiers, TierEvent


@dataclass(frozen=True, slots=True)
class Contents:
    """What events say of a chunk besides its key.

    Attributes:
        parent_hash: hash of the block before the chunk; ``None`` at the start of a prompt.
        tokens: its token ids, in an array of 4 bytes each.
        inner_hashes: hashes of its blocks but the last, whose hash is in its key.
        extra_keys: per block, what its hash covers besides tokens.
        adapter: adapter with which the KV was computed; ``None`` if there was none.
        is_salted: whether it is of a request with a salt.
    """

    parent_hash: bytes | None
    tokens: array[int]
    inner_hashes: tuple[bytes, ...] = ()
    extra_keys: tuple[tuple[ExtraKey, ...], ...] = ()
    adapter: Adapter | None = None
    is_salted: bool = False

    def details(self) -> Details:
        """Return the form in which a tier keeps them."""
        extras = _Extras(
            hashes=(self.parent_hash or b"", *self.inner_hashes),
            extra_keys=self.extra_keys if any(self.extra_keys) else (),
            adapter=None if self.adapter is None else (self.adapter.name, self.adapter.number),
            salted=self.is_salted,
        )
        return Details(pack_tokens(self.tokens), _ENCODER.encode(extras))


class _Extras(msgspec.Struct, frozen=True, omit_defaults=True):
    """The extras of a chunk's details.

    Attributes:
        hashes: of the block before the chunk, empty at the start of a prompt, and of the chunk's blocks but the last.
        extra_keys: per block; empty if no block has any.
        adapter: its name and number, if there was one.
        salted: whether the chunk is of a request with a salt.
    """

    hashes: tuple[bytes, ...]
    extra_keys: tuple[tuple[Any, ...], ...] = ()
    adapter: tuple[str, int] | None = None
    salted: bool = False


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_Extras)


def contents_of(request: RequestView, keys: ChunkKeys, at: int) -> Contents:
    """Return the contents of chunk number ``at`` of a request, in the group that ``keys`` are of."""
    size, block_tokens = keys.chunk_tokens, keys.group.block_tokens
    start, end = at * size, (at + 1) * size
    return Contents(
        split_key(keys.keys[at - 1])[0] if at else None,
        array(TOKEN_TYPE, request.all_token_ids[start:end]),
        keys.inner_hashes(request.block_hashes, at),
        tuple(request.extra_keys(first, first + block_tokens) for first in range(start, end, block_tokens)),
        request.adapter,
        request.salt is not None,
    )


def contents_of_tail(request: RequestView, end: int, size: int) -> Contents:
    """Return the contents of the tail that ends behind ``end`` tokens, as of a block of the ``size`` tokens of a hash."""
    start, hashes = end - size, request.block_hashes
    return Contents(
        hashes[start // size - 1] if start else None,
        array(TOKEN_TYPE, request.all_token_ids[start:end]),
        (),
        (request.extra_keys(start, end),),
        request.adapter,
        request.salt is not None,
    )


def contents_in(details: Details, *sizes: int) -> Contents | None:
    """Return the contents of a chunk that a tier has kept; ``None`` if they do not fit its blocks.

    Args:
        details: as the tier has them.
        sizes: numbers of tokens that an engine block of the chunk's group may have.
    """
    try:
        extras = _DECODER.decode(details.extras)
        tokens = unpack_tokens(details.tokens)
        extra_keys = tuple(tuple(map(_extra_key, of_block)) for of_block in extras.extra_keys)
    except (msgspec.DecodeError, ValueError):
        return None
    num_blocks = len(extras.hashes)
    is_whole = num_blocks > 0 and not len(tokens) % num_blocks and len(tokens) // num_blocks in sizes
    if not is_whole or len(extra_keys) not in (0, num_blocks):
        return None
    parent, *inner = extras.hashes
    adapter = None if extras.adapter is None else Adapter(*extras.adapter)
    return Contents(parent or None, tokens, tuple(inner), extra_keys or ((),) * num_blocks, adapter, extras.salted)


def _extra_key(value: object) -> ExtraKey:
    """Return an extra key; MessagePack has lists where it had tuples. Raises ``ValueError`` if it is none."""
    match value:
        case str() | bytes():
            return value
        case [str() as name, int() as number]:
            return name, number
        case _:
            raise ValueError("no extra key")


_NUM_SPARE: Final = 1024
"""Number of contents that are kept although they are not needed: so many are too few to look through."""


class EventSource(Protocol):
    """A manager, or anything else that knows which chunks a tier holds."""

    def take_events(self) -> Sequence[TierEvent]:
        """Return the events of chunks that became ready or were removed since the last call, in order."""


class Medium:
    """A tier whose events are translated, and its chunks that are announced.

    Args:
        source: the manager that holds the chunks; must record events.
        name: name of the medium in events.
        locality: whether it is local or shared; ``None`` if its name implies it.
        max_announced: maximum number of chunks announced at the same time. A tier that evicts by itself and does not report it
            has no more than it can hold: those reported least recently are taken back.
    """

    def __init__(
        self, source: EventSource, name: str, locality: Locality | None = None, max_announced: int | None = None
    ) -> None:
        self.source = source
        self.name = name
        self.locality = locality
        self.max_announced = max_announced
        # The latest reports are last. Hidden are those whose namespace is not the one in use.
        self.announced: OrderedDict[OffloadKey, None] = OrderedDict()
        self.hidden: OrderedDict[OffloadKey, None] = OrderedDict()
        # By group and hash, in how many of them a block is that is not the last of its chunk: prefixes that part within a
        # chunk have its first blocks in common.
        self.inner: Counter[tuple[int, bytes]] = Counter()


class TierEvents(Guest):
    """Translates what the tiers of one connector have and lose into KV events.

    The same chunk may come and go several times between two calls of ``take``. What has happened so far is translated before
    contents are noted or forgotten.

    Args:
        layout: the engine's paged KV.
        media: the tiers.
        is_asked_for: whether a chunk may become ready soon although no store of it was noted.
        salted: whether chunks of salted requests are announced, too.
    """

    name = "events"

    def __init__(
        self,
        layout: KVCacheLayout,
        media: Sequence[Medium],
        is_asked_for: Callable[[OffloadKey], bool],
        *,
        salted: bool,
    ) -> None:
        # A tail is announced as the engine announces it: as a block of the tokens of its last hash.
        self._hash_tokens = layout.hash_block_tokens
        more = {self._hash_tokens} if layout.has_tails else set[int]()
        self._sizes = [{group.block_tokens} | more for group in layout.groups]
        self._media = media
        self._is_asked_for = is_asked_for
        self._salted = salted
        self._namespace = 0
        self._events: list[KVEvent] = []
        # Those noted, or found to be needed, last are last.
        self.known: OrderedDict[OffloadKey, Contents] = OrderedDict()
        self._storing: set[OffloadKey] = set()

    # --- facts --------------------------------------------------------------------------------------------------------

    def chunks_listed(self, offers: Sequence[Offer]) -> None:
        """Remember the contents of chunks that may be stored later."""
        for offer in offers:
            if self.is_published(offer.state.request):
                self._note_contents(offer)

    def store_begins(self, store: Store, offers: Sequence[Offer]) -> None:
        """Remember the contents of chunks whose store begins."""
        self.chunks_listed(offers)
        self._storing.update(store.handle.keys)

    def store_ended(self, store: Store, since: float | None, outcome: TransferOutcome) -> None:
        """Note that a store of chunks has ended, well or not."""
        self._storing.difference_update(store.handle.keys)

    def use_namespace(self, namespace: int) -> None:
        """Announce what tiers have of this namespace, and take back the rest: no request finds that now."""
        self._translate()
        self._namespace = namespace
        for medium in self._media:
            there = (*medium.hidden, *medium.announced)
            self._take_back(medium, there)
            self._announce(medium, there)

    def shutdown(self) -> None:
        """Withdraw all that was announced: these chunks are no longer followed."""
        for medium in self._media:
            self._take_back(medium, tuple(medium.announced))
        self._media = ()

    # --- contents that others bring -----------------------------------------------------------------------------------

    def _note_contents(self, offer: Offer) -> None:
        keys, at = offer.of_group, offer.first
        self._make_room(len(offer.keys))
        if offer.tail_end:
            of_tail = contents_of_tail(offer.state.request, offer.tail_end, self._hash_tokens)
            self.known.update(dict.fromkeys(offer.keys, of_tail))
            return
        for key in offer.keys:
            while keys.keys[at] != key:
                at += 1
            self.known[key] = contents_of(offer.state.request, keys, at)

    def note_wanted(self, request: RequestView, keys: Iterable[ChunkKeys]) -> None:
        """Remember the contents of a request's chunks, some of which lower tiers are asked for right after this call."""
        if not self.is_published(request):
            return
        for group in keys:
            new = [(at, key) for at, key in enumerate(group.keys) if key not in self.known]
            self._make_room(len(new))
            self.known.update((key, contents_of(request, group, at)) for at, key in new)

    def is_published(self, request: RequestView) -> bool:
        """Whether anything may be announced of a request's chunks."""
        return self._salted or request.salt is None

    def notes_of(self, keys: Sequence[OffloadKey]) -> list[Note]:
        """Return what a tier is to keep of each of these chunks, which are written down now."""
        known = map(self.known.get, keys)
        return [NO_NOTE if contents is None else Note(contents.details()) for contents in known]

    def take(self) -> list[KVEvent]:
        """Return the KV events since the last call, in order per medium."""
        self._translate()
        events, self._events = self._events, []
        return events

    # --- contents -----------------------------------------------------------------------------------------------------

    def _make_room(self, num_new: int) -> None:
        """Forget contents that are not needed, looking at two for each new one: so at most half of all are of no use."""
        self._translate()
        contents = self.known
        for _ in range(min(2 * num_new, len(contents) - _NUM_SPARE)):
            key, known = contents.popitem(last=False)
            if self._is_needed(key):
                contents[key] = known

    def _is_needed(self, key: OffloadKey) -> bool:
        is_here = key in self._storing or any(key in there for of in self._media for there in (of.announced, of.hidden))
        return is_here or self._is_asked_for(key)

    # --- events -------------------------------------------------------------------------------------------------------

    def _translate(self) -> None:
        for medium in self._media:
            for event in medium.source.take_events():
                if isinstance(event, ChunksStored):
                    self._announce(medium, event.keys)
                elif isinstance(event, ChunksRemoved):
                    self._take_back(medium, event.keys)
                elif isinstance(event, ChunksFound):
                    self._announce(medium, [found.key for found in event.found if self._note_found(medium, found)])
                else:
                    self._take_back(medium, (*medium.announced, *medium.hidden))

    def _announce(self, medium: Medium, keys: Sequence[OffloadKey]) -> None:
        announced = medium.announced
        for key in keys:
            if key in announced:
                announced.move_to_end(key)
            elif (contents := self.known.get(key)) is not None and namespace_of_key(key) == self._namespace:
                announced[key] = None
                self._events.append(self._stored(medium, key, contents))
            elif contents is not None:
                medium.hidden[key] = None
        for known in (announced, medium.hidden):
            if medium.max_announced is not None and len(known) > medium.max_announced:
                self._take_back(medium, tuple(islice(known, len(known) - medium.max_announced)))

    def _note_found(self, medium: Medium, found: Found) -> bool:
        """Remember the contents of a chunk that a tier has listed; return whether it is to be announced now."""
        _, group = split_key(found.key)
        if found.key in medium.announced or group >= len(self._sizes):
            return False
        contents = contents_in(found.details, *self._sizes[group])
        if contents is None or (contents.is_salted and not self._salted):
            return False
        self.known.setdefault(found.key, contents)
        return True

    def _stored(self, medium: Medium, key: OffloadKey, contents: Contents) -> BlockStored:
        """Return the event of a chunk's blocks, without those that are announced already: they come first."""
        block_hash, group = split_key(key)
        hashes = (*contents.inner_hashes, block_hash)
        size = len(contents.tokens) // len(hashes)
        inner = [(group, inner_hash) for inner_hash in contents.inner_hashes]
        first = sum(block in medium.inner for block in inner)
        medium.inner.update(inner)
        return BlockStored(
            block_hashes=hashes[first:],
            parent_block_hash=hashes[first - 1] if first else contents.parent_hash,
            token_ids=tuple(contents.tokens[first * size :]),
            block_tokens=size,
            group=group,
            medium=medium.name,
            adapter=contents.adapter,
            extra_keys=contents.extra_keys[first:],
            locality=medium.locality,
        )

    def _take_back(self, medium: Medium, keys: Sequence[OffloadKey]) -> None:
        """Announce that chunks are gone, as far as they were announced: one event per group."""
        of_group: dict[int, list[bytes]] = {}
        for key in keys:
            medium.hidden.pop(key, None)
            if key in medium.announced:
                del medium.announced[key]
                block_hash, group = split_key(key)
                gone = of_group.setdefault(group, [])
                gone += self._no_longer_held(medium, group, self.known[key].inner_hashes)
                gone.append(block_hash)
        self._events += [
            BlockRemoved(tuple(hashes), group, medium.name, medium.locality) for group, hashes in of_group.items()
        ]

    def _no_longer_held(self, medium: Medium, group: int, inner_hashes: Sequence[bytes]) -> list[bytes]:
        """Return the inner blocks of a chunk that has gone which are in no other chunk."""
        medium.inner.subtract((group, inner_hash) for inner_hash in inner_hashes)
        gone = [inner_hash for inner_hash in inner_hashes if not medium.inner[group, inner_hash]]
        for inner_hash in gone:
            del medium.inner[group, inner_hash]
        return gone


def tier_events(
    environment: SchedulerEnvironment, host: EventSource, lower: LowerTiers | None, shared: Shared
) -> TierEvents | None:
    """Return the events of a connector's tiers; ``None`` without a listener.

    Args:
        environment: facts about the engine.
        host: the manager of host memory; must record events.
        lower: the tiers below, if there are any.
        shared: what the kernel shares.
    """
    if not environment.emits_events:
        return None
    media = [Medium(host, MEDIUM_HOST)]
    for tier in () if lower is None else lower.tiers:
        most = tier.options.max_chunks
        most = MAX_ANNOUNCED if most is None else min(MAX_ANNOUNCED, most)
        media.append(Medium(tier, MEDIUM_STORAGE, tier.options.locality, most))

    def is_asked_for(key: OffloadKey) -> bool:
        is_listed = shared.device is not None and key in shared.device
        return is_listed or (lower is not None and lower.is_asked_for(key))

    return TierEvents(environment.layout, media, is_asked_for, salted=environment.emits_salted_events)
