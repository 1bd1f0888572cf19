"""Namespaces: everything that the bytes of a chunk depend on, besides its key.

A key says which tokens a chunk stands for. The bytes of their KV depend on much more. If any of that changes, chunks stored
before are not found any more, instead of being wrong.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final

import xxhash

FORMAT_VERSION: Final = 2
"""Version of the format of chunks (``chunk_format``) and of the names of files and objects."""

MAX_DESCRIPTION_BYTES: Final = 16 * 1024**2
"""Maximum size of a description that is read: more than any model's configuration. A larger one was not written by us."""

DESCRIPTION: Final = "namespace.json"
"""Name of a namespace's description in an object store or a shared directory."""

ID_PATTERN: Final = "[0-9a-f]{32}"
"""What ids of namespaces look like, as a regular expression."""

_ID_BYTES = 16


@dataclass(frozen=True)
class Namespace:
    """Everything that changes the bytes of one worker's chunks. Namespaces that differ only in ``label`` are the same.

    Attributes:
        label: the model's name for people; changes nothing.
        weights: digest of the weights' contents, as ``digest_weights`` gives it: a name may be given to other weights
            tomorrow.
        config: digest or text of the model's configuration.
        dtype: element type of the KV.
        layout: how a chunk's bytes are arranged: groups, tokens per block, blocks per chunk, bytes.
        split: how the model is divided among workers, and which part this worker has.
        adapter: identity of an adapter that is added to the weights, or empty. An adapter that block hashes cover (in the
            root of a request's chain) need not be named here.
        hashing: how block hashes are made, so that equal keys mean equal tokens.
        encryption: id of the key that chunks are encrypted with, or empty.
        details_bytes: most bytes that the details of a chunk may take; see ``chunk_format.room_for_details``.
    """

    label: str
    weights: str
    config: str
    dtype: str
    layout: str
    split: str
    adapter: str = ""
    hashing: str = "sha256"
    encryption: str = ""
    details_bytes: int = 0

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of everything but the label, and of the format version."""
        facts = self._facts()
        del facts["label"]
        return digest_facts(facts)

    @property
    def id(self) -> str:
        """The start of the digest, in hexadecimal: the name of directories, prefixes and keys."""
        return self.digest[:_ID_BYTES].hex()

    def describe(self) -> dict[str, str]:
        """Return all fields, the format version and the full digest, for people and tools."""
        return {**self._facts(), "digest": self.digest.hex()}

    def _facts(self) -> dict[str, str]:
        return {**as_facts(asdict(self)), "format": str(FORMAT_VERSION)}


def parse_description(data: bytes) -> dict[str, Any]:
    """Parse the JSON description of a namespace; return an empty dict if it is malformed."""
    try:
        found = json.loads(data.decode())
    except (ValueError, RecursionError):  # anybody may have written it, nested however deep
        return {}
    return found if isinstance(found, dict) else {}


def as_facts(described: object) -> dict[str, str]:
    """Return a JSON object's names and values as text; an empty dict if it is no object."""
    return {str(name): str(value) for name, value in described.items()} if isinstance(described, dict) else {}


def digest_facts(facts: Mapping[str, str]) -> bytes:
    """Return the SHA-256 of names and values, independent of their order. Each is framed, so that none runs into the next."""
    digest = hashlib.sha256()
    for name in sorted(facts):
        for text in (name, facts[name]):
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def digest_weights(tensors: Iterable[tuple[str, memoryview]]) -> str:
    """Return a digest of the names, sizes and bytes of weights, in any order. Runs at the speed of memory.

    The bytes are hashed with XXH3, 128 bits, which tells weights apart that differ by accident or training. Somebody who can
    craft weights that collide can just as well serve them.

    Args:
        tensors: name and bytes of each. Iterated once; each is needed only while it is hashed.
    """
    return digest_facts({name: f"{len(data)} {_fast_digest(data)}" for name, data in tensors}).hex()


def _fast_digest(data: memoryview) -> str:
    digest = xxhash.xxh3_128()
    digest.update(data)
    return digest.hexdigest()
