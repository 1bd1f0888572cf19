"""The engine as a connector sees it: its paged KV cache, and requests, steps and the block pool through read-only protocols.

The scheduler context: a structural view of the engine's block pool, handed once to the scheduler side of a connector.

An engine's own classes satisfy these protocols as they are, and a connector that uses them imports nothing from an engine.

Rules for engines that implement them and connectors that use them:

* A block without references is in the free queue and may be evicted and reused at any allocation. ``touch_ids`` takes it out.
* References add up: two touches need two frees. Freeing more than was touched raises and changes nothing.
* ``free_ids`` puts blocks whose count reaches zero at the tail of the free queue in the order given: the first given is
  evicted first. With ``evict_first`` it puts them at the head, in the same order, for KV whose eviction loses nothing.
* The null block is never evicted, touched or freed.

To protect a copy: ``touch_ids`` before it starts, ``free_ids`` when all workers report it done. The request's life and the
copy's life are then independent.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeAlias, runtime_checkable

from cargohold.protocol.turns import TurnEnd

BlockIds: TypeAlias = tuple[Sequence[int], ...]
"""One block table per KV-cache group: ``block_ids[group][i]`` holds tokens ``[i * block_tokens, (i + 1) * block_tokens)``.

Id 0 is the null block. A table handed over by the engine is the engine's own: read it during the call, copy what you keep.
"""

NULL_BLOCK_ID = 0
"""Id of the null block: the placeholder for a position whose KV is not kept."""


class AttentionKind(Enum):
    """Which earlier tokens the layers of a group read, which decides which of their blocks are worth keeping."""

    FULL = "full"
    """Every token sees all tokens before it; every block is kept."""
    SLIDING_WINDOW = "sliding_window"
    """A token sees itself and the ``window_tokens - 1`` before it."""
    CHUNKED_LOCAL = "chunked_local"
    """A token sees itself and those before it in the same aligned run of ``window_tokens``."""
    RECURRENT = "recurrent"
    """One state stands for the whole prefix: only the last block matters."""


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share one block table.

    Attributes:
        index: position of the group in the layout, and in every ``BlockIds``.
        kind: which earlier tokens its layers read.
        block_tokens: tokens per block.
        layer_names: the layers, in the order in which a block holds them.
        window_tokens: length of the sliding window, or of the aligned runs of chunked local attention; ``None`` for other
            kinds.
        hit_tokens: the engine goes on after a prefix only at a multiple of so many tokens. What no query after such a place
            reads of a window, or of a state, is worth nothing.
        block_bytes: bytes of a block that its layers use, on one worker; ``None`` for all of it. What a worker side is given as
            the group's regions holds these, and may hold more of the block.
        number_type: type of all numbers in its blocks, as ``bfloat16``; empty if the engine does not say, or there are several.
            Tiers that pack chunks need it.
    """

    index: int
    kind: AttentionKind
    block_tokens: int
    layer_names: tuple[str, ...]
    window_tokens: int | None = None
    hit_tokens: int = 1
    block_bytes: int | None = None
    number_type: str = ""

    def __post_init__(self) -> None:
        windowed = self.kind in (AttentionKind.SLIDING_WINDOW, AttentionKind.CHUNKED_LOCAL)
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, not {self.block_tokens}")
        if windowed != (self.window_tokens is not None):
            raise ValueError(f"{self.kind.value} attention and window_tokens={self.window_tokens} do not go together")
        if self.window_tokens is not None and self.window_tokens < 1:
            raise ValueError(f"window_tokens must be at least 1, not {self.window_tokens}")

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return how many leading tokens no query at position ``num_computed_tokens`` or later will read.

        Their KV need not be kept; blocks that lie wholly within these tokens are null in the block table.
        """
        match self.kind:
            case AttentionKind.FULL:
                return 0
            case AttentionKind.SLIDING_WINDOW:
                assert self.window_tokens is not None
                return max(0, num_computed_tokens - self.window_tokens + 1)
            case AttentionKind.CHUNKED_LOCAL:
                assert self.window_tokens is not None
                return num_computed_tokens // self.window_tokens * self.window_tokens
            case AttentionKind.RECURRENT:
                return max(0, num_computed_tokens - 1)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that computes the KV. Connectors that keep KV beyond the engine's life let only the same model find it.

    Attributes:
        name: as the user wrote it; other models may have the same name.
        path: directory with its weights and configuration, or hub id.
        dtype: type of weights and KV, and whatever else besides the files changes the KV's bytes.
        revision: branch, tag or commit on the hub; ``None`` for the default one.
        runs_code: whether the engine runs Python code that comes with the model.
        code_revision: branch, tag or commit of that code; ``None`` for ``revision`` if the code is in the model's own files.
        config_path: directory or hub id whose configuration is used instead of the one next to the weights.
        download_dir: directory to which the engine downloads the weights of a hub id, in the form of the hub's cache; ``None``
            for the default cache. Configuration and code are in the default cache in any case.
        parts: further directories, files and hub ids of which the engine reads weights and configuration.
        code_parts: directories and files with further code that the engine runs.
        obstacle: start of a sentence that says what determines the KV's bytes and cannot be named; empty if there is nothing.
            Unless it is empty, the KV cannot outlive the engine.
        read_after_s: a time, in seconds since 1970, before which the engine had read none of the model's files; ``None`` if it
            cannot say. A file that changed later may not be the one that was read.
    """

    name: str
    path: str
    dtype: str
    revision: str | None = None
    runs_code: bool = False
    code_revision: str | None = None
    config_path: str | None = None
    download_dir: str | None = None
    parts: tuple[str, ...] = ()
    code_parts: tuple[str, ...] = ()
    obstacle: str = ""
    read_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """The paged KV cache of one engine replica, as scheduler and workers agree on it.

    Attributes:
        groups: the KV-cache groups; ``groups[i].index == i``.
        num_blocks: blocks in the device pool, the null block included.
        block_bytes: bytes of one block on one worker. Every group's blocks have this size, so that all groups share one pool;
            a group's layers may use less of it.
        hash_block_tokens: tokens per entry of a request's ``block_hashes``; divides every group's ``block_tokens``.
        world_size: number of workers; each holds a shard of every block.
        has_tails: whether the engine's own cache finds prefixes that end inside a block, at the end of a block hash: in a model
            of full attention and recurrent state whose groups' blocks have one size. Its steps then have ``tails``.
        num_replicas: number of neighbouring workers that hold the same shard, byte for byte, on one machine: then a tier keeps
            it once for all of them. Workers ``0`` to ``num_replicas - 1`` hold the first shard, and so on.
        model: the model that computes the KV; ``None`` if the engine cannot say, and then the KV cannot outlive the engine.
    """

    groups: tuple[KVCacheGroup, ...]
    num_blocks: int
    block_bytes: int
    hash_block_tokens: int
    world_size: int = 1
    model: ServedModel | None = None
    num_replicas: int = 1
    has_tails: bool = False

    def __post_init__(self) -> None:
        if [group.index for group in self.groups] != list(range(len(self.groups))) or not self.groups:
            raise ValueError("groups must be numbered 0, 1, ... in order, and there must be one at least")
        for group in self.groups:
            if group.block_tokens % self.hash_block_tokens:
                raise ValueError(
                    f"hash_block_tokens={self.hash_block_tokens} does not divide block_tokens={group.block_tokens} "
                    f"of group {group.index}"
                )
        # One of the blocks is the null block.
        for name, least in (("num_blocks", 2), ("block_bytes", 1), ("world_size", 1)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name}={value} is too few: a layout needs at least {least}")
        if any(not 0 < size <= self.block_bytes for size in self.group_bytes):
            raise ValueError(f"groups use {self.group_bytes} bytes of blocks of {self.block_bytes}")
        if self.num_replicas < 1 or self.world_size % self.num_replicas:
            raise ValueError(f"num_replicas={self.num_replicas} does not divide world_size={self.world_size}")

    @property
    def num_shards(self) -> int:
        """Number of different shards that all workers together hold of a block: what a tier keeps of it."""
        return self.world_size // self.num_replicas

    @property
    def token_bytes(self) -> float:
        """Bytes that the KV of one token takes on the devices of all workers, in the blocks of all groups."""
        return self.block_bytes * self.world_size * sum(1 / group.block_tokens for group in self.groups)

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """Bytes of a block that each group's layers use, on one worker."""
        return tuple(self.block_bytes if group.block_bytes is None else group.block_bytes for group in self.groups)


ExtraKey: TypeAlias = str | bytes | tuple[str, int]
"""One thing besides tokens that a block hash covers.

An adapter's name, a salt, a digest, or the identifier of a multimedia item and the position where it begins.
"""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Weights that are added to the model's own for some requests, such as LoRA.

    Attributes:
        name: the name that clients use.
        number: the engine's number for the adapter, for followers of KV events that do not know names.
    """

    name: str
    number: int


@runtime_checkable
class RequestView(Protocol):
    """One request, as the scheduler knows it at the time of the call."""

    @property
    def request_id(self) -> str:
        """Unique among the requests alive."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens that the user sent."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose ids are known: the prompt and the tokens generated so far."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The ``num_tokens`` ids, prompt first."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One digest per full run of ``hash_block_tokens`` tokens.

        Each covers its tokens *and all before them*, and whatever else changes the KV: salt, adapter, media. It grows as
        tokens are generated; an entry never changes.
        """

    @property
    def adapter(self) -> Adapter | None:
        """The adapter with which the KV is computed; ``None`` for the model's own weights alone."""

    @property
    def salt(self) -> str | None:
        """What the client keeps its KV apart with: only requests with the same salt share it. ``None`` if there is none."""

    def extra_keys(self, start: int, end: int) -> tuple[ExtraKey, ...]:
        """Return what the hash of ``[start, end)`` covers besides the tokens, so that followers of events can compute it.

        In vLLM's order: the adapter's name; for each multimedia item that reaches into the range, its identifier and its
        first position, counted from ``start``; the salt, if ``start`` is 0; the digest of embeddings that stand in for tokens.
        """

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """The client's parameters to the connectors for this request, unvalidated."""

    @property
    def tenant(self) -> str | None:
        """Whose request it is, for quotas and hints: the name that a server gives, or else the salt, or ``None``."""

    @property
    def turn_end(self) -> TurnEnd:
        """How it ended, from ``request_finished`` on; ``UNKNOWN`` before, and where the engine cannot tell."""


@runtime_checkable
class ScheduledRequest(Protocol):
    """One request's share of a step."""

    @property
    def request_id(self) -> str:
        """Id of the request."""

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose KV is in the device pool before this step."""

    @property
    def num_scheduled_tokens(self) -> int:
        """Number of tokens that this step computes.

        Under asynchronous scheduling, ``num_computed_tokens`` plus this may exceed the number of token ids that are known.
        """

    @property
    def block_ids(self) -> BlockIds:
        """The request's block tables, this step's new blocks included."""


@runtime_checkable
class StepView(Protocol):
    """The scheduler's plan for one step."""

    @property
    def scheduled(self) -> Sequence[ScheduledRequest]:
        """The requests that compute tokens in this step; empty in a step that only carries transfers."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        """Number of tokens that each of them computes, by request id, in the same order.

        While many requests generate, most of them need nothing of a connector: these numbers tell so at less cost.
        """

    @property
    def preempted_req_ids(self) -> AbstractSet[str]:
        """Requests that lost their blocks in this step and will start over."""

    @property
    def finished_req_ids(self) -> AbstractSet[str]:
        """Requests that ended since the last step."""


@dataclass(frozen=True, slots=True)
class Tail:
    """What a prompt has left where a prefix ends inside a block, in blocks that nothing writes before this place any more.

    The steps of an engine whose layout ``has_tails`` have ``tails``: those that are there when their forward pass is over.

    Attributes:
        request_id: id of the request.
        num_tokens: number of leading tokens that it is behind.
        block_ids: the block that holds it, per group.
    """

    request_id: str
    num_tokens: int
    block_ids: Sequence[int]


# --- the scheduler context --------------------------------------------------------------------------------------------


@runtime_checkable
class BlockPoolView(Protocol):
    """The operations on a pool of blocks that a connector may use.

    A step looks at hundreds of blocks, so all take and return ids, indices in the KV tensors.
    """

    def touch_ids(self, block_ids: Sequence[int]) -> None:
        """Take one reference on each block.

        Raises ``IndexError`` or ``NullBlockError``, and changes nothing, if one of them cannot be touched.
        """

    def free_ids(self, block_ids: Sequence[int], *, evict_first: bool = False) -> None:
        """Give back one reference on each block; blocks without references left go to the tail of the free queue.

        Args:
            block_ids: in the order in which they should be evicted.
            evict_first: put them at the head instead, because their KV is kept elsewhere.

        Raises ``BlockNotHeldError`` or ``NullBlockError``, and changes nothing, if one of them cannot be given back.
        """

    def next_victims(self, num_blocks: int) -> list[int]:
        """Return the free blocks that are evicted next, the first one first; fewer if fewer are free."""

    def contents(self, block_ids: Sequence[int]) -> Sequence[Hashable]:
        """Return what each block holds now, opaque: equal for two blocks, or two moments, if the prefix is the same."""

    def prefixes_of(self, contents: Sequence[Hashable]) -> Sequence[tuple[bytes, int] | None]:
        """Return the digest of the prefix that a block with each content holds, and the index of its KV-cache group.

        ``None`` if such a block is not in the prefix cache.
        """


@runtime_checkable
class SchedulerContext(BlockPoolView, Protocol):
    """The pool, and the requests that use it."""

    def get_request_blocks(self, request_id: str) -> BlockIds:
        """Return the request's block table per group, null blocks included; empty tables if it holds no blocks."""

    def waiting_requests(self) -> Iterable[RequestView]:
        """Return the requests that are not running yet, in the order in which the scheduler will try to admit them."""
