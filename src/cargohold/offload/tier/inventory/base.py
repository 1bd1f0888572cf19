"""The inventory port: what is stored in one place, whoever stored it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import chain

import xxhash

from cargohold.offload.tier.header import HEADER_BYTES, Header, unpack_header

PIECE_BYTES = 8 * 1024**2
"""What is in memory at a time of something that may be of any size."""


@dataclass(frozen=True, slots=True)
class Holding:
    """The chunks of one namespace.

    Attributes:
        id: of the namespace; in a directory of several engine replicas behind the path of the replica's.
        facts: what is known of the namespace: as ``Namespace.describe`` gives it, or nothing.
        num_chunks: chunks that seem to be there.
        num_bytes: bytes that they take of the medium, with everything around them.
        last_used_s: when something was done with them last, in seconds since 1970, or ``None`` if the medium does not tell.
        is_in_use: whether a process on this machine has it open; ``False`` where that cannot be known.
    """

    id: str
    facts: Mapping[str, str]
    num_chunks: int
    num_bytes: int
    last_used_s: float | None
    is_in_use: bool

    @property
    def short_id(self) -> str:
        """Enough of the id for people."""
        path, separator, name = self.id.rpartition("/")
        return f"{path}{separator}{name[:8]}"


class Finding(Enum):
    """What a look at a chunk found."""

    GOOD = "good"
    DAMAGED = "damaged"
    """A header or payload that fails its check, or belongs elsewhere."""


class Inventory(ABC):
    """What is stored in one place. Methods raise ``TierError`` when it fails or cannot be reached."""

    @abstractmethod
    def holdings(self) -> list[Holding]:
        """All namespaces, the one used longest ago first."""

    @abstractmethod
    def verify(self, namespace_id: str, *, delete: bool) -> Iterator[Finding]:
        """Read every chunk and check it, without needing the key if it is encrypted.

        Args:
            namespace_id: whose chunks.
            delete: whether to delete damaged ones.

        Raises:
            TierError: also if the namespace is in use.
        """

    @abstractmethod
    def remove(self, namespace_id: str) -> None:
        """Delete a namespace with all its chunks. Raises ``TierError``, also if it is in use."""

    def trim(self, namespace_id: str, num_bytes: int) -> int:
        """Delete the chunks that were stored longest ago, of at least so many bytes; how many bytes went.

        Where a medium evicts by itself, or frees space only as a whole, the namespace goes.
        """
        del num_bytes
        holding = next((found for found in self.holdings() if found.id == namespace_id), None)
        if holding is None:
            return 0  # somebody else was faster
        self.remove(namespace_id)
        return holding.num_bytes


def is_good(header: Header, payload: Iterable[memoryview]) -> bool:
    """Whether a payload, in pieces, is what its header says. What may be of any size is never in memory as a whole."""
    digest, num_bytes = xxhash.xxh3_128(), 0
    for piece in payload:
        digest.update(piece)
        num_bytes += len(piece)
    return (num_bytes, digest.digest()) == (header.num_bytes, header.checksum)


def check_value(value: Iterable[memoryview], namespace_id: str, key: bytes) -> Finding:
    """Check a header and the payload behind it, stored for a key; in pieces, the first of which is no shorter than a header."""
    pieces = iter(value)
    first = next(pieces, memoryview(b""))
    header = unpack_header(first[:HEADER_BYTES])
    if header is None or header.key != key or not header.namespace.hex().startswith(namespace_id):
        return Finding.DAMAGED
    return Finding.GOOD if is_good(header, chain([first[HEADER_BYTES:]], pieces)) else Finding.DAMAGED
