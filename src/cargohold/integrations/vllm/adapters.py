"""What vLLM's block hashes cover by name alone: weights of LoRA adapters, and pictures that clients have named.

A client may give a picture a name (``uuid``), which then stands for it in vLLM's hashes. It is true for as long as this process
runs, so keys of such blocks are this process's own, and chunks of them stay in host memory.

vLLM's block hashes cover an adapter's name and path. Other weights may come under both, in place or after a restart, and then
its prefix cache finds KV of the weights before. So keys are vLLM's hashes, changed by a fingerprint of the weights that the
workers *hold*: what is in the files by now may be something else. ::

    a request comes ── weights known? ── no ──> it waits while the workers load the adapter and look: one step
                             │ yes <───────────────────────────────┘
    a load begins ────── every worker looks whether it holds these weights; if not, the load has failed
    a step is over ───── every worker tells if it holds others: what this step stores is void, and the adapter is served
                         without offloading until vLLM's prefix cache, which may have KV of both, is reset
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakSet, WeakValueDictionary, ref

import torch

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
_CHANGED: Final = (
    "the weights of its adapter have changed, and vLLM's prefix cache may have KV of both: reset it, or load changed weights "
    "from another path"
)
_BLIND: Final = "which weights its adapter has cannot be told"
_TOO_MANY: Final = f"more than {MAX_ADAPTERS} adapters were used since vLLM's prefix cache was reset"


@dataclass(frozen=True, slots=True)
class AdapterLooks:
    """The adapters that workers are to look at, as vLLM describes them.

    Attributes:
        adapters: those of which to tell the weights.
        loads: by request whose load begins, its adapter, and by rank the fingerprint of the weights that it must have.
    """

    adapters: tuple[Any, ...] = ()
    loads: Mapping[str, tuple[Any, Mapping[int, str]]] = field(default_factory=dict)


NO_LOOKS: Final = AdapterLooks()


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


@dataclass(slots=True, weakref_slot=True, eq=False)
class AdapterWeights:
    """What is known of the weights that have one name and path.

    Attributes:
        mask: what changes vLLM's hashes; empty while it is not known.
        why_not: why nothing is offloaded that is computed with them, as a part of a sentence; empty if there is no reason.
        fingerprints: of what each worker holds, by rank.
        confirmed: the workers that hold these under a number of vLLM's. It gives an adapter that is loaded again another one.
    """

    mask: bytes = b""
    why_not: str = ""
    fingerprints: dict[int, str] = field(default_factory=dict)
    confirmed: dict[int, set[int]] = field(default_factory=dict)

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
        is_sure: whether they are known. From then on, workers tell of every step with others.
        local_from: as given.
    """

    __slots__ = ("_blocks", "_keys", "is_sure", "local_from", "weights")

    def __init__(self, own: Any, weights: AdapterWeights, local_from: int, blocks: AdapterBlocks) -> None:
        super().__init__(own)
        self.weights = weights
        self.is_sure = weights is _OWN_WEIGHTS
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

    def key_of(self, block_hash: bytes) -> bytes | None:
        """Return the hash by which a block is stored; ``None`` if it must not be."""
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
        self._weights: dict[tuple[str, str], AdapterWeights] = {}
        # By vLLM's number, weights that workers were asked for under it. Requests may outlive a reset.
        self._by_number: defaultdict[int, WeakSet[AdapterWeights]] = defaultdict(WeakSet)
        self._wanted: OrderedDict[int, RekeyedRequest] = OrderedDict()
        # Adapters whose loads begin, by request, with the weights that they had when these chunks were stored.
        self._loads: dict[str, tuple[Any, Mapping[int, str]]] = {}
        self._given_up: set[str] = set()
        self.blocks = AdapterBlocks(4 * len(pool.blocks))

    def seen(self, request: Any) -> SeenRequest:
        """Return the view of a new request."""
        adapter = getattr(request, "lora_request", None)
        local_from = named_from(request, self._pool)
        if adapter is None:
            is_plain = local_from == sys.maxsize
            return SeenRequest(request) if is_plain else RekeyedRequest(request, _OWN_WEIGHTS, local_from, self.blocks)
        seen = RekeyedRequest(request, self._of(adapter), local_from, self.blocks)
        seen.is_sure = self._is_known(seen)
        return seen

    def why_not(self, seen: SeenRequest) -> str:
        """Why nothing is offloaded of a request, as a part of a sentence; empty if there is no reason."""
        return seen.weights.why_not if isinstance(seen, RekeyedRequest) else ""

    def is_named(self, seen: SeenRequest) -> bool:
        """Whether a request has pictures or sounds that its client has named."""
        return isinstance(seen, RekeyedRequest) and seen.local_from < sys.maxsize

    def is_unsure(self, seen: SeenRequest) -> bool:
        """Whether a request must wait, because it is not known yet which weights its adapter has. Asks the workers then."""
        if not isinstance(seen, RekeyedRequest) or seen.is_sure or seen.weights.why_not:
            return False
        seen.is_sure = self._is_known(seen)
        if not seen.is_sure:
            self._wanted[seen.own.lora_request.lora_int_id] = seen
        return not seen.is_sure

    def note_load(self, seen: SeenRequest) -> None:
        """Note that a load begins for a request: the workers must still hold its adapter's weights."""
        if isinstance(seen, RekeyedRequest) and seen.weights is not _OWN_WEIGHTS:
            self._loads[seen.request_id] = seen.own.lora_request, dict(seen.weights.fingerprints)

    def take_looks(self) -> AdapterLooks:
        """Return what workers are to look at in this step."""
        if not self._wanted and not self._loads:
            return NO_LOOKS
        adapters: list[Any] = []
        while self._wanted and len(adapters) < self._max_looks:
            number, seen = self._wanted.popitem(last=False)
            self._by_number[number].add(seen.weights)
            adapters.append(seen.own.lora_request)
        loads, self._loads = self._loads, {}
        return AdapterLooks(tuple(adapters), loads)

    def give_up(self, requests: Iterable[SeenRequest]) -> None:
        """Offload nothing more of those of the requests whose adapter has other weights than was thought."""
        self._given_up = {seen.request_id for seen in requests if self.why_not(seen)}

    def was_given_up(self, request_id: str) -> bool:
        """Whether nothing more is offloaded of a request, which has ended now."""
        was_given_up = request_id in self._given_up
        self._given_up.discard(request_id)
        return was_given_up

    def without_given_up(self, requests: Mapping[str, SeenRequest]) -> Mapping[str, SeenRequest]:
        """Return the requests of which something may be offloaded."""
        given_up = self._given_up
        return {one: seen for one, seen in requests.items() if one not in given_up} if given_up else requests

    def note(self, rank: int, held: Mapping[int, str]) -> bool:
        """Learn which weights a worker holds, by vLLM's number; returns whether others were thought to be there."""
        has_changed = False
        for number, fingerprint in held.items():
            for weights in list(self._by_number.get(number, ())):
                if weights.why_not:
                    continue
                known = weights.fingerprints.setdefault(rank, fingerprint)
                if not fingerprint or known != fingerprint:
                    weights.why_not = _CHANGED if fingerprint else _BLIND
                    logger.warning(
                        "requests with adapter %d are served without offloading: %s", number, weights.why_not
                    )
                    has_changed = True
                else:
                    weights.confirmed.setdefault(number, set()).add(rank)
                    if not weights.mask and len(weights.fingerprints) == self._num_workers:
                        told = "".join(one for _, one in sorted(weights.fingerprints.items()))
                        weights.mask = hashlib.sha256(told.encode()).digest()[:_MASK_BYTES]
        return has_changed

    def _is_known(self, seen: RekeyedRequest) -> bool:
        confirmed = seen.weights.confirmed.get(seen.own.lora_request.lora_int_id, ())
        return not seen.weights.why_not and len(confirmed) == self._num_workers

    def _of(self, adapter: Any) -> AdapterWeights:
        index = self._pool.cached_block_hash_to_block
        if index is not self._index:
            self._index = index
            self._forget()
        named = adapter.lora_name, adapter.lora_path
        if named not in self._weights and len(self._weights) >= MAX_ADAPTERS:
            return AdapterWeights(why_not=_TOO_MANY)
        return self._weights.setdefault(named, AdapterWeights())

    def _forget(self) -> None:
        """Forget all but what requests still have, now that vLLM's prefix cache has nothing else."""
        self.blocks.clear()
        still_used: WeakValueDictionary[tuple[str, str], AdapterWeights] = WeakValueDictionary(self._weights)
        self._weights.clear()
        self._weights.update(still_used)
        for number in [number for number, asked in self._by_number.items() if not asked]:
            del self._by_number[number]


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
        self._news: dict[int, str] = {}

    def find_worker(self) -> None:
        """Find vLLM's worker. To be called before vLLM starts to serve: it then hides all objects there are from searches."""
        self._worker = worker_of(self._vllm_config)

    def look(self, looks: AdapterLooks, rank: int) -> set[str]:
        """Note the weights of adapters, to be told; return the requests that must not be loaded, because theirs are others.

        Adapters that are not loaded are, as vLLM does when it first computes with them.
        """
        for adapter in looks.adapters:
            self._news[adapter.lora_int_id] = self._fingerprint_of(adapter)
        return {request_id for request_id, load in looks.loads.items() if not self._has(*load, rank)}

    def check(self) -> None:
        """Tell of adapters that have been loaded again since, with other weights. To be called when a step is computed."""
        if not self._known:
            return
        for number, model in self._held().items():
            known, fingerprint = self._known.get(number, (None, ""))
            if known is not None and known() is not model and self._taken(number, model) != fingerprint:
                self._news[number] = self._known[number][1]

    def take(self) -> Mapping[int, str]:
        """Return what is to be told: a fingerprint by vLLM's number, empty if it cannot be taken."""
        news, self._news = self._news, {}
        return news

    def _has(self, adapter: Any, expected: Mapping[int, str], rank: int) -> bool:
        fingerprint = self._fingerprint_of(adapter)
        if fingerprint != expected[rank]:
            self._news[adapter.lora_int_id] = fingerprint
        return fingerprint == expected[rank]

    def _fingerprint_of(self, adapter: Any) -> str:
        number = adapter.lora_int_id
        try:
            if number not in self._held():
                self._worker.add_lora(adapter)
            return self._taken(number, self._held()[number])
        except Exception as error:  # noqa: BLE001  # whatever is wrong with it, vLLM says so when it computes with it
            logger.info("which weights adapter %s has cannot be told: %s", adapter.lora_name, error)
            return ""

    def _taken(self, number: int, model: Any) -> str:
        known, fingerprint = self._known.get(number, (None, ""))
        if known is None or known() is not model:
            try:
                fingerprint = fingerprint_of(model)
            except UnreadableWeightsError as error:
                logger.info("which weights adapter %d has cannot be told: %s", number, error)
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
