"""The format of a stored chunk, on every medium: header, payload, details.

The header says which chunk it is and how to verify it. The payload is the KV: packed if the tier is to do that and it gets
smaller (see ``packing``), and then encrypted if there is a key. The details are what KV events need of a chunk that was found
after a restart: its tokens above all. They are encrypted when the payload is, but by themselves, so that they can be read
without it. A value in a store has them after the payload, a disk in a table of their own.

The header has 256 bytes:

====  =============================================  ======  ===============================================================
at    field                                          bytes
====  =============================================  ======  ===============================================================
0     magic                                          8       93 43 48 4b 56 0d 0a 1a
8     version                                        2       2, or 3 of packed chunks; others are misses
10    flags                                          2       1: encrypted
12    priority                                       1       0 to 100; 255: not given
13    unused                                         1
14    tenant                                         8       the tenant whose quota it counts towards; zeros: none
22    length of the payload as stored                8
30    namespace                                      32      its SHA-256
62    key: length, bytes                             1 + 64
127   key of the chunk before it: length, bytes      1 + 64  length 0: none
192   nonce, tag of the payload's encryption         12, 16  zeros: not encrypted
220   checksum of the payload as stored              16      XXH3-128
236   time of storing                                8       nanoseconds since 1970
244   end of a lease, or of a raised priority        4       seconds since 1970; 0: there is none
248   checksum of the 248 bytes before               8       XXH3-64
====  =============================================  ======  ===============================================================

Packed chunks have shorter keys, and between them and the nonce how they were packed:

====  =============================================  ======  ===============================================================
62    key: length, bytes                             1 + 48
111   key of the chunk before it: length, bytes      1 + 48
160   length of the payload before                   8
168   checksum of the payload before                 16      XXH3-128
184   bytes of a number                              1
185   unused                                         7
====  =============================================  ======  ===============================================================

Details of n bytes, with t tokens; a chunk without them is as good as one with them:

==========  =======================================  ============  =========================================================
at          field                                    bytes
==========  =======================================  ============  =========================================================
0           length of all of it, n                   4
4           number of tokens, t                      4             0: not known
8           nonce, tag of their own encryption       12, 16        zeros: not encrypted
36          unused                                   4
40          token ids                                4 t
40 + 4 t    extras                                   n - 48 - 4 t  a MessagePack map of what else belongs to the hashes
                                                                   (``hashes`` of inner blocks, ``extra_keys``), or empty
n - 8       checksum of namespace, key, all before   8             XXH3-64
==========  =======================================  ============  =========================================================

All numbers are little-endian; what is unused is zero. Checksums are XXH3: they find accidental damage. Against tampering, use
encryption: it binds details to the namespace, the number of tokens, and the key of the chunk.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

import xxhash

from cargohold.cache.manager import OffloadKey, split_key
from cargohold.cache.retention import HELD, NO_RETENTION, NORMAL, Retention
from cargohold.tiers.encryption import TAG_BYTES, EncryptionKey
from cargohold.tiers.memory import bounce_buffer
from cargohold.tiers.namespace import FORMAT_VERSION, Namespace
from cargohold.tiers.packing import NUMBER_TYPES, pack, unpack

HEADER_BYTES: Final = 256
MAX_KEY_BYTES: Final = 64
MAX_DETAILS_BYTES: Final = 64 * 1024
"""Maximum size of details, enough for some 16,000 tokens. A chunk whose details are longer is stored without."""
MAGIC: Final = b"\x93CHKV\r\n\x1a"
"""No text in any encoding, and changed by any conversion of line ends, so that such damage is noticed."""

# What lies before three of the fields, which are also read by themselves, and all of them.
_TO_LENGTH = "<8sHHBx8s"
_TO_KEY = _TO_LENGTH + "Q32s"
_TO_STORED = _TO_KEY + "B64sB64s12s16s16s"
_FIELDS = struct.Struct(_TO_STORED + "QI")
_PACKED_FIELDS = struct.Struct(_TO_KEY + "B48sB48sQ16sB7x12s16s16sQI")
_CHECK = struct.Struct("<Q")
_COUNT = struct.Struct("<I")
_DETAILS = struct.Struct("<II12s16s4x")
_ENCRYPTED = 1
_TOKEN_BYTES: Final = 4
TOKEN_TYPE: Final = "I" if array("I").itemsize == _TOKEN_BYTES else "L"
"""Type of a token id in an array."""
_NO_PRIORITY = 255
_LENGTH_AT, _KEY_AT, _STORED_AT = map(struct.calcsize, (_TO_LENGTH, _TO_KEY, _TO_STORED))
_PLAIN_LENGTH_AT: Final = 160
_VERSION = struct.Struct("<8xH")
PACKED_VERSION: Final = 3
_BY_VERSION: Final = {FORMAT_VERSION: _FIELDS, PACKED_VERSION: _PACKED_FIELDS}
MAX_PACKED_KEY_BYTES: Final = 48
_MAX_UINT32 = 2**32 - 1
_EXTRAS_ROOM: Final = 128
_HASH_ROOM: Final = 36
_ROOM_STEP: Final = 256
assert _FIELDS.size == _PACKED_FIELDS.size == HEADER_BYTES - _CHECK.size


@dataclass(frozen=True, slots=True)
class Details:
    """What events say of a chunk besides its key.

    Attributes:
        tokens: its token ids, little-endian, 4 bytes each; empty if they are not known. See ``pack_tokens``.
        extras: MessagePack of what else belongs to the hashes, such as those of its inner blocks; empty if there is nothing.
    """

    tokens: bytes = b""
    extras: bytes = b""


NO_DETAILS: Final = Details()


@dataclass(frozen=True, slots=True)
class Note:
    """What engines know of a chunk besides its bytes, and a tier may keep with it.

    Attributes:
        details: what events say of it.
        retention: what hints ask for it, from now on.
    """

    details: Details = NO_DETAILS
    retention: Retention = NO_RETENTION


NO_NOTE: Final = Note()


@dataclass(frozen=True, slots=True)
class Packed:
    """How a payload was packed.

    Attributes:
        num_bytes: length of the payload before.
        checksum: its checksum before.
        width: bytes of a number; see ``packing``.
    """

    num_bytes: int
    checksum: bytes
    width: int


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a chunk's header.

    Attributes:
        namespace: digest of the namespace.
        key: the chunk's key.
        parent: key of the chunk before it in its prefix, or empty.
        num_bytes: length of the payload as it is stored.
        checksum: checksum of the payload as it is stored.
        stored_ns: time of storing, in nanoseconds since 1970.
        nonce: nonce of the encryption; empty if the payload is not encrypted.
        tag: authentication tag of the encryption; empty if the payload is not encrypted.
        retention: what hints ask for it, in seconds since 1970.
        packed: how the payload was packed; ``None`` if it was not.
    """

    namespace: bytes
    key: OffloadKey
    parent: bytes
    num_bytes: int
    checksum: bytes
    stored_ns: int
    nonce: bytes = b""
    tag: bytes = b""
    retention: Retention = NO_RETENTION
    packed: Packed | None = None

    @property
    def plain_bytes(self) -> int:
        """Length of the payload before it was packed."""
        return self.num_bytes if self.packed is None else self.packed.num_bytes

    @property
    def is_encrypted(self) -> bool:
        return bool(self.nonce)

    def pack(self) -> bytes:
        packed = self.packed
        assert max(len(self.key), len(self.parent)) <= (MAX_KEY_BYTES if packed is None else MAX_PACKED_KEY_BYTES)
        fields = (_FIELDS if packed is None else _PACKED_FIELDS).pack(
            MAGIC,
            FORMAT_VERSION if packed is None else PACKED_VERSION,
            _ENCRYPTED if self.is_encrypted else 0,
            self.retention.level if self.retention.level not in (HELD, NORMAL) else _NO_PRIORITY,
            self.retention.tenant,
            self.num_bytes,
            self.namespace,
            len(self.key),
            self.key,
            len(self.parent),
            self.parent,
            *(() if packed is None else (packed.num_bytes, packed.checksum, packed.width)),
            self.nonce,
            self.tag,
            self.checksum,
            self.stored_ns,
            min(_MAX_UINT32, int(self.retention.until_s)),
        )
        return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def lengths_in(header: bytes) -> tuple[int, int]:
    """Return the lengths of the payload that a header says, as stored and before, without checking the header."""
    stored = int.from_bytes(header[_LENGTH_AT : _LENGTH_AT + 8], "little")
    if _VERSION.unpack_from(header)[0] != PACKED_VERSION:
        return stored, stored
    return stored, int.from_bytes(header[_PLAIN_LENGTH_AT : _PLAIN_LENGTH_AT + 8], "little")


def tag_of(header: bytes) -> int:
    """Return a number of 32 bits that stands for a header's chunk and its time of storing, whatever hints ask for it."""
    digest = xxhash.xxh3_64(header[_KEY_AT : _KEY_AT + 1 + MAX_KEY_BYTES])
    digest.update(header[_STORED_AT : _STORED_AT + 8])
    return digest.intdigest() & _MAX_UINT32


def unpack_header(data: bytes | memoryview) -> Header | None:
    """Parse a header; return ``None`` if the bytes are no header, damaged, of another format version, or impossible."""
    if len(data) != HEADER_BYTES or data[: len(MAGIC)] != MAGIC:
        return None
    if _CHECK.unpack_from(data, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(data[: _FIELDS.size]):
        return None
    fields = _BY_VERSION.get(*_VERSION.unpack_from(data))
    if fields is None:
        return None
    _, _, flags, priority, tenant, num_bytes, namespace, *more = fields.unpack_from(data)
    key_length, key, parent_length, parent, *how, nonce, tag, checksum, stored_ns, until_s = more
    packed = Packed(*how) if how else None
    if not 0 < key_length <= len(key) or parent_length > len(parent) or (packed and num_bytes >= packed.num_bytes):
        return None
    is_encrypted = bool(flags & _ENCRYPTED)
    return Header(
        namespace,
        key[:key_length],
        parent[:parent_length],
        num_bytes,
        checksum,
        stored_ns,
        nonce if is_encrypted else b"",
        tag if is_encrypted else b"",
        _retention(priority, float(until_s), tenant),
        packed,
    )


def _retention(priority: int, until_s: float, tenant: bytes) -> Retention:
    if priority == _NO_PRIORITY:
        return Retention(HELD, until_s, tenant) if until_s else NO_RETENTION
    return Retention(priority, until_s if priority > NORMAL else inf, tenant)


@dataclass(frozen=True, slots=True)
class PayloadBuffer:
    """Memory that a stored payload is read into.

    Attributes:
        view: the part to read into; as long as the payload as stored.
        sealed: for an encrypted payload, the memory of ``view`` with room for the tag after it; else ``None``.
    """

    view: memoryview
    sealed: bytearray | None = None


class ChunkCodec:
    """Makes and checks stored chunks within one namespace. Thread-safe.

    Attributes:
        namespace: what the bytes depend on, the id of the encryption key included.
        number_types: as given; may be emptied before the first chunk.

    Args:
        namespace: what the bytes depend on besides the encryption key.
        key: key to encrypt with; ``None`` to leave chunks readable.
        time_ns: gives the time of day, in nanoseconds since 1970.
        number_types: of each group, the type of the numbers in its chunks, by which they are packed; empty to pack none.
    """

    def __init__(
        self,
        namespace: Namespace,
        key: EncryptionKey | None,
        time_ns: Callable[[], int],
        number_types: Sequence[str] = (),
    ) -> None:
        self.number_types = number_types
        self.namespace = replace(namespace, encryption="" if key is None else key.id)
        self._digest = self.namespace.digest
        self._cipher = None if key is None else key.cipher(self._digest)
        # A key of its own: neither can take the place of the other, and nonces are used up half as fast.
        self._details_cipher = None if key is None else key.cipher(self._digest, b"details")
        self._time_ns = time_ns

    def encode(
        self, key: OffloadKey, payload: memoryview, parent: OffloadKey | None, retention: Retention = NO_RETENTION
    ) -> tuple[bytes, memoryview]:
        """Return the chunk's header, and its payload as it is to be stored.

        That may be ``payload`` itself, or memory of this thread that is valid until its next call.
        """
        stored_ns, nonce, tag = self._time_ns(), b"", b""
        body, packed = self._pack(key, parent or b"", payload) if self.number_types else (payload, None)
        if self._cipher is not None:
            nonce, body, tag = self._cipher.encrypt(body, self._digest + key)
        checksum = payload_checksum(body)
        header = Header(self._digest, key, parent or b"", len(body), checksum, stored_ns, nonce, tag, retention, packed)
        return header.pack(), body

    def _pack(self, key: OffloadKey, parent: bytes, payload: memoryview) -> tuple[memoryview, Packed | None]:
        """Return a payload packed, and how, if its numbers are of a type that is, and it gets smaller; else as it is."""
        group = split_key(key)[1]
        number = NUMBER_TYPES.get(self.number_types[group]) if group < len(self.number_types) else None
        fits = max(len(key), len(parent)) <= MAX_PACKED_KEY_BYTES
        body = pack(payload, number.width) if number is not None and fits else None
        if number is None or body is None:
            return payload, None
        return body, Packed(len(payload), payload_checksum(payload), number.width)

    def asked_now(self, retention: Retention) -> Retention:
        """Return what a message asks for that comes now, in seconds since 1970."""
        return retention.on_clock(self._time_ns() / 1e9)

    def with_retention(self, header: Header, retention: Retention) -> bytes:
        """Return the bytes of a chunk's header with another retention."""
        return replace(header, retention=retention).pack()

    def encode_details(self, key: OffloadKey, details: Details) -> bytes:
        """Return a chunk's details as they are to be stored; empty if there is nothing to say, or no room for it."""
        num_bytes = _DETAILS.size + len(details.tokens) + len(details.extras) + _CHECK.size
        if details == NO_DETAILS or num_bytes > self.namespace.details_bytes:
            return b""
        num_tokens = len(details.tokens) // _TOKEN_BYTES
        said, nonce, tag = memoryview(details.tokens + details.extras), b"", b""
        if self._details_cipher is not None:
            nonce, said, tag = self._details_cipher.encrypt(said, self._bound_to(key, num_tokens))
        record = _DETAILS.pack(num_bytes, num_tokens, nonce, tag) + said
        return record + _CHECK.pack(details_check(self._digest, key, record))

    def decode_details(self, key: OffloadKey, data: bytes | bytearray | memoryview) -> Details | None:
        """Return the details at the start of ``data``; ``None`` if there are none, or none that are sound and this chunk's."""
        record = sound_details(self._digest, key, data)
        if record is None:
            return None
        _, num_tokens, nonce, tag = _DETAILS.unpack_from(record)
        said = bytes(record[_DETAILS.size : -_CHECK.size])
        if self._details_cipher is not None:
            plain = bytearray(len(said))
            bound_to = self._bound_to(key, num_tokens)
            if not self._details_cipher.decrypt(nonce, bytearray(said + tag), bound_to, memoryview(plain)):
                return None
            said = bytes(plain)
        end = _TOKEN_BYTES * num_tokens
        return None if end > len(said) else Details(said[:end], said[end:])

    def _bound_to(self, key: OffloadKey, num_tokens: int) -> bytes:
        """Return what encrypted details are bound to: without the number, tokens could be passed off as extras."""
        return self._digest + _COUNT.pack(num_tokens) + key

    def now_ns(self) -> int:
        """Return the time of day, in nanoseconds since 1970, as headers have it for the time of storing."""
        return self._time_ns()

    def header_of(self, data: bytes | memoryview, key: OffloadKey, num_bytes: int) -> Header | None:
        """Return the header in ``data``; ``None`` unless it is of this chunk, of this namespace and of this length."""
        header = unpack_header(data)
        if header is None or header.key != key or header.plain_bytes != num_bytes or not self.is_ours(header):
            return None
        return header

    def is_ours(self, header: Header) -> bool:
        """Whether a header is of this namespace, and encrypted exactly if there is a key."""
        return header.namespace == self._digest and header.is_encrypted is (self._cipher is not None)

    def body_for(self, header: Header, into: memoryview) -> PayloadBuffer:
        """Return memory to read a payload into that ``decode`` then brings to ``into``; if it is plain, ``into`` itself."""
        if self._cipher is not None:
            sealed = bytearray(header.num_bytes + TAG_BYTES)
            return PayloadBuffer(memoryview(sealed)[: header.num_bytes], sealed)
        return PayloadBuffer(into if header.packed is None else _of_thread(header.num_bytes))

    def decode(self, header: Header, key: OffloadKey, body: PayloadBuffer, into: memoryview) -> bool:
        """Verify the payload that was read into ``body``, and write it, decrypted, to ``into``.

        Returns ``False`` if it is not what the header says; then ``into`` may hold garbage.
        """
        stored, packed = body.view, header.packed
        if payload_checksum(stored) != header.checksum:
            return False
        if self._cipher is not None and body.sealed is not None:
            body.sealed[header.num_bytes :] = header.tag
            stored = into if packed is None else _of_thread(header.num_bytes)
            if not self._cipher.decrypt(header.nonce, body.sealed, self._digest + key, stored):
                return False
        # Only what was verified is unpacked.
        return packed is None or (unpack(stored, packed.width, into) and payload_checksum(into) == packed.checksum)


def _of_thread(num_bytes: int) -> memoryview:
    return bounce_buffer(num_bytes, "body")[:num_bytes]


def payload_checksum(data: memoryview) -> bytes:
    """Return the 128-bit XXH3 of a payload as it is stored."""
    digest = xxhash.xxh3_128()
    digest.update(data)  # unlike the one-line form, it lets other threads run
    return digest.digest()


def room_for_details(num_tokens: int, num_blocks: int) -> int:
    """Return the bytes to keep for the details of a chunk of that many tokens in that many engine blocks.

    There is room for the tokens, the hashes of all blocks, and a little more; a multiple of 256, so that a table of them is
    read and written in whole pages. A chunk whose details are longer is stored without.
    """
    most = _DETAILS.size + 4 * num_tokens + _HASH_ROOM * num_blocks + _EXTRAS_ROOM + _CHECK.size
    return min(MAX_DETAILS_BYTES, -(-most // _ROOM_STEP) * _ROOM_STEP)


def sound_details(namespace: bytes, key: OffloadKey, data: bytes | bytearray | memoryview) -> memoryview | None:
    """Return the record of details at the start of ``data``; ``None`` if there is none, or it is damaged or another chunk's.

    Needs no key, but does not decrypt: encrypted details may still have been tampered with.
    """
    if len(data) < _DETAILS.size:
        return None
    num_bytes = _DETAILS.unpack_from(data)[0]
    if not _DETAILS.size + _CHECK.size <= num_bytes <= len(data):
        return None
    record = memoryview(data)[:num_bytes]
    check = _CHECK.unpack(record[-_CHECK.size :])[0]
    return record if check == details_check(namespace, key, record[: -_CHECK.size]) else None


def details_are_sound(header: Header, data: bytes | bytearray | memoryview) -> bool:
    """Whether what follows a value's payload is nothing, or the sound details of its chunk and nothing else."""
    return not data or len(sound_details(header.namespace, header.key, data) or b"") == len(data)


def details_check(namespace: bytes, key: OffloadKey, record: bytes | memoryview) -> int:
    """Return the checksum of details. It binds them to their chunk, because an earlier chunk's may still lie in its place."""
    digest = xxhash.xxh3_64(namespace + key)
    digest.update(record)
    return digest.intdigest()


def pack_tokens(tokens: array[int]) -> bytes:
    """Return token ids, in an array of type ``TOKEN_TYPE``, as ``Details`` have them."""
    return _swapped(tokens).tobytes()


def unpack_tokens(data: bytes) -> array[int]:
    """Return the token ids of ``Details``, in an array of type ``TOKEN_TYPE``."""
    return _swapped(array(TOKEN_TYPE, data))


def _swapped(tokens: array[int]) -> array[int]:
    """Return token ids in the other of memory's and the format's order of bytes; mostly these are one."""
    if sys.byteorder == "little":
        return tokens
    swapped = tokens[:]
    swapped.byteswap()
    return swapped
