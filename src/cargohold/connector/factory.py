"""Makes the factory of the connector that options ask for."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

from cargohold.cache.rows import RowPlan, plan_rows
from cargohold.connector.config import EAGER, EXCLUSIVE, LAZY, OffloadConfig
from cargohold.connector.multi import MultiConnectorFactory
from cargohold.connector.offloading.factory import OffloadingFactory, check_tiers, require_memory
from cargohold.deadlines import ANSWER, CONNECTOR, DEFAULTS, TRANSFER
from cargohold.errors import ConfigError, option_path
from cargohold.option_values import format_bytes, format_count
from cargohold.process import available_memory_bytes
from cargohold.protocol import NULL_CONNECTOR, AttentionKind, KVCacheLayout, KVConnectorFactory
from cargohold.tiers import TierConfig, tier_names
from cargohold.tiers.namespace import ID_PATTERN
from cargohold.tiers.opening import at_medium

logger = logging.getLogger(__name__)

Offload = OffloadConfig | KVConnectorFactory


def check_places(offload: Offload | Sequence[Offload] | None, layout: KVCacheLayout) -> None:
    """Check that the tiers in ``offload`` can be opened on this machine. Third parties' connectors are not checked.

    Raises:
        ConfigError: a directory, its budget or a URL cannot be used, the encryption key or a package is missing.
    """
    for path, config in own_configs(offload):
        with option_path(path):
            check_tiers(config, layout)


def own_configs(offload: Offload | Sequence[Offload] | None, path: str = "") -> Iterator[tuple[str, OffloadConfig]]:
    """Yield the options of each connector of ours in ``offload``, with the path to them.

    Third parties' connectors have none.
    """
    match offload:
        case OffloadConfig():
            yield path, offload
        case Sequence():
            for at, child in enumerate(offload):
                yield from own_configs(child, f"{path}connectors[{at}].")


def row_plan(offload: Offload | Sequence[Offload] | None, layout: KVCacheLayout) -> RowPlan:
    """Return how blocks lie in host memory, for reports; as the layout says, if connectors of ours do not agree."""
    plans = {config.plan_rows(layout) for _, config in own_configs(offload)}
    return plans.pop() if len(plans) == 1 else plan_rows(layout)


def lower_tiers(offload: Offload | Sequence[Offload] | None) -> list[str]:
    """Return the names of all tiers below host memory in ``offload``, as counters have them."""
    return list(dict.fromkeys(name for _, config in own_configs(offload) for name in tier_names(config.tiers)))


def check_memory(offload: Offload | Sequence[Offload] | None, *, warns: bool = True) -> None:
    """Check that this machine has the host memory that ``offload`` asks for.

    Args:
        offload: the connectors' options.
        warns: whether to log a warning if it is in use at the moment.

    Raises:
        ConfigError: this machine does not allow so much in all.
    """
    wanted, free = host_bytes_of(offload), available_memory_bytes()
    written = offload.host_bytes if isinstance(offload, OffloadConfig) else format_bytes(wanted)
    require_memory(written, wanted)
    if warns and wanted > free:
        # It is taken bit by bit as KV is stored, so nothing would fail before the machine is full.
        logger.warning(
            "host_bytes=%s: only %s of this machine's memory are free now; if more is used, the system may kill processes",
            written,
            format_bytes(free),
        )


def host_bytes_of(offload: Offload | Sequence[Offload] | None) -> int:
    """Return the host memory that ``offload`` asks for in all. Third parties' connectors are not counted."""
    return sum(config.num_host_bytes for _, config in own_configs(offload))


def load_timeout_s(offload: Offload | Sequence[Offload] | None) -> float:
    """Return after how many seconds without the end of a load an engine turns the connector off."""
    chosen = (config.transfer_timeout_s for _, config in own_configs(offload))
    return CONNECTOR.seconds(max(chosen, default=DEFAULTS[TRANSFER]))


def check_apart(offload: Offload | Sequence[Offload] | None) -> None:
    """Check that no two disk tiers in ``offload`` would use the same files, and no shared tier a disk tier's room.

    The second disk tier could not open the files, late in the start. A shared tier's chunks in a disk tier's directory would
    use up its budget, and it can neither read nor evict them.

    Raises:
        ConfigError: two of them would.
    """
    own: dict[tuple[Path, int, str | None], str] = {}
    common = []
    for path, tier, blocks_per_chunk in tiers_of(offload):
        with option_path(path):
            used = tier.used_directory
            if used is None:
                continue
            where = Path(at_medium(tier, partial(os.path.realpath, used.path), ANSWER.seconds()))
        if not used.is_own:
            common.append(where)
            continue
        files = where, blocks_per_chunk, tier.encryption_key
        if files in own:
            expected = "2 tiers of this engine would use it; give each its own directory"
            raise ConfigError(f"{path}{used.option}", str(where), expected)
        own[files] = f"{path}{used.option}"
    for ((directory, _, _), option), shared in product(own.items(), common):
        if _is_in_the_way(shared, directory):
            reason = f"the shared tier of this engine in {shared} conflicts with it; give each its own directory"
            raise ConfigError(option, str(directory), reason)


def check_chunks(offload: Offload | Sequence[Offload] | None, layout: KVCacheLayout, max_model_len: int) -> None:
    """Check that requests can be as long as the chunks that ``offload`` asks for.

    Args:
        offload: the connectors' options; those of third parties are not looked at.
        layout: the paged KV.
        max_model_len: tokens of the longest sequence.

    Raises:
        ConfigError: no request can ever fill a chunk, so nothing would be kept.
    """
    limits = [layout.num_blocks - 1 for group in layout.groups if group.kind is AttentionKind.FULL]
    # The KV of the last token is not computed: there is none behind it that would look at it.
    num_tokens = max_model_len - 1
    groups = [group for group in layout.groups if group.kind is not AttentionKind.RECURRENT]
    limits += [num_tokens // group.block_tokens for group in groups]
    for path, config in own_configs(offload):
        most = max(1, min(limits, default=config.blocks_per_chunk))
        if config.blocks_per_chunk > most:
            expected = f"no request has that many full blocks, so nothing would be stored; use at most {most}"
            raise ConfigError(f"{path}blocks_per_chunk", config.blocks_per_chunk, expected)


def never_found(
    offload: Offload | Sequence[Offload] | None, layout: KVCacheLayout, max_model_len: int
) -> Iterator[str]:
    """Yield, as sentences, why nothing that a connector of ours keeps can ever be found.

    Args:
        offload: the connectors' options.
        layout: the paged KV.
        max_model_len: tokens of the longest sequence. The KV of its last token is not computed.
    """
    for path, config in own_configs(offload):
        group = max(layout.groups, key=lambda group: group.block_tokens)
        chunk_tokens = group.block_tokens * config.blocks_per_chunk
        if chunk_tokens >= max_model_len:
            whose = f"{path.removesuffix('.')}: " if path else ""
            blocks = format_count(config.blocks_per_chunk, "block")
            yield (
                f"{whose}nothing of any prompt is ever restored: a chunk of {blocks} of group {group.index} has {chunk_tokens} "
                f"tokens, and max_model_len is {max_model_len}; raise it above {chunk_tokens}, or make blocks smaller"
            )


def connector_factory(offload: Offload | Sequence[Offload] | None) -> KVConnectorFactory:
    """Return the factory of the connector for ``offload``: one configuration, several in order of preference, or ``None``.

    Raises:
        ConfigError: two tiers would use the same files.
    """
    check_apart(offload)
    match offload:
        case None:
            return NULL_CONNECTOR
        case OffloadConfig():
            return OffloadingFactory(offload)
        case Sequence():
            return MultiConnectorFactory(tuple(connector_factory(child) for child in offload))
        case _:
            return offload


def tiers_of(offload: Offload | Sequence[Offload] | None) -> Iterator[tuple[str, TierConfig, int]]:
    """Yield the lower tiers in ``offload``, each with the path of its options and its number of blocks per chunk."""
    for path, config in own_configs(offload):
        for at, tier in enumerate(config.tiers):
            yield f"{path}tiers[{at}].", tier, config.blocks_per_chunk


def _is_in_the_way(shared: Path, disk: Path) -> bool:
    """Whether a shared directory would use up a disk tier's budget, which counts all that is below the disk tier's directory.

    A disk tier's directory may be below a shared one, which ignores it, unless it is in a namespace of the shared one.
    """
    if shared.is_relative_to(disk):
        return True
    return disk.is_relative_to(shared) and re.fullmatch(ID_PATTERN, disk.relative_to(shared).parts[0]) is not None


# --- the report in the log at start -----------------------------------------------------------------------------------

_KINDS: Final = {
    AttentionKind.FULL: "full attention",
    AttentionKind.SLIDING_WINDOW: "sliding window",
    AttentionKind.CHUNKED_LOCAL: "chunked local attention in parts",
    AttentionKind.RECURRENT: "recurrent state",
}


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the paged KV that all workers hold together.

    Attributes:
        largest_block_bytes: bytes of one block on the worker where it takes the most.
        all_block_bytes: bytes of one block on all workers together.
        num_layers: layers per KV-cache group, on all workers together.
    """

    largest_block_bytes: int
    all_block_bytes: int
    num_layers: tuple[int, ...]

    def are_unequal(self, world_size: int) -> bool:
        """Whether one worker has more than another."""
        return self.largest_block_bytes * world_size != self.all_block_bytes


def equal_parts(layout: KVCacheLayout) -> Parts:
    """The parts where all workers hold shards of the same layers."""
    num_layers = tuple(len(group.layer_names) for group in layout.groups)
    return Parts(layout.block_bytes, layout.block_bytes * layout.world_size, num_layers)


def start_report(layout: KVCacheLayout, offload: Offload | Sequence[Offload] | None, parts: Parts) -> list[str]:
    """Lines for the log.

    Args:
        layout: the paged KV; of the largest worker where they differ.
        offload: the connectors' options; ``None`` if there is no connector.
        parts: what all workers hold together.
    """
    pool_bytes = (layout.num_blocks - 1) * parts.all_block_bytes
    workers = f" on each of {layout.world_size} workers" if layout.world_size > 1 else ""
    at_most = "at most " if parts.are_unequal(layout.world_size) else ""
    num_blocks = format_count(layout.num_blocks - 1, "block")
    blocks = f"{num_blocks} of {at_most}{format_bytes(layout.block_bytes)}{workers}"
    lines = [f"device pool: {blocks}, {format_bytes(pool_bytes)} in all"]
    for group, num_layers, size in zip(layout.groups, parts.num_layers, layout.group_bytes, strict=True):
        all_bytes = parts.all_block_bytes * size / layout.block_bytes
        window = f" of {format_count(group.window_tokens, 'token')}" if group.window_tokens else ""
        tokens = format_count(group.block_tokens, "token")
        lines.append(
            f"group {group.index}: {format_count(num_layers, 'layer')}, {_KINDS[group.kind]}{window}, "
            f"{tokens} per block, {format_bytes(all_bytes / group.block_tokens)} per token"
        )
    connectors = list(_connector_lines(layout, offload, parts))
    return lines + (connectors or ["no connector: KV that leaves the device pool is computed again"])


LITTLE: Final = 0.1
"""Part of the device pool that host memory must add, or hardly more is found."""
_HOW: Final = {
    EXCLUSIVE: "{} that the device pool has no room for",
    EAGER: "{}",
    LAZY: "{} that the device pool is about to evict",
}


def _connector_lines(layout: KVCacheLayout, offload: Offload | Sequence[Offload] | None, parts: Parts) -> Iterator[str]:
    match offload:
        case None:
            return
        case Sequence():
            for child in offload:
                yield from _connector_lines(layout, child, parts)
        case OffloadConfig():
            kept = "prompts and answers" if offload.store_generated else "prompts"
            # Chunks of several blocks are stored as they are computed.
            mode = EAGER if offload.mode == EXCLUSIVE and offload.blocks_per_chunk > 1 else offload.mode
            yield f"{mode}: {_tier(layout, offload, parts)}; {_HOW[mode].format(kept)}, evicted by {offload.policy}"
            if mode == EXCLUSIVE:
                yield _together(layout, offload)
            yield from (f"below it: {tier.describe()}" for tier in offload.tiers)
        case _:
            yield f"{type(offload).__name__}: a connector of its own"


def _together(layout: KVCacheLayout, config: OffloadConfig) -> str:
    """How much more host memory holds than the device pool alone."""
    more = OffloadingFactory(config).num_slots(layout) / (layout.num_blocks - 1)
    advice = "; that is hardly more than the pool alone: raise host_bytes" if more < LITTLE else ""
    return f"both together hold {1 + more:.3g} times as much as the device pool{advice}"


def _tier(layout: KVCacheLayout, config: OffloadConfig, parts: Parts) -> str:
    num_slots = OffloadingFactory(config).num_slots(layout)
    shared = ", an equal share for every worker," if parts.are_unequal(layout.world_size) else ""
    blocks = format_count(config.blocks_per_chunk, "block")
    once = f", kept once for {layout.num_replicas} workers that hold the same" if layout.num_replicas > 1 else ""
    each = format_bytes(parts.all_block_bytes // layout.num_replicas * config.blocks_per_chunk)
    least, most = ("", "") if config.plan_rows(layout).is_even else ("at least ", "at most ")
    return (
        f"{format_bytes(config.num_host_bytes)} of host memory{shared} for {least}{format_count(num_slots, 'chunk')} of "
        f"{blocks}, {most}{each} each{once}"
    )
