"""What the bytes of a chunk depend on, besides its key.

A key says which tokens a chunk stands for. What their KV looks like depends on much more: change any of that, and everything
stored before is invisible rather than wrong.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final

import xxhash

FORMAT_VERSION: Final = 1
"""Of headers and of the names of files and objects."""

MAX_DESCRIPTION_BYTES: Final = 16 * 1024**2
"""More than any model's configuration; what is larger was not written by us."""

_ID_BYTES = 16


@dataclass(frozen=True)
class Namespace:
    """Everything that changes the bytes of one worker's chunks. Two namespaces with equal fields but ``label`` are the same.

    Attributes:
        label: what people call the model; changes nothing.
        weights: digest of the weights themselves, such as ``digest_weights`` gives: a name may be given to others tomorrow.
        config: digest or text of the model's configuration.
        dtype: element type of the KV.
        layout: how a chunk's bytes are arranged: groups, tokens per block, blocks per chunk, bytes.
        split: how the model is divided among workers, and which part this one has.
        adapter: identity of what is added to the weights, or empty. An adapter that is part of the block hashes (as the root
            of a request's chain) need not be named here.
        hashing: how block hashes are made, so that equal keys mean equal tokens.
        encryption: identity of the key that chunks are encrypted with, or empty.
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

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of everything but the label, and of the format version."""
        facts = {"format": str(FORMAT_VERSION), **asdict(self)}
        del facts["label"]
        return digest_facts(facts)

    @property
    def id(self) -> str:
        """The start of the digest, in hexadecimal: the name of directories, prefixes and keys."""
        return self.digest[:_ID_BYTES].hex()

    def describe(self) -> dict[str, str]:
        """For people and tools: all fields, and the full digest."""
        return {**asdict(self), "format": str(FORMAT_VERSION), "digest": self.digest.hex()}


def parse_description(data: bytes) -> dict[str, Any]:
    """What was written about a namespace, and with it, as JSON; nothing if that cannot be read."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):  # anybody may have written it, however deep
        return {}
    return found if isinstance(found, dict) else {}


def as_facts(described: object) -> dict[str, str]:
    """Names and values as text; nothing if it is no object of them."""
    return {str(name): str(value) for name, value in described.items()} if isinstance(described, dict) else {}


def digest_facts(facts: Mapping[str, str]) -> bytes:
    """SHA-256 of names and values, independent of their order; nothing in one can look like the start of the next."""
    digest = hashlib.sha256()
    for name in sorted(facts):
        for text in (name, facts[name]):
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def digest_weights(tensors: Iterable[tuple[str, memoryview]]) -> str:
    """A digest of weights, in any order: of their names, sizes and bytes, at the speed of memory.

    The bytes are hashed with XXH3, 128 bits: it tells weights apart that differ by accident or training. Somebody who could
    craft weights to collide could as well serve them.

    Args:
        tensors: name and bytes of each. Iterated once; each is needed only while it is hashed.
    """
    return digest_facts({name: f"{len(data)} {_fast_digest(data)}" for name, data in tensors}).hex()


def _fast_digest(data: memoryview) -> str:
    digest = xxhash.xxh3_128()
    digest.update(data)
    return digest.hexdigest()
