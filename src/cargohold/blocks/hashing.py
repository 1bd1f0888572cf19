"""Block hashes: a chain of digests, so that equal hashes mean equal tokens *and* equal everything before them.

Each hash covers its parent, its tokens, and whatever else changes the KV of that block (pictures, for instance). The chain
starts at a root hash that covers what changes the KV of the whole prompt: salt and adapter. SHA-256 is used because a collision
would give one user's KV to another; a fast hash without collision resistance must not be used here.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = hashlib.sha256().digest_size
_ROOT_TAG = b"cargohold.prefix.v1"


def root_hash(*, salt: str | None = None, adapter: str | None = None) -> bytes:
    """Return the root hash, with which the chain of a prompt's hashes starts.

    Args:
        salt: separates prompts that must not share KV, such as those of different tenants.
        adapter: identity of the adapter that is added to the weights (a LoRA adapter's digest, say).

    ``None`` and the empty string are different.
    """
    digest = hashlib.sha256(_ROOT_TAG)
    for part in (salt, adapter):
        digest.update(b"\0" if part is None else _framed(part.encode()))
    return digest.digest()


def hash_block(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """Return the hash of one block: a digest of its parent's hash, its tokens, and ``extra``.

    Args:
        parent: hash of the block before, or the root hash.
        token_ids: the block's tokens, each in ``[0, 2**32)``.
        extra: anything else that changes this block's KV.

    Raises:
        OverflowError: a token id does not fit.
    """
    digest = hashlib.sha256(parent)
    digest.update(array("I", token_ids).tobytes())
    if extra:
        digest.update(_framed(extra))
    return digest.digest()


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], block_tokens: int, root: bytes) -> None:
    """Append to ``hashes`` the hash of every full block of ``token_ids`` that is not in it yet.

    Mutates ``hashes`` only. ``token_ids`` are all tokens from the start of the prompt.
    """
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_tokens, len(token_ids) - block_tokens + 1, block_tokens):
        parent = hash_block(parent, token_ids[start : start + block_tokens])
        hashes.append(parent)


def _framed(data: bytes) -> bytes:
    # A length in front keeps ("ab", "c") and ("a", "bc") apart.
    return b"\1" + len(data).to_bytes(8, "little") + data
