"""``cargohold cache``: list what is stored on a disk or in a shared store, verify it, make room, delete it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cargohold.cli.app import EXIT_FAILED, app
from cargohold.cli.console import Answers, errors
from cargohold.errors import ConfigError
from cargohold.offload.tier.inventory import Finding, Holding, Inventory, open_inventory
from cargohold.offload.tier.store_url import without_secrets
from cargohold.units import format_bytes, format_count, parse_bytes

DAY_S = 86400

cache = typer.Typer(
    help="Show, verify, prune and delete what is stored on a disk or in a shared store.", no_args_is_help=True
)
app.add_typer(cache, name="cache")

Place = Annotated[
    str,
    typer.Argument(help="Directory of a disk tier, or URL of a shared one: s3://, gs://, az://, file://, redis://."),
]
Ids = Annotated[list[str] | None, typer.Argument(help="Namespaces, by the start of their id; all if there is none.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@cache.command("ls")
def list_namespaces(place: Place, as_json: AsJson = False) -> None:
    """List namespaces: one per model, configuration and worker."""
    holdings = _listed(open_inventory(place))
    if as_json:
        typer.echo(json.dumps([_as_dict(holding) for holding in holdings]))
        return
    if holdings:
        Answers().print_table(_table(holdings))
    else:
        typer.echo(f"nothing is stored in {without_secrets(place) if '://' in place else place}")


@cache.command()
def verify(
    place: Place,
    ids: Ids = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete damaged chunks.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every chunk and check it. Exits with 1 if one is damaged."""
    inventory = open_inventory(place)
    counts: Counter[Finding] = Counter()
    skipped = []
    chosen = _chosen(_listed(inventory), ids)
    with _progress() as progress:
        for holding in chosen:
            if holding.is_in_use:
                skipped.append(holding)
                continue
            task = progress.add_task(holding.short_id, total=holding.num_chunks)
            for finding in inventory.verify(holding.id, delete=delete):
                counts[finding] += 1
                progress.advance(task)
    damaged = counts[Finding.DAMAGED]
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "good": counts[Finding.GOOD],
                    "damaged": damaged,
                    "deleted": delete,
                    "in_use": [held.id for held in skipped],
                }
            )
        )
    else:
        fate = " and deleted" if delete and damaged else ""
        typer.echo(f"{counts[Finding.GOOD]} chunks are good, {damaged} damaged{fate}")
        for held in skipped:
            typer.echo(f"{held.short_id} is in use and was not looked at")
    if damaged:
        raise typer.Exit(EXIT_FAILED)


@cache.command()
def prune(
    place: Place,
    max_bytes: Annotated[str | None, typer.Option("--max-bytes", help="Keep at most so much, such as 200GiB.")] = None,
    max_days: Annotated[
        float | None, typer.Option("--max-days", min=0, help="Keep namespaces that were used in the last so many days.")
    ] = None,
) -> None:
    """Make room: what was used longest ago goes first. What is in use on this machine stays."""
    if max_bytes is None and max_days is None:
        raise ConfigError("--max-bytes", None, "prune needs --max-bytes or --max-days")
    limit = None if max_bytes is None else parse_bytes("--max-bytes", max_bytes)
    inventory = open_inventory(place)
    holdings = _listed(inventory)
    gone = 0
    with errors.status("deleting"):
        if max_days is not None:
            old = [holding for holding in holdings if not holding.is_in_use and _age_s(holding) > max_days * DAY_S]
            gone += _remove(inventory, old)
            holdings = [holding for holding in holdings if holding not in old]
        if limit is not None:
            gone += _trim(inventory, holdings, limit)
    left = sum(holding.num_bytes for holding in _listed(inventory))
    typer.echo(f"deleted {format_bytes(gone)}; {format_bytes(left)} are left")


@cache.command()
def rm(
    place: Place,
    ids: Ids = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete every namespace.")] = False,
) -> None:
    """Delete namespaces with all their chunks."""
    if ids and everything:
        raise ConfigError("--all", None, "give either ids or --all, not both")
    if not ids and not everything:
        raise ConfigError("--all", None, "say what to delete: one or more ids, or --all")
    inventory = open_inventory(place)
    chosen = _chosen(_listed(inventory), ids)
    with errors.status("deleting"):
        gone = _remove(inventory, chosen)
    typer.echo(f"deleted {format_count(len(chosen), 'namespace')}, {format_bytes(gone)}")


def _listed(inventory: Inventory) -> list[Holding]:
    """All namespaces, behind a spinner: of a bucket with millions of chunks the list takes minutes."""
    with errors.status("listing namespaces"):
        return inventory.holdings()


def _chosen(holdings: list[Holding], ids: Sequence[str] | None) -> list[Holding]:
    """The namespaces whose ids start with ``ids``; all if there are none.

    Raises:
        ConfigError: one of ``ids`` is not the start of exactly one namespace's id.
    """
    if not ids:
        return holdings
    chosen = {}
    for start in ids:
        found = [holding for holding in holdings if holding.id.startswith(start)]
        if not found:
            raise ConfigError("ID", start, f"it matches no namespace; stored here: {_short_ids(holdings)}")
        if len(found) > 1 or not start:
            expected = f"it must be the start of exactly one namespace's id; these match: {_short_ids(found)}"
            raise ConfigError("ID", start, expected)
        chosen[found[0].id] = found[0]
    return list(chosen.values())


def _short_ids(holdings: Sequence[Holding]) -> str:
    return ", ".join(holding.short_id for holding in holdings) or "nothing"


def _remove(inventory: Inventory, holdings: Iterable[Holding]) -> int:
    """Delete namespaces; returns how many bytes they took."""
    gone = 0
    for holding in holdings:
        inventory.remove(holding.id)
        gone += holding.num_bytes
    return gone


def _trim(inventory: Inventory, holdings: Sequence[Holding], limit: int) -> int:
    """Delete chunks until at most ``limit`` bytes are left, if possible; returns how many bytes were deleted."""
    gone = 0
    excess = sum(holding.num_bytes for holding in holdings) - limit
    for holding in holdings:
        if excess > gone and not holding.is_in_use:
            gone += inventory.trim(holding.id, excess - gone)
    return gone


def _age_s(holding: Holding) -> float:
    return 0.0 if holding.last_used_s is None else time.time() - holding.last_used_s


def _as_dict(holding: Holding) -> dict[str, object]:
    return {
        "id": holding.id,
        "chunks": holding.num_chunks,
        "bytes": holding.num_bytes,
        "last_used_s": holding.last_used_s,
        "in_use": holding.is_in_use,
        "namespace": dict(holding.facts),
    }


def _table(holdings: Sequence[Holding]) -> Table:
    table = Table(box=None, header_style="bold")
    for title in ("id", "model", "part"):
        table.add_column(title)
    for title in ("chunks", "size", "last used"):
        table.add_column(title, justify="right")
    table.add_column("")
    for holding in holdings:
        facts = holding.facts
        remarks = ["in use"] * holding.is_in_use + ["encrypted"] * bool(facts.get("encryption"))
        names = [_shown(facts.get(name, "?")) for name in ("label", "split")]
        sizes = [f"{holding.num_chunks:,}", format_bytes(holding.num_bytes), _ago(holding)]
        table.add_row(holding.short_id, *names, *sizes, ", ".join(remarks))
    return table


def _shown(fact: str) -> Text:
    """Text from a store, made safe for a terminal: people who can write to the store must not control the terminal.

    Brackets are not markup.
    """
    return Text("".join(char if char.isprintable() else "?" for char in fact))


def _ago(holding: Holding) -> str:
    if holding.last_used_s is None:
        return "?"
    seconds = _age_s(holding)
    for unit, size in (("d", DAY_S), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"


def _progress() -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description} {task.completed}/{task.total}"), TimeElapsedColumn())
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
