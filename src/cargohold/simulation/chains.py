"""Fingerprints: numbers that stand for the prefix that KV was computed from, and so tell what belongs into a block."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from cargohold.engine.core.step import ScheduledTokens

FINGERPRINT_BYTES = 8
WRONG_TOKEN = 2**31
_MASK = 2**64 - 1
_SPREAD = 0xD1342543DE82EF95
GARBAGE_BYTE = 0xA5
GARBAGE = bytes([GARBAGE_BYTE]) * FINGERPRINT_BYTES


class WrongTokenError(AssertionError):
    """A forward pass would have read KV of another prefix than its block table stands for."""


class PrefixChains:
    """Fingerprints of all prefixes of the requests alive.

    Args:
        tokens_of: the tokens of a request, by id.
        root_of: the number that a request's chain starts from, by id. Requests of different roots must not share KV.
    """

    def __init__(self, tokens_of: Callable[[str], Sequence[int]], root_of: Callable[[str], int] = lambda _: 1) -> None:
        self._tokens_of = tokens_of
        self._root_of = root_of
        self._chains: dict[str, list[int]] = {}
        self._coded: dict[tuple[str, int], bytearray] = {}
        self._weights = 0

    def use_weights(self, version: int) -> None:
        """From now on, give prefixes other fingerprints in ``coded``. Generated tokens stay the same, to be compared."""
        self._weights = version * _SPREAD & _MASK
        self._coded.clear()

    def chain(self, request_id: str, num_tokens: int) -> list[int]:
        """Fingerprints of the request's prefixes, one per token that a prefix ends with; at least ``num_tokens`` of them."""
        chain = self._chains.get(request_id)
        if chain is None:
            chain = self._chains[request_id] = []
        if len(chain) < num_tokens:
            previous = chain[-1] if chain else self._root_of(request_id)
            for token in self._tokens_of(request_id)[len(chain) : num_tokens]:
                previous = next_fingerprint(previous, token)
                chain.append(previous)
        return chain

    def coded(self, request_id: str, num_tokens: int, salt: int) -> bytearray:
        """The chain as bytes, ``FINGERPRINT_BYTES`` per token; different for each ``salt`` and each version of weights."""
        coded = self._coded.get((request_id, salt))
        if coded is None:
            coded = self._coded[request_id, salt] = bytearray()
        if len(coded) < num_tokens * FINGERPRINT_BYTES:
            num_coded = len(coded) // FINGERPRINT_BYTES
            chain, salt = self.chain(request_id, num_tokens), salt ^ self._weights
            coded += array("Q", [link ^ salt for link in chain[num_coded:num_tokens]]).tobytes()
        return coded

    def forget(self, request_id: str) -> None:
        """Drop the chain of a request that is gone."""
        self._chains.pop(request_id, None)
        for key in [key for key in self._coded if key[0] == request_id]:
            del self._coded[key]


def next_fingerprint(previous: int, token: int) -> int:
    """The fingerprint of a prefix from that of the prefix one token shorter."""
    # hash() of a tuple of integers mixes well and is the same in every process.
    return hash((previous, token)) & _MASK


def tokens_alone(prompt: Sequence[int], max_tokens: int, vocab_size: int, root: int = 1) -> list[int]:
    """The tokens that the model generates for a prompt, whatever other requests it is batched with."""
    last = root
    for token in prompt:
        last = next_fingerprint(last, token)
    tokens = []
    for _ in range(max_tokens):
        tokens.append(last % vocab_size)
        last = next_fingerprint(last, tokens[-1])
    return tokens


def end_of(share: ScheduledTokens) -> int:
    """Number of computed tokens that a request has after its share of a step."""
    return share.num_computed_tokens + len(share.token_ids)
