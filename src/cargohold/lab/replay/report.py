"""Reports: a replay's figures, as plain values that are ready for JSON, and as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cargohold.lab.replay.costs import CostModel
from cargohold.lab.replay.replaying import BOUNDS, INFINITE, ReplayResult
from cargohold.lab.replay.workload import Workload
from cargohold.option_values import format_bytes, format_count

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """Results of replays, with the workload and the costs that they are based on.

    Attributes:
        names: the files of the trace.
        workload: what was replayed.
        costs: what a hit is worth.
        results: one per policy and size, in any order.
        remarks: what a reader should know, as sentences.
    """

    names: tuple[str, ...]
    workload: Workload
    costs: CostModel
    results: tuple[ReplayResult, ...]
    remarks: tuple[str, ...] = ()

    @property
    def chunk_bytes(self) -> int | None:
        return self.costs.chunk_bytes(self.workload.chunk_tokens)

    @property
    def has_time(self) -> bool:
        """Whether hits can be given in seconds of prefill."""
        return self.costs.prefill_tokens_per_s is not None and self.chunk_bytes is not None

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies and bounds that were replayed; bounds last."""
        found = dict.fromkeys(result.policy for result in self.results)
        return tuple(sorted(found, key=lambda policy: (policy in BOUNDS, policy == INFINITE, policy)))

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Slots of the tiers at each size, ascending."""
        return tuple(sorted({result.capacities for result in self.results if result.policy != INFINITE}))

    def find(self, policy: str, capacities: tuple[int, ...]) -> ReplayResult | None:
        """The result of a policy at a size; an infinite cache has one for all sizes."""
        for result in self.results:
            if result.policy == policy and (policy == INFINITE or result.capacities == capacities):
                return result
        return None

    def as_facts(self) -> Facts:
        """The whole report as values for JSON."""
        ordered = sorted(self.results, key=lambda result: (self.policies.index(result.policy), result.capacities))
        return {
            "trace": self._trace_facts(),
            "cost_model": {
                "bytes_per_token": self.costs.bytes_per_token,
                "chunk_bytes": self.chunk_bytes,
                "prefill_tokens_per_s": self.costs.prefill_tokens_per_s,
                "load_bytes_per_s": dict(self.costs.bytes_per_s),
            },
            "remarks": list(self.remarks),
            "results": [self._result_facts(result) for result in ordered],
        }

    def _trace_facts(self) -> Facts:
        workload = self.workload
        return {
            "files": list(self.names),
            "requests": workload.num_requests,
            "lookups": workload.num_lookups,
            "unique_chunks": workload.num_unique,
            "blocks_per_chunk": workload.blocks_per_chunk,
            "block_tokens": workload.block_tokens,
            "prompt_tokens": workload.num_prompt_tokens,
            "duration_s": workload.duration_s,
            "engine_reused_blocks": workload.num_reused_blocks,
            "device_chunks": workload.device_chunks,
            "device_hits": int(workload.on_device.sum()),
        }

    def _result_facts(self, result: ReplayResult) -> Facts:
        return {
            "policy": result.policy,
            "prefix_hit_ratio": result.prefix_hit_ratio,
            "block_hit_ratio": result.block_hit_ratio,
            "prefix_hits": result.num_prefix_hits,
            "block_hits": result.num_block_hits,
            "hit_tokens": result.num_hit_tokens,
            "saved_prefill_s": self.costs.saved_s(result, self.workload.chunk_tokens),
            "waiting_s": self.costs.waiting_s(result, self.workload),
            "capacity_chunks": list(result.capacities),
            "capacity_bytes": [self._bytes(capacity) for capacity in result.capacities],
            "capacity_of_unique": [capacity / self.workload.num_unique for capacity in result.capacities],
            "tiers": [
                {
                    "tier": tier.name,
                    "capacity_chunks": tier.capacity,
                    "loaded_chunks": tier.loaded,
                    "stored_chunks": tier.stored,
                    "evicted_chunks": tier.evicted,
                    "held_chunks": tier.held,
                    "loaded_bytes": self._bytes(tier.loaded),
                    "stored_bytes": self._bytes(tier.stored),
                }
                for tier in result.tiers
            ],
            "seconds": result.seconds,
        }

    def _bytes(self, num_chunks: int) -> int | None:
        return None if self.chunk_bytes is None else num_chunks * self.chunk_bytes

    def why_no_times(self) -> str | None:
        """Why "prefill saved" cannot be shown although the prefill rate is known; ``None`` if it can, or was not asked for."""
        if self.costs.prefill_tokens_per_s is None or self.chunk_bytes is not None:
            return None
        missing = []
        if self.costs.bytes_per_token is None:
            missing.append("how many bytes a token has: --model or --bytes-per-token")
        if self.workload.chunk_tokens is None:
            missing.append("how many tokens a block has, which the trace does not say: --block-tokens")
        return f"prefill saved is not shown: it is not known {', and '.join(missing)}"


def remarks_on(workload: Workload, num_misplaced: int, num_skipped: int) -> list[str]:
    """Sentences about what is odd in a trace, and about the reuse that the recording engine counted."""
    remarks = []
    if num_skipped:
        remarks.append(
            f"{format_count(num_skipped, 'broken line')} of the trace {'was' if num_skipped == 1 else 'were'} skipped"
        )
    if num_misplaced:
        remarks.append(
            f"{num_misplaced:,} of {len(workload.chunks):,} uses of a block come behind another block than its first use: "
            f"the ids do not stand for whole prefixes (or files with ids of their own were mixed), so prefix hits mean little"
        )
    given = workload.told_block_tokens
    if given is not None and given != (workload.block_tokens, workload.block_tokens):
        sizes = f"{given[0]}" if given[0] == given[1] else f"{given[0]} to {given[1]}"
        remarks.append(
            f"by its own lines the blocks of the trace have {sizes} tokens, and all are counted as {workload.block_tokens}: "
            f"tokens, bytes and times mean little"
        )
    if not workload.is_sorted:
        fate = (
            "they are replayed in it"
            if workload.is_timed
            else "some have none, so they are replayed in that of the trace"
        )
        remarks.append(f"requests were not in the order of their times; {fate}")
    reused = workload.num_reused_blocks
    if reused is not None:
        share = reused / workload.num_prompt_blocks
        remarks.append(f"the engine that recorded it reused {format_count(reused, 'block')} itself: {share:.2%}")
    return remarks


def describe_trace(report: Report) -> str:
    """One line about what was replayed."""
    workload = report.workload
    noun = "chunk" if workload.blocks_per_chunk > 1 else "block"
    tokens = "" if workload.chunk_tokens is None else f" of {format_count(workload.chunk_tokens, 'token')}"
    time = f", over {format_seconds(workload.duration_s)}" if workload.duration_s else ""
    return (
        f"{format_count(workload.num_requests, 'request')}{time}; {format_count(workload.num_lookups, 'look-up')} of "
        f"{format_count(workload.num_unique, f'different {noun}')}{tokens}"
    )


def describe_amount(report: Report, num_chunks: int) -> str:
    """A number of chunks, in bytes if the size of a chunk is known."""
    return f"{num_chunks:,}" if report.chunk_bytes is None else format_bytes(num_chunks * report.chunk_bytes)


def describe_size(report: Report, capacities: Sequence[int]) -> str:
    """The tiers' sizes: ``1,000 (5%)`` or ``64 GiB (5%) + 1.0 TiB (80%)``."""
    shares = (100 * capacity / report.workload.num_unique for capacity in capacities)
    return " + ".join(
        f"{describe_amount(report, capacity)} ({_trimmed(share) if share <= 100 else '>100'}%)"
        for capacity, share in zip(capacities, shares, strict=True)
    )


def all_numbers(report: Report) -> tuple[list[str], list[list[str]]]:
    """All results as a table: heads, and a row per policy and size. Amounts of several tiers are joined by " + "."""
    columns = ("loaded", "written", "evicted")
    heads = ["policy", "size", "prefix hits, %", "block hits, %", *columns]
    rows = []
    for policy in report.policies:
        for result in sorted((r for r in report.results if r.policy == policy), key=lambda r: r.capacities):
            size = "everything" if policy == INFINITE else describe_size(report, result.capacities)
            ratios = [f"{100 * ratio:.2f}" for ratio in (result.prefix_hit_ratio, result.block_hit_ratio)]
            moved = [(tier.loaded, tier.stored, tier.evicted) for tier in result.tiers]
            amounts = [
                " + ".join(describe_amount(report, number) for number in of_tiers)
                for of_tiers in zip(*moved, strict=True)
            ]
            rows.append([policy, size, *ratios, *(amounts or [""] * len(columns))])
            if report.has_time:
                rows[-1].append(format_seconds(report.costs.saved_s(result, report.workload.chunk_tokens)))
    return [*heads, *(["prefill saved"] if report.has_time else [])], rows


def format_seconds(seconds: float | None) -> str:
    """A time for people: ``3.2 h``, ``45.0 s``."""
    if seconds is None:
        return ""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if abs(seconds) >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def _trimmed(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0") if number >= 0.1 else f"{number:.1g}"
