"""Encodes chunks into stored bytes and decodes them again, verified, and encrypted if there is a key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import xxhash

from cargohold.offload.manager.base import OffloadKey
from cargohold.offload.tier.encryption import TAG_BYTES, EncryptionKey
from cargohold.offload.tier.header import Header, unpack_header
from cargohold.offload.tier.namespace import Namespace


@dataclass(frozen=True, slots=True)
class Body:
    """Memory that a stored payload is read into.

    Attributes:
        view: the part to read into; as long as the payload.
        sealed: for an encrypted payload, the memory of ``view`` with room for the tag behind it; else ``None``.
    """

    view: memoryview
    sealed: bytearray | None = None


class ChunkCodec:
    """Makes and checks headers within one namespace. Thread-safe.

    Attributes:
        namespace: what the bytes depend on, the id of the encryption key included.

    Args:
        namespace: what the bytes depend on besides the encryption key.
        key: key to encrypt with; ``None`` to leave chunks readable.
        time_ns: gives the time of day, in nanoseconds since 1970.
    """

    def __init__(self, namespace: Namespace, key: EncryptionKey | None, time_ns: Callable[[], int]) -> None:
        self.namespace = replace(namespace, encryption="" if key is None else key.id)
        self._digest = self.namespace.digest
        self._cipher = None if key is None else key.cipher(self._digest)
        self._time_ns = time_ns

    def encode(self, key: OffloadKey, payload: memoryview, parent: OffloadKey | None) -> tuple[bytes, memoryview]:
        """Return the chunk's header, and its payload as it is to be stored, which may be ``payload`` itself."""
        stored_ns, body, nonce, tag = self._time_ns(), payload, b"", b""
        if self._cipher is not None:
            nonce, body, tag = self._cipher.encrypt(payload, self._digest + key)
        header = Header(self._digest, key, parent or b"", len(payload), payload_checksum(body), stored_ns, nonce, tag)
        return header.pack(), body

    def now_ns(self) -> int:
        """Return the time of day, in nanoseconds since 1970, as headers have it for the time of storing."""
        return self._time_ns()

    def header_of(self, data: bytes | memoryview, key: OffloadKey, num_bytes: int) -> Header | None:
        """Return the header in ``data``; ``None`` unless it is of this chunk, of this namespace and of this length."""
        header = unpack_header(data)
        if header is None or header.key != key or header.num_bytes != num_bytes or not self.is_ours(header):
            return None
        return header

    def is_ours(self, header: Header) -> bool:
        """Whether a header is of this namespace, and encrypted exactly if there is a key."""
        return header.namespace == self._digest and header.is_encrypted is (self._cipher is not None)

    def body_for(self, into: memoryview) -> Body:
        """Return memory to read a payload into that ``decode`` then brings to ``into``; without a key, ``into`` itself."""
        if self._cipher is None:
            return Body(into)
        sealed = bytearray(len(into) + TAG_BYTES)
        return Body(memoryview(sealed)[: len(into)], sealed)

    def decode(self, header: Header, key: OffloadKey, body: Body, into: memoryview) -> bool:
        """Verify the payload that was read into ``body``, and write it, decrypted, to ``into``.

        Returns ``False`` if it is not what the header says; then ``into`` may hold garbage.
        """
        if payload_checksum(body.view) != header.checksum:
            return False
        if self._cipher is None or body.sealed is None:
            return True
        body.sealed[len(into) :] = header.tag
        return self._cipher.decrypt(header.nonce, body.sealed, self._digest + key, into)


def payload_checksum(data: memoryview) -> bytes:
    """Return the 128-bit XXH3 of a payload as it is stored."""
    digest = xxhash.xxh3_128()
    digest.update(data)  # unlike the one-line form, it lets other threads run
    return digest.digest()
