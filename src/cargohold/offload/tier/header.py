"""The header of a stored chunk: 256 bytes that say which chunk it is, with a checksum to verify it.

::

    0    magic            8      120  length of parent     1
    8    format version   2      121  parent              64
    10   flags            2      185  nonce               12
    12   (unused)         3      197  tag                 16
    15   payload bytes    8      213  checksum of payload 16
    23   namespace       32      229  time of storing, ns  8
    55   length of key    1      237  (unused)            11
    56   key             64      248  checksum of all this 8

All numbers are little-endian. Checksums are XXH3: they find accidental damage. Against tampering, use encryption.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from cargohold.offload.manager.base import OffloadKey
from cargohold.offload.tier.namespace import FORMAT_VERSION

HEADER_BYTES: Final = 256
MAX_KEY_BYTES: Final = 64
MAGIC: Final = b"\x93CHKV\r\n\x1a"
"""No text in any encoding, and changed by any conversion of line ends, so that such damage is noticed."""

_FIELDS = struct.Struct("<8sHH3xQ32sB64sB64s12s16s16sQ11x")
_CHECK = struct.Struct("<Q")
_ENCRYPTED = 1
assert _FIELDS.size + _CHECK.size == HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a chunk's header.

    Attributes:
        namespace: digest of the namespace.
        key: the chunk's key.
        parent: key of the chunk before it in its prefix, or empty.
        num_bytes: length of the payload.
        checksum: checksum of the payload as it is stored.
        stored_ns: time of storing, in nanoseconds since 1970.
        nonce: nonce of the encryption; empty if the payload is not encrypted.
        tag: authentication tag of the encryption; empty if the payload is not encrypted.
    """

    namespace: bytes
    key: OffloadKey
    parent: bytes
    num_bytes: int
    checksum: bytes
    stored_ns: int
    nonce: bytes = b""
    tag: bytes = b""

    @property
    def is_encrypted(self) -> bool:
        """Whether the payload is encrypted."""
        return bool(self.nonce)

    def pack(self) -> bytes:
        """Return the header as 256 bytes."""
        assert len(self.key) <= MAX_KEY_BYTES and len(self.parent) <= MAX_KEY_BYTES
        fields = _FIELDS.pack(
            MAGIC,
            FORMAT_VERSION,
            _ENCRYPTED if self.is_encrypted else 0,
            self.num_bytes,
            self.namespace,
            len(self.key),
            self.key,
            len(self.parent),
            self.parent,
            self.nonce,
            self.tag,
            self.checksum,
            self.stored_ns,
        )
        return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def unpack_header(data: bytes | memoryview) -> Header | None:
    """Parse a header; return ``None`` if the bytes are no header, damaged, of another format version, or impossible."""
    if len(data) != HEADER_BYTES or data[: len(MAGIC)] != MAGIC:
        return None
    if _CHECK.unpack_from(data, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(data[: _FIELDS.size]):
        return None
    (_, version, flags, num_bytes, namespace, key_length, key, parent_length, parent, nonce, tag, checksum, stored) = (
        _FIELDS.unpack_from(data)
    )
    if version != FORMAT_VERSION or not 0 < key_length <= MAX_KEY_BYTES or parent_length > MAX_KEY_BYTES:
        return None
    is_encrypted = bool(flags & _ENCRYPTED)
    return Header(
        namespace,
        key[:key_length],
        parent[:parent_length],
        num_bytes,
        checksum,
        stored,
        nonce if is_encrypted else b"",
        tag if is_encrypted else b"",
    )
