"""Writes the file of a trace."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from cargohold.errors import ConfigError, one_line

logger = logging.getLogger(__name__)

_ID_BITS: Final = 53
"""Number of bits of an id: every JSON reader represents such integers exactly."""
_KEY_BYTES: Final = 16


class TraceFile:
    """A file with one JSON line per request, readable only by its owner. A failure ends the trace, but not the engine.

    Block hashes are digests of tokens, so whoever guesses a prompt could verify the guess with them. So the file has digests of
    the hashes under a random key that is not kept: within the file equal blocks have equal ids, and outside it the ids mean
    nothing.

    Args:
        path: path of the file, which must not exist.

    Raises:
        ConfigError: the file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._encoder = msgspec.json.Encoder()
        try:
            self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError("record", str(path), error.strerror or one_line(error)) from error

    def ids(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Return the ids of blocks in this file."""
        key, shift = self._key, 64 - _ID_BITS
        # Python's own keyed hash (SipHash): a tenth of the time of a cryptographic one, in the scheduler's thread.
        return [(hash(key + block_hash) & 0xFFFF_FFFF_FFFF_FFFF) >> shift for block_hash in block_hashes]

    def write(self, line: dict[str, Any]) -> None:
        """Add a line, whole or not at all as far as the system allows. The first failure is logged and ends the trace."""
        if self._descriptor is None:
            return
        try:
            self._write_all(self._descriptor, self._encoder.encode(line) + b"\n")
        except OSError as error:
            logger.warning("recording to %s has ended: %s", self._path, one_line(error))
            self.close()

    @staticmethod
    def _write_all(descriptor: int, data: bytes) -> None:
        num_written = os.write(descriptor, data)
        if num_written < len(data):
            raise OSError(f"only {num_written} of {len(data)} bytes were written")

    def close(self) -> None:
        """Close the file; ``write`` does nothing from now on."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
