"""Encryption of stored chunks: AES-256-GCM, with a key from a file or from the environment.

KV can be turned back into the prompt it was computed from, so anyone who can read a stored chunk can read what users wrote.
"""

from __future__ import annotations

import binascii
import hmac
import os
import shlex
import stat
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cargohold.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16

_OPTION = "encryption_key"
_EXPECTED = f"file:PATH or env:NAME, where {KEY_BYTES} bytes stand, as they are or in hexadecimal"


class EncryptionKey:
    """A master key. The keys that encrypt chunks are derived from it, one per namespace.

    Args:
        secret: 32 random bytes.
    """

    def __init__(self, secret: bytes) -> None:
        assert len(secret) == KEY_BYTES
        self._secret = secret

    def __repr__(self) -> str:
        return f"EncryptionKey(id={self.id})"

    @property
    def id(self) -> str:
        """Identifies the key without revealing it. Part of the namespace, so that chunks under another key are misses."""
        return self._derive(b"cargohold key id")[:8].hex()

    def cipher(self, namespace: bytes, purpose: bytes = b"chunks") -> Cipher:
        """Return the cipher for chunks of one namespace, given by its digest, or for something else that belongs to them.

        Raises:
            ConfigError: the package for encryption is not installed.
        """
        return Cipher(self._derive(b"cargohold %b %b" % (purpose, namespace)))

    def _derive(self, purpose: bytes) -> bytes:
        return hmac.new(self._secret, purpose, sha256).digest()


class Cipher:
    """AES-256-GCM under one key. Thread-safe.

    Nonces are random, 96 bits long, from the system: no process, restart or fork repeats them. After four billion chunks of a
    namespace (2**32, by all engines that share it) the chance that two were equal is 2**-33; another master key starts over.
    """

    def __init__(self, key: bytes) -> None:
        self._aes = _aes(key)

    def encrypt(self, plain: memoryview, about: bytes) -> tuple[bytes, memoryview, bytes]:
        """Encrypt ``plain``; return nonce, encrypted bytes and tag. ``about`` is authenticated, too, but not encrypted."""
        nonce = os.urandom(NONCE_BYTES)
        sealed = memoryview(self._aes.encrypt(nonce, plain, about))
        return nonce, sealed[:-TAG_BYTES], bytes(sealed[-TAG_BYTES:])

    def decrypt(self, nonce: bytes, sealed: bytearray, about: bytes, into: memoryview) -> bool:
        """Decrypt to ``into``; return whether everything is as ``encrypt`` got and returned it.

        Args:
            nonce: as returned by ``encrypt``.
            sealed: the encrypted bytes with the tag after them.
            about: as given to ``encrypt``.
            into: destination, as long as ``sealed`` without the tag; holds garbage if ``False`` is returned.
        """
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415  # an optional package, installed if we are here

        try:
            self._aes.decrypt_into(nonce, sealed, about, into)
        except InvalidTag:
            return False
        return True


def read_key(source: str) -> EncryptionKey:
    """Read the key that an option names.

    Args:
        source: ``file:PATH`` or ``env:NAME``.

    Raises:
        ConfigError: there is no key there, it has the wrong length, or users other than its owner may access the file.
    """
    scheme, _, name = source.partition(":")
    if scheme == "env" and name:
        if name not in os.environ:
            raise ConfigError(_OPTION, source, f"the environment variable {name} is not set")
        data = os.fsencode(os.environ[name])  # the raw bytes, which need not be text
    elif scheme == "file" and name:
        data = _read_private(source, Path(name))
    else:
        raise ConfigError(_OPTION, source, _EXPECTED)
    return EncryptionKey(_decode(source, data))


def require_package() -> None:
    """Raise ``ConfigError`` if the package for encryption is not installed."""
    _aes(bytes(KEY_BYTES))


def _read_private(source: str, path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(_OPTION, source, f"the file cannot be read: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(_OPTION, source, f"only its owner may have access: chmod 600 {shlex.quote(str(path))}")
    return data


def _decode(source: str, data: bytes) -> bytes:
    try:
        secret = binascii.unhexlify(data.strip())
    except binascii.Error:
        secret = b""
    # Bytes that are all hexadecimal digits are not random: such a text of 32 digits is a key of 16 bytes.
    if len(data) == KEY_BYTES and not secret:
        return data
    if len(secret) != KEY_BYTES:
        raise ConfigError(
            _OPTION,
            source,
            f"no key of {KEY_BYTES} bytes, or {2 * KEY_BYTES} digits, is there; `openssl rand -hex 32` makes one",
        )
    return secret


def _aes(key: bytes) -> AESGCM:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415  # an optional package
    except ImportError as error:
        raise ConfigError(_OPTION, "set", "encryption needs the extra: pip install 'cargohold[encryption]'") from error
    return AESGCM(key)
