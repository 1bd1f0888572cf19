"""What tiers that several engines share have in common: one value per chunk."""

from __future__ import annotations

import json
import logging
import threading
from abc import abstractmethod
from collections.abc import Sequence

from cargohold.cache.manager import OffloadKey
from cargohold.errors import SparingLog, TierError
from cargohold.tiers.chunk_format import HEADER_BYTES, NO_NOTE, ChunkCodec, Note, details_are_sound
from cargohold.tiers.inventory import PACKED
from cargohold.tiers.memory import Staging, address_of, copy_bytes
from cargohold.tiers.port import LoadOutcome, StoreOutcome, Tier, TierUsage

logger = logging.getLogger(__name__)


class SharedTier(Tier):
    """A store of values that other engines write to as well. It needs no coordination: equal keys mean equal contents.

    The store decides what it keeps, by its life-cycle rules or its memory policy; ``cargohold cache prune`` deletes, too.

    Args:
        codec: makes and checks headers.
        chunk_bytes: bytes of the largest chunk.
    """

    def __init__(self, codec: ChunkCodec, chunk_bytes: int) -> None:
        self.name = "shared"
        self.chunk_bytes = chunk_bytes
        self._codec = codec
        self._max_value_bytes = HEADER_BYTES + chunk_bytes + codec.namespace.details_bytes
        self._staged: dict[int, memoryview] = {}  # memory of whole values, by the address of the chunk inside
        self._damage = SparingLog(logger)
        self._count_lock = threading.Lock()
        self._num_stored = 0
        self._stored_bytes = self._plain_bytes = 0

    def _description(self) -> bytes:
        """Return what the store is to say of the namespace, for ``cargohold cache``."""
        packed = {PACKED: "exponent"} if self._codec.number_types else {}
        return json.dumps({**self._codec.namespace.describe(), **packed}, indent=2).encode()

    def staging(self) -> memoryview:
        """Return memory with room for a header before it and details after it, so that a chunk is sent as it lies there."""
        value = self._value_memory()
        view = value[HEADER_BYTES : HEADER_BYTES + self.chunk_bytes]
        self._staged[address_of(view)] = value
        return view

    def store(
        self, key: OffloadKey, payload: memoryview, parent: OffloadKey | None = None, note: Note = NO_NOTE
    ) -> StoreOutcome:
        """Write a chunk, with what is known of it, unless it is there already."""
        if self.probe([key])[0]:
            return StoreOutcome.PRESENT
        header, body = self._codec.encode(key, payload, parent, self._codec.asked_now(note.retention))
        details = self._codec.encode_details(key, note.details)
        end = HEADER_BYTES + len(body)
        num_bytes = end + len(details)
        value = (self._staged.get(address_of(payload)) or memoryview(bytearray(num_bytes)))[:num_bytes]
        _bring(value[HEADER_BYTES:end], body)
        value[:HEADER_BYTES], value[end:] = header, details
        outcome = self._put(key, value)
        if outcome is StoreOutcome.STORED:
            with self._count_lock:
                self._num_stored += 1
                self._stored_bytes += len(value)
                self._plain_bytes += len(payload)
        return outcome

    def load(self, key: OffloadKey, into: memoryview) -> LoadOutcome:
        """Fetch a chunk and verify it; a bad one is deleted, so that the next store replaces it.

        If it cannot be deleted, it is a miss all the same: that one chunk is bad says nothing about the others.
        """
        value = self._read(key, into)
        if value is None:
            return LoadOutcome.ABSENT
        if self._decode(key, value, into):
            return LoadOutcome.LOADED
        try:
            self.remove([key])
        except TierError as error:
            facts = (self.name, key.hex(), error.reason)
            self._damage.warning("%s tier: chunk %s is damaged, and cannot be deleted: %s", *facts)
        else:
            self._damage.warning("%s tier: chunk %s is damaged; it is deleted", self.name, key.hex())
        return LoadOutcome.CORRUPT

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Do nothing: the store sees by itself which values are used."""

    def usage(self) -> TierUsage:
        """Return the number and bytes of the chunks that this worker has stored."""
        with self._count_lock:
            return TierUsage(self._num_stored, self._stored_bytes, None, self._plain_bytes)

    @abstractmethod
    def _put(self, key: OffloadKey, value: memoryview) -> StoreOutcome:
        """Write a value that is not there. Raises ``TierError``."""

    @abstractmethod
    def _get(self, key: OffloadKey) -> memoryview | None:
        """Return a value; ``None`` if it is not there. Raises ``TierError``."""

    def _value_memory(self) -> memoryview:
        return Staging(self._max_value_bytes).view

    def _read(self, key: OffloadKey, into: memoryview) -> memoryview | None:
        """Return a value whose payload may be in ``into`` already, if that is of ``staging``; by default, as ``_get``."""
        del into
        return self._get(key)

    def _decode(self, key: OffloadKey, value: memoryview, into: memoryview) -> bool:
        header = self._codec.header_of(value[:HEADER_BYTES], key, len(into))
        if header is None:
            return False
        end = HEADER_BYTES + header.num_bytes
        if len(value) < end or not details_are_sound(header, value[end:]):
            return False
        body = self._codec.body_for(header, into)
        _bring(body.view, value[HEADER_BYTES:end])
        return self._codec.decode(header, key, body, into)


def _bring(into: memoryview, source: memoryview) -> None:
    """Copy bytes that are not there already."""
    if address_of(into) != address_of(source):
        copy_bytes(into, source)
