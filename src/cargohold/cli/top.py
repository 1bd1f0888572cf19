"""``cargohold top``: what the caches of any number of engines do, live, from their ``/metrics``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cargohold.cli.app import Answers, MetricsKeyOption, app, require_packages
from cargohold.cli.signals import EXIT_FAILED
from cargohold.option_values import format_bytes, format_time
from cargohold.process import deferred_interrupt
from cargohold.protocol import metrics
from cargohold.serve.scrape import (
    GENERATED,
    IN_ENGINE,
    LEAST_TOKENS,
    OWN_FAMILIES,
    REFUSED,
    UP,
    Scrape,
    metrics_url,
    moved_bytes,
    scrape,
    tiers_of,
    verified,
)

_MAX_AT_ONCE: Final = 32
_COLOURS: Final = ("green", "blue", "magenta", "cyan", "yellow")
"""Colours of the tiers, in their order; what was computed has none."""
_MAX_OWN: Final = 16
"""Time series of other exporters that are shown."""
_NOT_SHOWN: Final = ("_bucket", "_sum", "_created")
_OURS: Final = {f"{family.sample}{end}" for family in (*metrics.FAMILIES, *OWN_FAMILIES) for end in ("", "_count")}

# --- what people see --------------------------------------------------------------------------------------------------


def draw(name: str, now: Scrape, before: Scrape | None) -> RenderableType:
    """Draw one engine: what is there now, and what was done since the scrape before."""
    if now.error:
        return Panel(Text(f"cannot be reached: {now.error}", style="red"), title=Text(name), title_align="left")
    grown = now.since(before)
    span_s = now.at - before.at if before is not None and grown is not now else None
    tiers = tiers_of(now)
    parts = [_requests(now, grown, span_s), _prompts(grown, tiers)]
    if tiers:
        parts += [*_places(now, grown, span_s, tiers), _speeds(grown), _ages(now)]
        parts += [*_troubles(now), *_own(now, grown)]
    else:
        is_ours = now.of(UP)
        why = "it is starting" if is_ours else "no Cargohold here: its /metrics has no time series of Cargohold"
        parts.append(Text(why, style="yellow"))
    return Panel(Group(*parts), title=Text(name), title_align="left")


def _requests(now: Scrape, grown: Scrape, span_s: float | None) -> Text:
    states = now.by(IN_ENGINE, "state")
    running = states.get("running", now.known("vllm:num_requests_running"))
    waiting = states.get("waiting", now.known("vllm:num_requests_waiting"))
    if waiting is not None:
        waiting += states.get("loading", 0)
    parts = (f"{_known(number)} {what}" for number, what in ((running, "running"), (waiting, "waiting")))
    text = Text(f"requests: {', '.join(parts)}")
    tokens = grown.known(GENERATED, "vllm:generation_tokens_total")
    refused = grown.known(REFUSED)
    if refused:
        text.append(f", {_rate(refused, span_s)} refused", style="bold red")
    return text.append(f"; {_rate(tokens, span_s) or '?'} tokens generated")


def _prompts(grown: Scrape, tiers: Sequence[str]) -> RenderableType:
    """Where prompts came from, as a bar and in words."""
    if not grown.of(metrics.PROMPT):
        return Text("prompts: not known", style="dim")
    found = grown.by(metrics.PROMPT, "tier")
    total = sum(found.values())
    if not total:
        return Text("prompts: none", style="dim")
    colours = dict(zip(tiers, _COLOURS * len(tiers), strict=False))
    text, width = Text("prompts: "), 30
    others = sorted(place for place in found if found[place] and place not in {*tiers, "computed"})
    places = [*(tier for tier in tiers if found.get(tier)), *others, "computed"]
    for place in places:
        length = round(width * found.get(place, 0) / total)
        text.append("█" * length if place in colours else "░" * length, style=colours.get(place, "dim"))
    for place in places:
        text.append(f"  {found.get(place, 0) / total:.0%} {place}", style=colours.get(place, ""))
    return text


def _places(now: Scrape, grown: Scrape, span_s: float | None, tiers: Sequence[str]) -> Iterator[Table]:
    """The tiers as two tables, one below the other: what is in each, and what went into it and out of it."""
    gauges = [
        now.by(metrics.IN_TOKENS[family], "tier")
        for family in (metrics.TIER_READY, metrics.TIER_CAPACITY, metrics.TIER_IN_USE, metrics.TIER_PINNED)
    ]
    moved, removed = moved_bytes(grown), grown.by(metrics.REMOVED, "tier", reason="evicted")
    held = _table("tier", "full", "", "tokens", "of", "in use", "pinned")
    went = _table("tier", "in", "out", "evicted")
    for tier, colour in zip(tiers, _COLOURS * len(tiers), strict=False):
        full, most, *_ = amounts = [gauge.get(tier) for gauge in gauges]
        bar: RenderableType = ""
        if full is not None and most:
            bar = ProgressBar(total=most, completed=full, width=20, complete_style=colour, finished_style=colour)
        part = f"{full / most:.0%}" if full is not None and most else ""
        held.add_row(Text(tier, style=colour), bar, part, *map(_count, amounts))
        ways = (_rate(moved.get((tier, way)), span_s, as_bytes=True) for way in ("in", "out"))
        went.add_row(Text(tier, style=colour), *ways, _rate(removed.get(tier), span_s))
    yield held
    yield went


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in {"tier", "full"} else "right", no_wrap=True)
    return table


def _speeds(grown: Scrape) -> Text:
    """How long restoring took, next to how long computing the same would have."""
    restore_s = grown.seconds(metrics.LOAD) + grown.seconds(metrics.WAIT)
    restored, computed = grown.total(metrics.LOAD_TOKENS), grown.total(metrics.PREFILL_TOKENS)
    text = Text(f"restored: {_known(grown.known(metrics.LOAD_TOKENS))} tokens in {format_time(restore_s)}")
    if min(restored, computed) >= LEAST_TOKENS:
        compute_s = restored * grown.total(metrics.PREFILL_SECONDS) / computed
        text.append(
            f", computing them takes {format_time(compute_s)}", style="bold red" if restore_s > compute_s else ""
        )
    for family in (metrics.LOAD, metrics.FETCH, metrics.LOOK_UP, metrics.WAIT):
        what = family.name.removesuffix("_seconds").replace("_", "-")
        for tier, window in sorted(grown.times(family).items()):
            half, most = window.quantile(0.5), window.quantile(0.95)
            if half is not None and most is not None:
                of = "" if family in {metrics.LOAD, metrics.WAIT} else f" {tier}"
                text.append(f"; {what}{of} {format_time(half)} (95%: {format_time(most)})")
    return text


def _ages(now: Scrape) -> Text:
    text = Text(style="dim")
    kept = now.times(metrics.LIFETIME).get("host")
    gap = now.times(metrics.REUSE_GAP).get("")
    for what, window in (
        ("half of the chunks in host memory stayed for", kept),
        ("half of the reuses came within", gap),
    ):
        median = None if window is None else window.quantile(0.5)
        if median is not None:
            text.append("; " if text else "").append(f"{what} {format_time(median)}")
    return text


def _troubles(now: Scrape) -> Iterator[Text]:
    clock = time.time()
    retries = now.of(metrics.OUTAGE_RETRY)
    for labels, since in now.of(metrics.OUTAGE_SINCE).items():
        if not since:
            continue
        of, retry_at = dict(labels), retries.get(labels, 0)
        again = "a restart helps" if not retry_at else "tried again with the next request"
        if retry_at > clock:
            again = f"tried again in {format_time(retry_at - clock)}"
        outage = f"{of.get('tier')}: {of.get('what')} out of use for {format_time(clock - since)}: {of.get('reason')}; {again}"
        yield Text(outage, style="bold red")
    if text := verified(now):
        is_lying = now.by(metrics.VERIFIED, "outcome").get("different", 0)
        yield Text(f"verified since the start: {text}", style="bold red" if is_lying else "")
    failed = {kind: number for kind, number in now.by(metrics.FAILURES, "kind").items() if number}
    if failed:
        yield Text(
            "failed since the start: " + ", ".join(f"{kind} {n:,.0f}" for kind, n in failed.items()), style="yellow"
        )


def _own(now: Scrape, grown: Scrape) -> Iterator[Text]:
    """What third-party connectors and guests count, by its own name."""
    parts = []
    for name in sorted(now.samples):
        if name.startswith("cargohold_") and name not in _OURS and not name.endswith(_NOT_SHOWN):
            of = grown if name.endswith(("_total", "_count")) else now
            for labels, value in of.samples.get(name, {}).items():
                parts.append(
                    " ".join((name.removeprefix("cargohold_"), *(text for _, text in sorted(labels)), _count(value)))
                )
    if parts:
        yield Text(f"own: {', '.join(parts[:_MAX_OWN])}", style="dim")


def _count(number: float | None) -> str:
    """A number for people, in three digits or so."""
    if number is None:
        return ""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= 10 * size:
            return f"{number / size:,.0f}{unit}"
    return f"{number:,.0f}"


def _known(number: float | None) -> str:
    return "?" if number is None else _count(number)


def _rate(amount: float | None, span_s: float | None, *, as_bytes: bool = False) -> str:
    """An amount per second, or, without a span of time, since the start."""
    if amount is None:
        return ""
    shown = format_bytes if as_bytes else _count
    return shown(amount) if span_s is None else f"{shown(amount / max(span_s, 1e-3))}/s"


# --- the command ------------------------------------------------------------------------------------------------------


@app.command()
def top(
    urls: Annotated[list[str], typer.Argument(help="Addresses of engines, such as localhost:8000.", metavar="URL...")],
    interval: Annotated[float, typer.Option(help="Seconds between two polls.", min=0.1)] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one snapshot and exit, as into a pipe or a file.")
    ] = False,
    metrics_key: MetricsKeyOption = None,
) -> None:
    """Show what the caches of engines do: of cargohold serve, or of vLLM with the connector. Ctrl-C ends it."""
    require_packages("top", "prometheus_client")
    of = {url: metrics_url(url) for url in urls}
    screen = Answers()
    with ThreadPoolExecutor(min(_MAX_AT_ONCE, len(of))) as pool:

        def look() -> list[Scrape]:
            return list(pool.map(partial(scrape, key=metrics_key), of.values()))

        now = look()
        if once or not screen.is_terminal or screen.is_dumb_terminal:
            screen.print(_page(of, now, [None] * len(now)))
            if all(seen.error for seen in now):
                raise typer.Exit(EXIT_FAILED)
            return
        live = Live(_page(of, now, [None] * len(now)), console=screen, screen=True, auto_refresh=False)
        try:
            with deferred_interrupt():  # in the middle of drawing, it would leave the terminal as it is
                live.start(refresh=True)
            while True:
                time.sleep(interval)
                before, now = now, look()
                with deferred_interrupt():
                    live.update(_page(of, now, before), refresh=True)
        finally:
            live.stop()


def _page(names: Iterable[str], now: Sequence[Scrape], before: Sequence[Scrape | None]) -> Group:
    return Group(*map(draw, names, now, before))
