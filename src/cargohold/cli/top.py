"""``cargohold top``: what the caches of any number of engines do, live, from their ``/metrics``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from importlib.util import find_spec
from typing import Annotated, Final, NamedTuple
from urllib.error import URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import urlopen

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cargohold.cli.app import EXIT_FAILED, EXIT_USAGE, app
from cargohold.cli.common import Answers
from cargohold.errors import ConfigError, one_line
from cargohold.units import format_bytes

_TIMEOUT_S: Final = 3.0
_MAX_BYTES: Final = 32 * 1024**2
_MAX_AT_ONCE: Final = 32
_COLOURS: Final = ("green", "blue", "magenta", "cyan", "yellow")
"""Colours of the tiers, in their order; what was computed has none."""

# --- what an engine says of itself ------------------------------------------------------------------------------------

Labels = frozenset[tuple[str, str]]


class Window(NamedTuple):
    """A histogram's values in a span of time.

    Attributes:
        buckets: number of values up to each bound.
        num_values: number of values.
    """

    buckets: Mapping[float, float]
    num_values: float

    def quantile(self, part: float) -> float | None:
        """Return a time in seconds that ``part`` of the values do not exceed: a bucket's bound. ``None`` without values."""
        if not self.num_values:
            return None
        return min((bound for bound, number in self.buckets.items() if number >= part * self.num_values), default=None)


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one engine's ``/metrics`` said, or why it said nothing.

    Attributes:
        at: when, in seconds of a monotonic clock.
        samples: values by name and labels, added up over vLLM's own labels: models and data-parallel replicas.
        error: why there is nothing; empty if there is.
    """

    at: float
    samples: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)
    error: str = ""

    @classmethod
    def parse(cls, at: float, text: str) -> Scrape:
        """Read the text format of Prometheus. Raises ``ValueError`` if it is something else."""
        from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415  # may be absent

        samples: dict[str, Counter[Labels]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = frozenset((name, value) for name, value in sample.labels.items() if name not in _OF_VLLM)
                samples.setdefault(sample.name, Counter())[labels] += sample.value  # type: ignore[assignment]  # a Counter adds what can be added
        return cls(at, samples)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the values of a metric by one of its labels, added up over the others."""
        values: Counter[str] = Counter()
        for labels, value in self.samples.get(name, {}).items():
            values[dict(labels).get(label, "")] += value  # type: ignore[assignment]  # a Counter adds what can be added
        return dict(values)

    def total(self, *names: str) -> float:
        """Return the sum of all values of the first of these metrics that there is; 0 if there is none."""
        return next((sum(self.samples[name].values()) for name in names if name in self.samples), 0.0)

    def since(self, before: Scrape | None) -> Scrape:
        """Return how counters have grown since an earlier scrape, or since the start: if there is none, or it restarted."""
        if before is None or before.error or self.error:
            return self
        grown = {
            name: {labels: value - before.samples.get(name, {}).get(labels, 0) for labels, value in series.items()}
            for name, series in self.samples.items()
        }
        counters = (values for name, values in grown.items() if name.endswith(("_total", "_count")))
        has_restarted = any(value < 0 for values in counters for value in values.values())
        return self if has_restarted else Scrape(self.at, grown)

    def times(self, name: str) -> dict[str, Window]:
        """Return the histograms of a name, by tier."""
        buckets: dict[str, Counter[float]] = {}
        for labels, value in self.samples.get(f"{name}_bucket", {}).items():
            of = dict(labels)
            buckets.setdefault(of.get("tier", ""), Counter())[float(of["le"])] += value  # type: ignore[assignment]  # as above
        counts = self.by(f"{name}_count", "tier")
        return {tier: Window(dict(sorted(found.items())), counts.get(tier, 0)) for tier, found in buckets.items()}


_OF_VLLM: Final = frozenset({"model_name", "engine"})


def metrics_url(text: str) -> str:
    """Return the URL of an engine's metrics. Raises ``ConfigError`` if the text is no address of one."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    with suppress(ValueError):  # of a port that is none
        if parts.scheme in {"http", "https"} and parts.hostname and (parts.port is None or parts.port > 0):
            path = parts.path if parts.path.strip("/") else "/metrics"
            return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))
    raise ConfigError("URL", text, "it must be an engine's address, such as localhost:8000 or http://host:8000/metrics")


def scrape(url: str) -> Scrape:
    """Ask an engine; what went wrong is in the answer."""
    at = time.monotonic()
    try:
        with urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310  # its scheme was checked
            data = answer.read(_MAX_BYTES)
        return Scrape.parse(at, data.decode())
    except URLError as error:
        reason = error.reason if isinstance(error.reason, str) else one_line(error.reason)
        return Scrape(at, error=reason)
    except (OSError, HTTPException, ValueError) as error:
        return Scrape(at, error=one_line(error) or type(error).__name__)


# --- what people see --------------------------------------------------------------------------------------------------


def draw(name: str, now: Scrape, before: Scrape | None) -> RenderableType:
    """Draw one engine: what is there now, and what was done since the scrape before."""
    if now.error:
        return Panel(Text(f"cannot be asked: {now.error}", style="red"), title=Text(name), title_align="left")
    grown = now.since(before)
    span_s = now.at - before.at if before is not None and grown is not now else None
    tiers = _tiers(now)
    parts = [_requests(now, grown, span_s), _prompts(grown, tiers)]
    if tiers:
        parts += [_places(now, grown, span_s, tiers), _speeds(grown), _ages(now)]
        parts += _troubles(now)
    else:
        parts.append(Text("no Cargohold here: its /metrics has none of our time series", style="yellow"))
    return Panel(Group(*parts), title=Text(name), title_align="left")


def _tiers(now: Scrape) -> list[str]:
    names = now.by("cargohold_tier_capacity_bytes", "tier") | now.by("cargohold_tier_ready_bytes", "tier")
    order = {"device": 0, "host": 1, "disk": 2}
    return sorted(names, key=lambda name: (order.get(name, len(order)), name))


def _requests(now: Scrape, grown: Scrape, span_s: float | None) -> Text:
    states = now.by("cargohold_engine_requests", "state")
    running = states.get("running", now.total("vllm:num_requests_running"))
    waiting = states.get("waiting", now.total("vllm:num_requests_waiting")) + states.get("loading", 0)
    text = Text(f"requests: {running:g} running, {waiting:g} waiting")
    tokens = grown.total("cargohold_generated_tokens_total", "vllm:generation_tokens_total")
    return text.append(f"; {_rate(tokens, span_s)} tokens generated")


def _prompts(grown: Scrape, tiers: Sequence[str]) -> RenderableType:
    """Where prompts came from, as a bar and in words."""
    found = grown.by("cargohold_prompt_tokens_total", "tier")
    total = sum(found.values())
    if not total:
        return Text("prompts: none", style="dim")
    colours = dict(zip(tiers, _COLOURS * len(tiers), strict=False))
    text, width = Text("prompts: "), 30
    places = [*(tier for tier in tiers if found.get(tier)), *sorted(found.keys() - {*tiers, "computed"}), "computed"]
    for place in places:
        length = round(width * found.get(place, 0) / total)
        text.append("█" * length if place in colours else "░" * length, style=colours.get(place, "dim"))
    for place in places:
        text.append(f"  {found.get(place, 0) / total:.0%} {place}", style=colours.get(place, ""))
    return text


def _places(now: Scrape, grown: Scrape, span_s: float | None, tiers: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("tier", "full", "", "tokens", "of", "in use", "pinned", "in", "out", "evicted"):
        table.add_column(heading, justify="left" if heading in {"tier", "full"} else "right", no_wrap=True)
    kinds = ("ready_tokens", "capacity_tokens", "in_use_tokens", "pinned_tokens")
    gauges = {kind: now.by(f"cargohold_tier_{kind}", "tier") for kind in kinds}
    moved = {
        way: {
            dict(labels)["tier"]: value
            for labels, value in grown.samples.get("cargohold_moved_bytes_total", {}).items()
            if ("direction", way) in labels
        }
        for way in ("in", "out")
    }
    removed = grown.by("cargohold_removed_chunks_total", "tier")
    for tier, colour in zip(tiers, _COLOURS * len(tiers), strict=False):
        ready, capacity = gauges["ready_tokens"].get(tier), gauges["capacity_tokens"].get(tier)
        is_known = ready is not None and bool(capacity)
        bar: RenderableType = ""
        if is_known:
            bar = ProgressBar(
                total=capacity, completed=ready or 0, width=20, complete_style=colour, finished_style=colour
            )
        table.add_row(
            Text(tier, style=colour),
            bar,
            f"{(ready or 0) / (capacity or 1):.0%}" if is_known else "",
            _count(ready),
            _count(capacity),
            *(_count(gauges[kind].get(tier)) for kind in ("in_use_tokens", "pinned_tokens")),
            *(_rate(moved[way].get(tier), span_s, as_bytes=True) for way in ("in", "out")),
            _rate(removed.get(tier), span_s),
        )
    return table


def _speeds(grown: Scrape) -> Text:
    load_s, prefill_s = grown.total("cargohold_load_seconds_sum"), grown.total("cargohold_prefill_seconds_total")
    loads = grown.total("cargohold_load_tokens_total") / load_s if load_s else None
    prefill = grown.total("cargohold_prefill_tokens_total") / prefill_s if prefill_s else None
    text = Text(f"speed: loads {_count(loads) or '-'} tokens/s, computing {_count(prefill) or '-'} tokens/s")
    if loads and prefill:
        text.append(f" ({loads / prefill:.1f} times)", style="" if loads > prefill else "bold red")
    for what in ("load", "fetch", "look_up", "wait"):
        for tier, window in sorted(grown.times(f"cargohold_{what}_seconds").items()):
            half, most = window.quantile(0.5), window.quantile(0.95)
            if half is not None and most is not None:
                of = "" if what in {"load", "wait"} else f" {tier}"
                text.append(f"; {what.replace('_', '-')}{of} {_time(half)} (95%: {_time(most)})")
    return text


def _ages(now: Scrape) -> Text:
    text = Text(style="dim")
    kept = now.times("cargohold_lifetime_seconds").get("host")
    gap = now.times("cargohold_reuse_gap_seconds").get("")
    for what, window in (
        ("half of the chunks in host memory stayed for", kept),
        ("half of the reuses came within", gap),
    ):
        median = None if window is None else window.quantile(0.5)
        if median is not None:
            text.append("; " if text else "").append(f"{what} {_time(median)}")
    return text


def _troubles(now: Scrape) -> Iterator[Text]:
    clock = time.time()
    retries = now.samples.get("cargohold_outage_retry_timestamp_seconds", {})
    for labels, since in now.samples.get("cargohold_outage_since_timestamp_seconds", {}).items():
        if not since:
            continue
        of, retry_at = dict(labels), retries.get(labels, 0)
        again = "a restart helps" if not retry_at else "tried again with the next request"
        if retry_at > clock:
            again = f"tried again in {_time(retry_at - clock)}"
        told = f"{of.get('tier')}: {of.get('what')} out of use for {_time(clock - since)}: {of.get('reason')}; {again}"
        yield Text(told, style="bold red")
    failed = {kind: number for kind, number in now.by("cargohold_failures_total", "kind").items() if number}
    if failed:
        yield Text(
            "failed since the start: " + ", ".join(f"{kind} {n:,.0f}" for kind, n in failed.items()), style="yellow"
        )


def _count(number: float | None) -> str:
    """A number for people, in three digits or so."""
    if number is None:
        return ""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= 10 * size:
            return f"{number / size:,.0f}{unit}"
    return f"{number:,.0f}"


def _rate(amount: float | None, span_s: float | None, *, as_bytes: bool = False) -> str:
    """An amount per second, or, without a span of time, since the start."""
    if amount is None:
        return ""
    shown = format_bytes if as_bytes else _count
    return shown(amount) if span_s is None else f"{shown(amount / max(span_s, 1e-3))}/s"


def _time(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{1000 * seconds:.3g} ms"


# --- the command ------------------------------------------------------------------------------------------------------


@app.command()
def top(
    urls: Annotated[list[str], typer.Argument(help="Addresses of engines, such as localhost:8000.", metavar="URL...")],
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look once, and print it; so does a terminal that is none.")
    ] = False,
) -> None:
    """Show what the caches of engines do: ``cargohold serve``, or vLLM with the connector. Ctrl-C ends it."""
    if find_spec("prometheus_client") is None:
        install = "pip install 'cargohold[serve]'"
        typer.echo(f"cargohold top: the package prometheus_client is not installed here: {install}", err=True)
        raise typer.Exit(EXIT_USAGE)
    of = {url: metrics_url(url) for url in urls}
    screen = Answers()
    with ThreadPoolExecutor(min(_MAX_AT_ONCE, len(of))) as pool:

        def look() -> list[Scrape]:
            return list(pool.map(scrape, of.values()))

        now = look()
        if once or not screen.is_terminal or screen.is_dumb_terminal:
            screen.print(_page(of, now, [None] * len(now)))
            if all(seen.error for seen in now):
                raise typer.Exit(EXIT_FAILED)
            return
        with Live(_page(of, now, [None] * len(now)), console=screen, screen=True, auto_refresh=False) as live:
            while True:
                live.refresh()
                time.sleep(interval)
                before, now = now, look()
                live.update(_page(of, now, before))


def _page(names: Iterable[str], now: Sequence[Scrape], before: Sequence[Scrape | None]) -> Group:
    return Group(*map(draw, names, now, before))
