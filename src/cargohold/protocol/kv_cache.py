"""Facts about the engine's paged KV cache that both sides know: its groups, its blocks, its layout, the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

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
    """

    index: int
    kind: AttentionKind
    block_tokens: int
    layer_names: tuple[str, ...]
    window_tokens: int | None = None

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
        config_path: directory or hub id whose configuration is used instead of the one beside the weights.
        download_dir: directory to which the engine downloads the weights of a hub id, in the form of the hub's cache; ``None``
            for the default cache. Configuration and code are in the default cache in any case.
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
    obstacle: str = ""
    read_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """The paged KV cache of one engine replica, as scheduler and workers agree on it.

    Attributes:
        groups: the KV-cache groups; ``groups[i].index == i``.
        num_blocks: blocks in the device pool, the null block included.
        block_bytes: bytes of one block on one worker. Every group's blocks have this size, so that all groups share one pool.
        hash_block_tokens: tokens per entry of a request's ``block_hashes``; divides every group's ``block_tokens``.
        world_size: number of workers; each holds a shard of every block.
        model: the model that computes the KV; ``None`` if the engine cannot say, and then the KV cannot outlive the engine.
    """

    groups: tuple[KVCacheGroup, ...]
    num_blocks: int
    block_bytes: int
    hash_block_tokens: int
    world_size: int = 1
    model: ServedModel | None = None

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

    @property
    def token_bytes(self) -> float:
        """Bytes that the KV of one token takes on all workers, in the blocks of all groups."""
        return self.block_bytes * self.world_size * sum(1 / group.block_tokens for group in self.groups)
