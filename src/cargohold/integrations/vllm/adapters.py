"""What vLLM's block hashes cover by name alone: weights of LoRA adapters, and pictures that clients have named.

A client may give a picture a name (``uuid``), which then stands for it in vLLM's hashes. It is true for as long as this process
runs, so keys of such blocks are this process's own, and chunks of them stay in host memory.

vLLM's hashes also cover an adapter's name and path, under which other weights may come, in place or after a restart. So keys
are vLLM's hashes, changed by a fingerprint of the weights that the workers *hold*: what is in the files by now may be something
else. vLLM gives an adapter that is unloaded and loaded again another number, under which workers look again. A program that
changes weights in place has vLLM reset its prefix cache: until then, KV of the old ones is found here as it is there. ::

    a request comes ── weights known? ── no ──> it waits while the workers load the adapter and look: one step
                             │ yes <───────────────────────────────┘
    a step is over ────── every worker reports if it holds others: what this step stores is void, and the adapter is served
                          without offloading until the reset
    a reset ───────────── no adapter's weights are known; nothing more is offloaded of requests that outlive it
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, TypeAlias
from weakref import ref

import torch

from cargohold.integrations.vllm.records import RequestRecord
from cargohold.integrations.vllm.request_view import SeenRequest
from cargohold.integrations.vllm.weights import UnreadableWeightsError, contents_of, worker_of
from cargohold.protocol import Prefix

logger = logging.getLogger(__name__)

MAX_ADAPTERS: Final = 16_384
"""Adapters that are remembered between two resets of vLLM's prefix cache: each must be, for as long as its KV may be there."""

_MASK_BYTES: Final = 16
_LOCAL: Final = os.urandom(8)
_OF_CONTENTS: Final = re.compile(r"([0-9a-f]{64}){1,2}")
"""What vLLM's hashes of contents look like. With options of processors, it hashes a client's name with them."""
_RESET: Final = "vLLM's prefix cache was reset since it came, and its adapter's weights may have changed"
_CHANGED: Final = (
    "the weights of its adapter have changed, and vLLM's prefix cache may have KV of both: reset it, or load changed weights "
    "from another path"
)
_BLIND: Final = "which weights its adapter has is unknown"
_TOO_MANY: Final = f"more than {MAX_ADAPTERS} adapters were used since vLLM's prefix cache was reset"

Look: TypeAlias = tuple[int, int, str, str]
"""What workers are to look at: an adapter by vLLM's number, its name and its path, after the number of resets before."""

LOCAL_HASHES: Final = _LOCAL[:4]
"""How those hashes begin that only this process knows, whatever their size."""


def as_local(block_hash: bytes) -> bytes:
    """Return a hash as only this process knows it."""
    begin = _LOCAL[: len(block_hash) // 4]
    return begin + block_hash[len(begin) :]


def named_from(request: Any, pool: Any) -> int:
    """Return the number of the first hash of a request's that covers a picture or sound by a name that its client chose."""
    features = getattr(request, "mm_features", None) or ()
    named = [one for one in features if not _OF_CONTENTS.fullmatch(one.mm_hash or one.identifier)]
    return min((int(one.mm_position.offset) // pool.hash_block_size for one in named), default=sys.maxsize)


# --- scheduler side ---------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class AdapterWeights:
    """What is known of the weights that have one name and path, since the last reset.

    Attributes:
        mask: what changes vLLM's hashes; empty while it is not known.
        why_not: why nothing is offloaded that is computed with them, as a part of a sentence; empty if there is no reason.
        answers: fingerprints of what workers hold under a number of vLLM's, by rank.
        numbers: those under which all workers hold these weights.
    """

    mask: bytes = b""
    why_not: str = ""
    answers: dict[int, dict[int, str]] = field(default_factory=dict)
    numbers: set[int] = field(default_factory=set)

    def settle(self, number: int) -> bool:
        """All workers have said what they hold under a number. Returns whether it is known, and the same as under others."""
        fingerprints = [fingerprint for _, fingerprint in sorted(self.answers[number].items())]
        mask = hashlib.sha256("".join(fingerprints).encode()).digest()[:_MASK_BYTES]
        if all(fingerprints) and self.mask in (b"", mask):
            self.mask = mask
            self.numbers.add(number)
        else:
            self.why_not = _CHANGED if all(fingerprints) else _BLIND
        return not self.why_not

    def key_of(self, block_hash: bytes) -> bytes:
        """Return vLLM's hash changed by the weights, in its first half: KV events show the end of it."""
        size = min(_MASK_BYTES, len(block_hash) // 2)
        changed = int.from_bytes(block_hash[:size]) ^ int.from_bytes(self.mask[:size])
        return changed.to_bytes(size) + block_hash[size:]


_OWN_WEIGHTS: Final = AdapterWeights()
"""Of requests without an adapter."""


class RekeyedRequest(SeenRequest):
    """A view of a request with an adapter, or with pictures that its client has named.

    It has no block hashes until it is known which weights the adapter has.

    Args:
        own: vLLM's request object.
        weights: those of its adapter.
        local_from: number of the first hash that only this process knows.
        blocks: takes the weights with which vLLM's blocks are computed, by vLLM's hash.

    Attributes:
        weights: those of its adapter.
        is_sure: whether they are known, also under the request's number of its adapter.
        local_from: as given.
    """

    __slots__ = ("_blocks", "_keys", "is_sure", "local_from", "weights")

    def __init__(self, own: Any, weights: AdapterWeights, local_from: int, blocks: AdapterBlocks) -> None:
        super().__init__(own)
        self.weights = weights
        self.is_sure = weights is _OWN_WEIGHTS or own.lora_request.lora_int_id in weights.numbers
        self.local_from = local_from
        self._blocks = blocks
        self._keys: list[bytes] = []

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Digests that vLLM made, changed by the weights, and into ones that only this process knows."""
        if self.is_sure:
            for at, block_hash in enumerate(self.own.block_hashes[len(self._keys) :], len(self._keys)):
                key, is_local = self.weights.key_of(block_hash), at >= self.local_from
                self._keys.append(as_local(key) if is_local else key)
                self._blocks.note(block_hash, self.weights, is_local)
        return self._keys

    def prefix(self, token_ids: list[int]) -> Prefix:
        """Another prefix, with the request's salt and adapter."""
        found = super().prefix(token_ids)
        hashes = [self.weights.key_of(one) for one in found.block_hashes] if self.is_sure else []
        return Prefix(hashes, token_ids, len(token_ids), self.salt, self.tenant)


class AdapterBlocks:
    """With which weights blocks of vLLM's prefix cache were computed.

    Args:
        limit: maximum number of blocks; of others, those noted first are forgotten, and what they hold is not stored.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._weights: OrderedDict[bytes, tuple[AdapterWeights, bool]] = OrderedDict()

    def note(self, block_hash: bytes, weights: AdapterWeights, is_local: bool) -> None:
        """Note the weights of a block, by vLLM's hash, and whether only this process knows it."""
        self._weights[block_hash] = weights, is_local
        if len(self._weights) > self._limit:
            self._weights.popitem(last=False)

    def clear(self) -> None:
        """Forget all of them."""
        self._weights.clear()

    def keys_of(self, block_hashes: list[bytes]) -> Sequence[bytes | None]:
        """Return the hashes by which blocks are stored; ``None`` for those that must not be."""
        return [self._key_of(one) for one in block_hashes] if self._weights else block_hashes

    def _key_of(self, block_hash: bytes) -> bytes | None:
        weights, is_local = self._weights.get(block_hash, (None, False))
        if weights is None:
            return block_hash
        if weights.why_not:
            return None
        return as_local(weights.key_of(block_hash)) if is_local else weights.key_of(block_hash)


class Adapters:
    """What is known of adapters' weights on the scheduler side.

    Args:
        pool: vLLM's block pool. A reset of its prefix cache is noticed by the new index of blocks that it gives the pool.
        num_workers: number of workers that tell what they hold.
        max_looks: number of adapters that workers are to look at in one step; no more than they can use in one.
    """

    def __init__(self, pool: Any, num_workers: int, max_looks: int) -> None:
        self._pool = pool
        self._num_workers = num_workers
        self._max_looks = max_looks
        self._index = pool.cached_block_hash_to_block
        self._num_resets = 0
        self._weights: dict[tuple[str, str], AdapterWeights] = {}
        self._wanted: dict[Look, Any] = {}
        self._leaves_out = False  # there may be requests of which nothing is offloaded any more
        self.blocks = AdapterBlocks(4 * len(pool.blocks))

    def seen(self, request: Any) -> SeenRequest:
        """Return the view of a new request."""
        self._notice_reset()
        adapter = getattr(request, "lora_request", None)
        local_from = named_from(request, self._pool)
        if adapter is None and local_from == sys.maxsize:
            return SeenRequest(request)
        weights = _OWN_WEIGHTS if adapter is None else self._of(adapter)
        return RekeyedRequest(request, weights, local_from, self.blocks)

    def why_not(self, seen: SeenRequest) -> str:
        """Why nothing is offloaded of a request, as a part of a sentence; empty if there is no reason."""
        if not isinstance(seen, RekeyedRequest):
            return ""
        self._notice_reset()  # since then, a request that waits may have been given other weights
        return seen.weights.why_not

    def is_named(self, seen: SeenRequest) -> bool:
        """Whether a request has pictures or sounds that its client has named."""
        return isinstance(seen, RekeyedRequest) and seen.local_from < sys.maxsize

    def is_unsure(self, seen: SeenRequest) -> bool:
        """Whether a request must wait, because it is not known yet which weights its adapter has. Asks the workers then."""
        if not isinstance(seen, RekeyedRequest) or seen.is_sure or seen.weights.why_not:
            return False
        adapter = seen.own.lora_request
        seen.is_sure = adapter.lora_int_id in seen.weights.numbers
        if not seen.is_sure:
            self._wanted[self._num_resets, adapter.lora_int_id, adapter.lora_name, adapter.lora_path] = adapter
        return not seen.is_sure

    def take_looks(self) -> Mapping[Look, Any]:
        """Return the adapters that workers are to look at in this step, as vLLM describes them."""
        looks = dict(islice(self._wanted.items(), self._max_looks))
        self._wanted.clear()  # requests that still wait ask again
        return looks

    def offloaded(self, requests: Mapping[str, RequestRecord]) -> Mapping[str, RequestRecord]:
        """Return the requests of which something may be offloaded. Called once a step."""
        self._notice_reset()
        if not self._leaves_out:
            return requests
        left = {request_id: record for request_id, record in requests.items() if not self.why_not(record.seen)}
        self._leaves_out = len(left) < len(requests)
        return left

    def note(self, rank: int, held: Mapping[Look, str]) -> bool:
        """Note which weights a worker holds: a fingerprint, empty if it cannot be taken. Returns whether they are others."""
        has_changed = False
        for (num_resets, number, name, path), fingerprint in held.items():
            weights = self._weights.get((name, path))
            if weights is None or weights.why_not or num_resets != self._num_resets:
                continue
            answers = weights.answers.setdefault(number, {})
            answers[rank] = fingerprint
            if len(answers) == self._num_workers and not weights.settle(number):
                self._leaves_out = has_changed = True
                logger.warning("requests with adapter %s are served without offloading: %s", name, weights.why_not)
        return has_changed

    def _notice_reset(self) -> None:
        """If vLLM's prefix cache was reset, forget what is known of adapters."""
        index = self._pool.cached_block_hash_to_block
        if index is not self._index:
            self._index = index
            self._num_resets += 1
            for weights in self._weights.values():
                weights.why_not = weights.why_not or _RESET
            self._leaves_out = True
            self._weights.clear()
            self._wanted.clear()
            self.blocks.clear()

    def _of(self, adapter: Any) -> AdapterWeights:
        named = adapter.lora_name, adapter.lora_path
        if named not in self._weights and len(self._weights) >= MAX_ADAPTERS:
            return AdapterWeights(why_not=_TOO_MANY)
        return self._weights.setdefault(named, AdapterWeights())


# --- worker side ------------------------------------------------------------------------------------------------------


class HeldAdapters:
    """The adapters that vLLM's worker in this process holds.

    Args:
        vllm_config: the configuration of vLLM's worker.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._vllm_config = vllm_config
        self._worker: Any = None
        # By vLLM's number, the adapter whose fingerprint was taken last, and the fingerprint.
        self._known: dict[int, tuple[ref[Any], str]] = {}
        self._looks: dict[int, Look] = {}
        self._news: dict[Look, str] = {}

    def find_worker(self) -> None:
        """Find vLLM's worker. To be called before vLLM starts to serve: it then hides all objects there are from searches."""
        self._worker = worker_of(self._vllm_config)

    def look(self, looks: Mapping[Look, Any]) -> None:
        """Note the weights of adapters, to be reported. Those that are not loaded are, as when vLLM computes with them."""
        self._news |= {look: self._fingerprint_of(adapter) for look, adapter in looks.items()}
        self._looks |= {adapter.lora_int_id: look for look, adapter in looks.items()}

    def check(self) -> None:
        """Note adapters that were loaded again since, with other weights. To be called when a step is computed."""
        for number, model in self._held().items() if self._known else ():
            known, fingerprint = self._known.get(number, (None, ""))
            if known is not None and known() is not model and (now := self._taken(number, model)) != fingerprint:
                self._news[self._looks[number]] = now

    def take(self) -> Mapping[Look, str]:
        """Return what is to be reported: a fingerprint of each adapter, empty if it cannot be taken."""
        news, self._news = self._news, {}
        return news

    def _fingerprint_of(self, adapter: Any) -> str:
        number = adapter.lora_int_id
        try:
            if number not in self._held():
                self._worker.add_lora(adapter)
            return self._taken(number, self._held()[number])
        except Exception as error:  # noqa: BLE001  # whatever is wrong with it, vLLM says so when it computes with it
            logger.info("which weights adapter %s has is unknown: %s", adapter.lora_name, error)
            return ""

    def _taken(self, number: int, model: Any) -> str:
        known, fingerprint = self._known.get(number, (None, ""))
        if known is None or known() is not model:
            try:
                fingerprint = fingerprint_of(model)
            except UnreadableWeightsError as error:
                logger.info("which weights adapter %d has is unknown: %s", number, error)
                fingerprint = ""
            self._known[number] = ref(model), fingerprint
        return fingerprint

    def _held(self) -> Mapping[int, Any]:
        """The adapters in the worker's memory, by number. vLLM never changes one: it loads another in its place."""
        manager = self._worker.model_runner.lora_manager
        held: Mapping[int, Any] = manager._adapter_manager.list_adapters()  # noqa: SLF001  # nothing else has the weights
        return held


def fingerprint_of(model: Any) -> str:
    """Return a fingerprint of an adapter as vLLM has loaded it, whatever its number: 64 hexadecimal digits.

    Raises:
        UnreadableWeightsError: it consists of something else than tensors and plain values.
    """
    digest = hashlib.sha256()
    for part in _parts("", {name: value for name, value in vars(model).items() if name != "id"}):
        digest.update(part)
    return digest.hexdigest()


def _parts(name: str, value: Any) -> Iterator[bytes]:
    """Yield all that a value consists of."""
    match value:
        case torch.Tensor():
            contents = contents_of(value.detach())
            yield repr((name, str(value.dtype), tuple(value.shape), value.stride())).encode()
            yield contents if isinstance(contents, bytes) else contents.cpu().numpy().tobytes()
        case dict():
            for key in sorted(value):
                yield from _parts(f"{name}.{key}", value[key])
        case list() | tuple():
            yield repr((name, len(value))).encode()
            for at, one in enumerate(value):
                yield from _parts(f"{name}.{at}", one)
        case None | bool() | int() | float() | str():
            yield repr((name, value)).encode()
        case _ if hasattr(value, "__dict__"):
            yield repr((name, type(value).__name__)).encode()
            yield from _parts(name, vars(value))
        case _:
            raise UnreadableWeightsError(f"{name} is a {type(value).__name__}")
