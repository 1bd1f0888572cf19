"""Figures of a report as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from cargohold.replay.report import Report
from cargohold.units import format_bytes, format_count


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


def describe_costs(report: Report) -> str:
    """One line about what the times and bytes in the report are based on."""
    costs = report.costs
    if costs.bytes_per_token is None:
        return "Amounts are numbers of blocks: how many bytes a token takes was not given."
    weight = f"A token's KV takes {costs.bytes_per_token:,} bytes"
    if costs.prefill_tokens_per_s is None or report.chunk_bytes is None:
        return f"{weight}."
    tiers = ", ".join(f"{tier} at {bandwidth / 1e9:g} GB/s" for tier, bandwidth in costs.bytes_per_s.items())
    return (
        f"{weight}. Prefill saved: hit tokens at {costs.prefill_tokens_per_s:,.0f} tokens per second, less the time to load "
        f"them ({tiers}; nothing overlaps)."
    )


def describe_amount(report: Report, num_chunks: int) -> str:
    """A number of chunks, in bytes if the size of a chunk is known."""
    return f"{num_chunks:,}" if report.chunk_bytes is None else format_bytes(num_chunks * report.chunk_bytes)


def format_amount(report: Report, num_chunks: float) -> str:
    """A number of chunks like ``describe_amount``, but short, for axes."""
    if report.chunk_bytes is not None:
        return format_bytes(num_chunks * report.chunk_bytes)
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if num_chunks >= size:
            return f"{num_chunks / size:.3g}{unit}"
    return f"{num_chunks:.3g}"


def describe_size(report: Report, capacities: Sequence[int]) -> str:
    """The tiers' sizes: ``1,000 (5%)`` or ``64 GiB (5%) + 1.0 TiB (80%)``."""
    shares = (100 * capacity / report.workload.num_unique for capacity in capacities)
    return " + ".join(
        f"{describe_amount(report, capacity)} ({_trimmed(share) if share <= 100 else '>100'}%)"
        for capacity, share in zip(capacities, shares, strict=True)
    )


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
