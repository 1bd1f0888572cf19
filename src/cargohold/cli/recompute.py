"""What ``cargohold cache verify --recompute`` does: it computes again what a place keeps, and compares.

The embedded engine serves prompts above a tier that finds nothing, so the engine computes all chunks and stores them. That tier
keeps none: it compares each one with the chunk that the place has under the same key::

    prompts --engine--> chunk --store--> equal, close or different, if the place has it

A key is a hash of all tokens up to the chunk's end. So a prompt that is not the right one is not found, and proves nothing.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.progress import BarColumn

from cargohold import LLM, ConfigError, OffloadConfig, SamplingParams
from cargohold.cache.manager import OffloadKey, split_key
from cargohold.cli.app import loaded, progress
from cargohold.connector.guests.events import Contents, contents_in
from cargohold.errors import TierError
from cargohold.protocol import KVCacheLayout
from cargohold.tiers import LoadOutcome, Opening, StoreOutcome, Tier, TierConfig, TierUsage
from cargohold.tiers.chunk_format import NO_NOTE, Note
from cargohold.tiers.disk.files import DirectoryLock
from cargohold.tiers.inventory import Holding
from cargohold.tiers.kinds import options_of
from cargohold.tiers.places import is_url
from cargohold.transfer.compare import CLOSE, distance_of

logger = logging.getLogger(__name__)


class ComparingTier(Tier):
    """Compares what it is to store with what another tier has.

    Attributes:
        layout: the engine's paged KV; to be set before the first store.
        outcomes: how each chunk compares that the other tier has. Padded blocks are not compared.

    Args:
        kept: the other tier.
    """

    name = "recomputed"
    layout: KVCacheLayout

    def __init__(self, kept: Tier) -> None:
        self.kept, self.chunk_bytes = kept, kept.chunk_bytes
        self.outcomes: dict[OffloadKey, str] = {}

    def probe(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return [False] * len(keys)

    def store(
        self, key: OffloadKey, payload: memoryview, parent: OffloadKey | None = None, note: Note = NO_NOTE
    ) -> StoreOutcome:
        """Compare a chunk."""
        group = split_key(key)[1]
        num_blocks, padding = divmod(len(payload), self.layout.group_bytes[group])
        kept = self.kept.staging()[: len(payload)]
        if not padding and self.kept.load(key, kept) is LoadOutcome.LOADED:
            self.outcomes[key] = "equal" if kept == payload else self._outcome(key, num_blocks, kept, payload)
        return StoreOutcome.STORED

    def _outcome(self, key: OffloadKey, num_blocks: int, kept: memoryview, computed: memoryview) -> str:
        of = self.layout.groups[split_key(key)[1]]
        old, new = (np.frombuffer(chunk, dtype=np.uint8) for chunk in (kept, computed))
        at, distance = distance_of(old, new, of.number_type, num_blocks * len(of.layer_names))
        if distance <= CLOSE.get(of.number_type, 0.0):
            return "close"
        layer = of.layer_names[at % len(of.layer_names)]
        logger.warning("chunk %s is not what was computed: %s is %.2g away", key.hex(), layer, distance)
        return "different"

    def load(self, key: OffloadKey, into: memoryview) -> LoadOutcome:
        return LoadOutcome.ABSENT

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Do nothing: that is no use of them."""

    remove = touch

    def usage(self) -> TierUsage:
        return self.kept.usage()

    def close(self) -> None:
        self.kept.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparing(TierConfig):
    """Opens a ``ComparingTier``.

    Attributes:
        of: the tier that is compared with.
        namespace_id: id of the namespace that it must have.
        opened: gets the tier.
    """

    kind = "recomputed"
    of: TierConfig
    namespace_id: str
    opened: list[ComparingTier] = field(default_factory=list)

    def open(self, opening: Opening) -> Tier:
        if opening.codec.namespace.id != self.namespace_id:
            why = (
                "the model, its weights, the number of workers or the encryption are others than those of this command"
            )
            raise TierError(self.kind, f"{self.namespace_id} cannot be computed again: {why}")
        self.opened.append(ComparingTier(self.of.open(opening)))
        return self.opened[-1]


def recompute(place: str, holding: Holding, model: str, prompts: str | None) -> dict[str, int]:
    """Compute a namespace's chunks again, behind a progress bar; return the number of chunks by outcome.

    Args:
        place, holding: the namespace; its chunks must be undamaged, and no engine use it.
        model: the model.
        prompts: a file with prompts, in addition to those whose tokens are kept with the chunks; see ``_given``.

    Raises:
        ConfigError: the file has something else than prompts.
        TierError: the model does not make this namespace.
    """
    facts = [holding.facts.get(fact, "").partition(" ")[0] for fact in ("layout", "hashing")]
    per_chunk, block_tokens = (int(number) if number.isdecimal() else 1 for number in facts)
    at, dtype = Path(place, holding.id), holding.facts.get("dtype", "").partition(",")[0]
    kept = options_of(place if is_url(place) else str(at.parent))
    comparing = _Comparing(of=kept, namespace_id=at.name)
    offload = OffloadConfig(host_bytes="512MiB", mode="eager", blocks_per_chunk=per_chunk, tiers=[comparing])
    with loaded(model, dtype=dtype, block_tokens=block_tokens, offload=offload) as llm:
        (tier,) = comparing.opened
        tier.layout = llm.plan.layout
        asked = [*_kept(tier.kept, block_tokens), *([] if prompts is None else _given(llm, Path(prompts)))]
        with progress(BarColumn()) as bar:
            for tokens in bar.track(asked, description=f"computing {holding.short_id} again"):
                llm.generate([tokens[: llm.plan.limits.max_model_len - 1]], SamplingParams(max_tokens=1))
                llm.settle()
    if holding.last_used_s is not None and not is_url(place):
        os.utime(
            at / DirectoryLock.FILE, (holding.last_used_s, holding.last_used_s)
        )  # an audit does not count as a use
    counts = Counter(tier.outcomes.values())
    unknown = (holding.num_chunks or 0) - counts.total()
    return {**{outcome: counts[outcome] for outcome in ("equal", "close", "different")}, "unknown": unknown}


def _kept(tier: Tier, block_tokens: int) -> Iterator[list[int]]:
    """Yield the prompts whose tokens a tier keeps from their start on, without those that are the start of another one."""
    found: dict[bytes | None, Contents] = {}
    listing = tier.list_chunks(b"", sys.maxsize, with_details=True)
    for key, details in zip(listing.keys, listing.details, strict=True):
        if (contents := contents_in(details, block_tokens)) is not None:
            found[split_key(key)[0]] = contents
    for at in found.keys() - {contents.parent_hash for contents in found.values()}:
        first, tokens = at, list[int]()
        while first in found:
            first, tokens = found[first].parent_hash, [*found[first].tokens, *tokens]
        if first is None:
            yield tokens


def _given(llm: LLM, file: Path) -> Iterator[list[int]]:
    """Yield prompts from JSON lines: a text, token ids, or an object as ``cargohold run --json`` prints it, with its answer.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        for said in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            prompt, answer = (said["prompt"], said["token_ids"]) if isinstance(said, dict) else (said, [])
            yield [*(llm.tokenize(prompt) if isinstance(prompt, str) else prompt), *answer]
    except (OSError, ValueError, LookupError, TypeError) as error:
        expected = f"it must be JSON lines: texts, token ids, or what run --json prints ({error})"
        raise ConfigError("--prompts", str(file), expected) from error
