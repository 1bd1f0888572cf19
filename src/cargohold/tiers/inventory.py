"""The inventory port: all that Cargohold has stored in one place, of any engine."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Final

import xxhash

from cargohold.errors import TierError
from cargohold.option_values import format_bytes
from cargohold.tiers.chunk_format import HEADER_BYTES, MAX_DETAILS_BYTES, Header, details_are_sound, unpack_header
from cargohold.tiers.namespace import FORMAT_VERSION, as_facts, parse_description

PIECE_BYTES = 8 * 1024**2
"""Objects and files of any size are read in pieces of this many bytes."""


@dataclass(frozen=True, slots=True)
class Holding:
    """The chunks of one namespace.

    Attributes:
        id: id of the namespace; in a directory of several engine replicas, after the path of the replica's subdirectory.
        facts: description of the namespace, as ``Namespace.describe`` gives it; empty if it is not known.
        num_chunks: number of chunks that seem to be there; they were not verified. ``None`` if they cannot be counted.
        num_bytes: bytes that its chunks take on the medium, headers, padding and descriptions included, as far as they can be
            counted.
        last_used_s: time of its last use, in seconds since 1970; ``None`` if the medium does not say.
        is_in_use: whether a process on this machine has it open, or may have it open, for instance another user's process;
            ``False`` if the medium never tells.
        remark: what could not be found out, with the files and the reasons; empty if there is nothing to say.
        spare_bytes: bytes that the namespace takes beyond ``num_bytes``, for chunks to come: files are preallocated.
        plain_bytes: bytes that the payloads had before they were packed; about, where only one was looked at; 0 if that is not
            known, or none was packed.
    """

    id: str
    facts: Mapping[str, str]
    num_chunks: int | None
    num_bytes: int
    last_used_s: float | None
    is_in_use: bool
    remark: str = ""
    spare_bytes: int = 0
    plain_bytes: int = 0

    @property
    def short_id(self) -> str:
        """The id with only the first 8 digits of the namespace's, for people."""
        path, separator, name = self.id.rpartition("/")
        return f"{path}{separator}{name[:8]}"


class Verification(Enum):
    """The result of verifying a chunk."""

    GOOD = "good"
    DAMAGED = "damaged"
    """The header or payload fails its check, or belongs to another chunk or namespace."""


class Inventory(ABC):
    """The namespaces in one place. Methods raise ``TierError`` when the place fails or cannot be reached."""

    @abstractmethod
    def holdings(self) -> list[Holding]:
        """Return all namespaces, the one used longest ago first if the medium tells."""

    @abstractmethod
    def verify(self, namespace_id: str, *, delete: bool) -> Iterator[Verification]:
        """Read and check every chunk of a namespace; yield one finding per chunk. Encrypted chunks need no key for that.

        Args:
            namespace_id: id of the namespace.
            delete: whether to delete damaged chunks.

        Raises:
            TierError: also if the namespace is in use; and, after all findings, if something could not be checked or deleted.
        """

    @abstractmethod
    def remove(self, namespace_id: str) -> None:
        """Delete a namespace with all its chunks. Raises ``TierError``, also if it is in use."""

    def tidy(self) -> int:
        """Delete what belongs to no chunk and will never, such as files of killed writers; return the bytes. Most have none."""
        return 0

    def trim(self, namespace_id: str, num_bytes: int) -> int:
        """Delete the oldest chunks, of at least ``num_bytes`` bytes; return how many bytes were deleted.

        Also gives back what is spare. For a medium that evicts by itself all of the namespace is deleted.
        """
        del num_bytes
        holding = next((found for found in self.holdings() if found.id == namespace_id), None)
        if holding is None:
            return 0  # another process has deleted it already
        self.remove(namespace_id)
        return holding.num_bytes


@contextmanager
def noted(reasons: list[str], path: Path | str) -> Iterator[None]:
    """End the ``with`` if a file fails, and note the reason: what does not need the file is done all the same.

    Args:
        reasons: why files failed; mutated.
        path: the file, for errors that do not name it, as those of open files.
    """
    try:
        yield
    except OSError as error:
        reasons.append(reason_of(error, path))


def reason_of(error: OSError, path: Path | str = "") -> str:
    """Return which file failed and why; it is ``path`` if the error does not say."""
    reason, where = error.strerror or str(error), str(error.filename or path)
    return reason if where in reason else f"{where}: {reason}"


def remarks_on(facts: Mapping[str, str]) -> list[str]:
    """Return what is to be said of a namespace for its description: that no engine of this version will ever read it."""
    found = facts.get("format", str(FORMAT_VERSION))
    return (
        [] if found == str(FORMAT_VERSION) else [f"format {found}, and engines of this version read {FORMAT_VERSION}"]
    )


def in_short(reasons: Sequence[str]) -> str:
    """Return the first of ``reasons``, and how many more there are; empty if there are none."""
    more = f" (and {len(reasons) - 1:,} more)" if len(reasons) > 1 else ""
    return "".join(reasons[:1]) + more


def raise_noted(tier: str, reasons: Sequence[str]) -> None:
    """Raise ``TierError`` with ``reasons`` in short, unless there are none."""
    if reasons:
        raise TierError(tier, in_short(reasons))


def is_good(header: Header, payload: Iterable[memoryview]) -> bool:
    """Whether a payload is what its header says. It comes in pieces, so that a large one is never in memory as a whole."""
    digest, num_bytes = xxhash.xxh3_128(), 0
    for piece in payload:
        digest.update(piece)
        num_bytes += len(piece)
    return (num_bytes, digest.digest()) == (header.num_bytes, header.checksum)


def check_value(value: Iterable[memoryview], namespace_id: str, key: bytes) -> Verification:
    """Check a header with the payload and the details after it, which are stored under ``key``.

    Args:
        value: the stored bytes in pieces, the first of which is no shorter than a header.
        namespace_id: id of the namespace that it must belong to.
        key: the chunk's key.
    """
    pieces = iter(value)
    first = next(pieces, memoryview(b""))
    header = unpack_header(first[:HEADER_BYTES])
    if header is None or header.key != key or not header.namespace.hex().startswith(namespace_id):
        return Verification.DAMAGED
    details = bytearray()
    payload = _up_to(header.num_bytes, chain([first[HEADER_BYTES:]], pieces), details)
    is_sound = is_good(header, payload) and details_are_sound(header, details)
    return Verification.GOOD if is_sound else Verification.DAMAGED


def _up_to(num_bytes: int, pieces: Iterable[memoryview], rest: bytearray) -> Iterator[memoryview]:
    """Yield the first ``num_bytes`` bytes of a value; add what follows to ``rest``, but not more than details can be."""
    for piece in pieces:
        yield piece[:num_bytes]
        rest += piece[num_bytes:][: MAX_DETAILS_BYTES + 1 - len(rest)]
        num_bytes = max(0, num_bytes - len(piece))


# --- the inventory of a store that several engines share: what is the same for all stores that can be listed ---------

NAME: Final = "shared"
PACKED: Final = "packed"
"""In the description of a namespace: how its chunks are packed, if they are. Not a part of its identity."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One of our objects or values in a store.

    Attributes:
        path: its path or name in the store.
        namespace_id: id of its namespace.
        key: the chunk's key; empty if the object is no whole chunk, but the namespace's description, or unfinished.
        num_bytes: its size.
        written_s: time of writing, in seconds since 1970; 0 if the store does not say.
        is_unfinished: whether it is a file that is still being written, or that a killed process left.
    """

    path: str
    namespace_id: str
    key: bytes
    num_bytes: int
    written_s: float = 0.0
    is_unfinished: bool = False

    @property
    def age(self) -> tuple[float, str]:
        """Orders objects, those written longest ago first."""
        return self.written_s, self.path


class StoreInventory(Inventory):
    """The namespaces that a listing of the store shows."""

    def holdings(self) -> list[Holding]:
        """Return the namespaces; their bytes are those of all objects."""
        found: defaultdict[str, list[StoredObject]] = defaultdict(list)
        with self._session():
            for stored in self._listed(""):
                found[stored.namespace_id].append(stored)
            holdings = [self._describe(name, objects) for name, objects in sorted(found.items())]
        return sorted(holdings, key=lambda holding: holding.last_used_s or 0.0)

    def verify(self, namespace_id: str, *, delete: bool) -> Iterator[Verification]:
        """Fetch and check every chunk."""
        troubles: list[str] = []
        with self._session():
            for chunk in self._chunks(namespace_id):
                with noted(troubles, chunk.path):
                    finding = self._check(chunk)
                    if finding is Verification.DAMAGED and delete:
                        with noted(troubles, chunk.path):
                            self._delete(chunk.path)
                    if finding is not None:
                        yield finding
        raise_noted(NAME, troubles)

    def remove(self, namespace_id: str) -> None:
        """Delete every object of a namespace."""
        with self._session():
            for stored in self._listed(namespace_id):
                self._delete(stored.path)

    def _chunks(self, namespace_id: str) -> list[StoredObject]:
        return [stored for stored in self._listed(namespace_id) if stored.key]

    def _check(self, chunk: StoredObject) -> Verification | None:
        """Verify a chunk; return ``None`` if it was deleted meanwhile. Raises the store's errors."""
        try:
            return check_value(self._pieces(chunk), chunk.namespace_id, chunk.key)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return Verification.DAMAGED  # a bad place on the medium; the other chunks may well be good

    def _describe(self, namespace_id: str, objects: Sequence[StoredObject]) -> Holding:
        facts: dict[str, str] = {}
        remarks: list[str] = []
        with noted(remarks, namespace_id):
            facts = as_facts(parse_description(self._description(namespace_id)))
            remarks += remarks_on(facts)
        plain_part = self._plain_part(objects) if PACKED in facts else 0
        left_bytes = sum(stored.num_bytes for stored in objects if stored.is_unfinished)
        if left_bytes:
            remarks.append(
                f"{format_bytes(left_bytes)} are unfinished; `cargohold cache prune` deletes what is left of them"
            )
        return Holding(
            id=namespace_id,
            facts=facts,
            num_chunks=sum(bool(stored.key) for stored in objects),
            num_bytes=sum(stored.num_bytes for stored in objects) - left_bytes,
            last_used_s=max(stored.written_s for stored in objects) or None,
            is_in_use=False,
            remark=in_short(remarks),
            plain_bytes=int(plain_part * sum(stored.num_bytes for stored in objects if stored.key)),
        )

    def _plain_part(self, objects: Sequence[StoredObject]) -> float:
        """Return how many times as long a chunk was before it was packed, by looking at one; 0 if that fails."""
        with suppress(StopIteration, ValueError, OSError):
            newest = max((stored for stored in objects if stored.key), key=lambda stored: stored.written_s)
            start = next(self._pieces(newest))
            header = unpack_header(start[:HEADER_BYTES])
            return 0 if header is None else header.plain_bytes / header.num_bytes
        return 0

    @abstractmethod
    def _session(self) -> AbstractContextManager[None]:
        """Surrounds all that one call asks the store; raises ``TierError`` for the store's errors."""

    @abstractmethod
    def _listed(self, namespace_id: str) -> Iterator[StoredObject]:
        """Yield our objects, each once; those of one namespace, unless ``namespace_id`` is empty."""

    @abstractmethod
    def _pieces(self, chunk: StoredObject) -> Iterator[memoryview]:
        """Yield a chunk's bytes in pieces, the first no shorter than a header. Raises ``FileNotFoundError`` if it is gone."""

    @abstractmethod
    def _description(self, namespace_id: str) -> bytes:
        """Return the description of a namespace; empty if there is none."""

    @abstractmethod
    def _delete(self, path: str) -> None:
        """Delete an object, unless it is gone."""
