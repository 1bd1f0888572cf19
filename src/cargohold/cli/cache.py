"""``cargohold cache``: list what is stored on a disk or in a shared store, verify it, make room, delete it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.progress import TextColumn
from rich.table import Table
from rich.text import Text

from cargohold.cli.app import Answers, AsJson, PlainFlags, app, errors, progress
from cargohold.cli.recompute import recompute
from cargohold.cli.signals import EXIT_FAILED
from cargohold.errors import ConfigError, TierError
from cargohold.option_values import format_bytes, format_count, format_time, parse_room
from cargohold.tiers.inventory import Holding, Inventory, Verification
from cargohold.tiers.kinds import open_inventory
from cargohold.tiers.places import without_secrets

DAY_S = 86400

cache = typer.Typer(
    help="Show, verify, prune and delete what is stored on a disk or in a shared store.",
    no_args_is_help=True,
    cls=PlainFlags,
)
app.add_typer(cache, name="cache")

Place = Annotated[
    str,
    typer.Argument(
        help="Directory of a disk tier, or URL of a shared one: s3://, gs://, az://, file://, redis://, mooncake://."
    ),
]
Ids = Annotated[list[str] | None, typer.Argument(help="Namespaces, by the start of their id.")]


@cache.command("ls")
def list_namespaces(place: Place, as_json: AsJson = False) -> None:
    """List namespaces: one per model, configuration and worker."""
    holdings = _listed(open_inventory(place))
    if as_json:
        typer.echo(json.dumps([_as_dict(holding) for holding in holdings]))
        return
    if holdings:
        Answers().print_table(_table(holdings))
        spare_bytes = sum(holding.spare_bytes for holding in holdings)
        if spare_bytes:
            typer.echo(f"and {format_bytes(spare_bytes)} that are preallocated for more")
        _tell_remarks(holdings)
    else:
        typer.echo(f"nothing is stored in {without_secrets(place) if '://' in place else place}")


@cache.command()
def verify(
    place: Place,
    ids: Ids = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete damaged chunks.")] = False,
    is_recomputed: Annotated[
        bool, typer.Option("--recompute", help="If none is damaged, compute chunks again, too, and compare.")
    ] = False,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="The model that computes them.")] = None,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="More prompts, in JSON lines: texts, token ids, or what run --json prints."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read every chunk and check it, of all namespaces if no id is given.

    Tokens are kept with the chunks of engines that publish KV events; those of others must be in --prompts.
    Exits with 1 if a chunk is damaged or different, or cannot be checked, for instance because an engine uses it.
    """
    if is_recomputed != (model is not None):
        raise ConfigError("--model", model, "--recompute needs --model, and --model is for --recompute alone")
    inventory = open_inventory(place)
    chosen = _chosen(_listed(inventory), ids)
    skipped = [holding for holding in chosen if holding.is_in_use]
    failures = _Failures()
    counts = _verified(inventory, [holding for holding in chosen if not holding.is_in_use], failures, delete=delete)
    good, damaged = counts[Verification.GOOD], counts[Verification.DAMAGED]
    found = {}
    for holding in () if model is None or damaged else chosen:
        if holding not in skipped and holding.id not in failures:
            with failures.noted(holding):
                found[holding.id] = recompute(place, holding, str(model), prompts)
    if as_json:
        in_use = [held.id for held in skipped]
        facts = {"good": good, "damaged": damaged, "deleted": delete, "in_use": in_use, "failed": list(failures)}
        typer.echo(json.dumps(facts | ({"recomputed": found} if is_recomputed else {})))
    else:
        fate = " and deleted" if delete and damaged and not failures else ""
        typer.echo(f"{format_count(good, 'chunk')} {'is' if good == 1 else 'are'} good, {damaged:,} damaged{fate}")
        for held in skipped:
            typer.echo(f"{held.short_id} is {_use(held)} and was not looked at")
        _tell_remarks(skipped)
        if is_recomputed and damaged:
            typer.echo(
                "nothing was computed again, because that would delete what is damaged: do so first, with --delete"
            )
        elif is_recomputed:
            Answers().print_table(_outcomes(found))
    failures.end()
    if damaged or skipped or any(of["different"] for of in found.values()):
        raise typer.Exit(EXIT_FAILED)


def _outcomes(found: Mapping[str, Mapping[str, int]]) -> Table:
    """How the chunks of namespaces compare with what was computed again."""
    table = Table("id", "equal", "close", "different", "tokens unknown", box=None, header_style="bold")
    for name, of in found.items():  # names end with 32 digits, of which the first 8 are enough
        table.add_row(name[:-24], *(f"{number:,}" for number in of.values()))
    return table


@cache.command()
def prune(
    place: Place,
    max_bytes: Annotated[
        str | None, typer.Option("--max-bytes", help="Keep at most this size, such as 200GiB.")
    ] = None,
    max_days: Annotated[
        float | None, typer.Option("--max-days", min=0, help="Keep namespaces used within this many days.")
    ] = None,
) -> None:
    """Make room: what was used longest ago goes first.

    What is in use on this machine stays. Exits with 1 if more is left for that than was asked for.
    """
    if max_bytes is None and max_days is None:
        raise ConfigError("--max-bytes", None, "prune needs --max-bytes or --max-days")
    limit = None if max_bytes is None else parse_room("--max-bytes", max_bytes)
    inventory = open_inventory(place)
    holdings = _listed(inventory)
    uses = [holding.last_used_s for holding in holdings if not holding.is_in_use]
    if max_days is not None and uses and all(used is None for used in uses):
        raise ConfigError("--max-days", max_days, "this store does not record when it was used; use --max-bytes")
    deleted = _Deletions(inventory)
    with errors.status("deleting"):
        deleted.spare_bytes += inventory.tidy()
        if max_days is not None:
            for holding in holdings:
                if _age_s(holding) > max_days * DAY_S:
                    deleted.remove(holding)
        if limit is not None:
            deleted.trim([holding for holding in holdings if holding not in deleted.holdings], limit)
    typer.echo(_pruned(deleted, _listed(inventory)))
    deleted.failures.end()


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
        raise ConfigError("--all", None, "name what to delete: one or more ids, or --all")
    inventory = open_inventory(place)
    chosen = _chosen(_listed(inventory), ids)
    deleted = _Deletions(inventory)
    with errors.status("deleting"):
        for holding in chosen:
            deleted.remove(holding)
    which = f": {_short_ids(deleted.holdings)}" if deleted.holdings else ""
    number = format_count(len(deleted.holdings), "namespace")
    typer.echo(f"deleted {number}, {format_bytes(deleted.num_bytes + deleted.spare_bytes)}{which}")
    deleted.failures.end()


class _Failures(dict[str, TierError]):
    """Namespaces that failed, by id, for instance because they are in use. A command goes on with the other ones."""

    @contextmanager
    def noted(self, holding: Holding) -> Iterator[None]:
        """End the ``with`` if a namespace fails, and note why."""
        try:
            yield
        except TierError as error:
            self[holding.id] = error

    def end(self) -> None:
        """Tell of the failures, and end the command with an exit status that says that there are some."""
        for error in self.values():
            typer.echo(f"cargohold: {_printable(str(error))}", err=True)
        if self:
            raise typer.Exit(EXIT_FAILED)


class _Deletions:
    """Deletes namespaces, or chunks of them.

    Attributes:
        holdings: namespaces of which something was deleted, as they were before.
        num_bytes: bytes of chunks that were deleted.
        spare_bytes: bytes without chunks that were given back.
        failures: the namespaces that could not be deleted.

    Args:
        inventory: where.
    """

    def __init__(self, inventory: Inventory) -> None:
        self.holdings: list[Holding] = []
        self.num_bytes = self.spare_bytes = 0
        self.failures = _Failures()
        self._inventory = inventory

    def remove(self, holding: Holding) -> None:
        """Delete a namespace, if that is possible."""
        with self.failures.noted(holding):
            self._inventory.remove(holding.id)
            self._count(holding, holding.num_bytes)

    def trim(self, holdings: Sequence[Holding], limit: int) -> None:
        """Let namespaces take at most ``limit`` bytes, if possible, without touching what is in use.

        What chunks take beyond that is deleted. What is spare is given back, if with it the medium would have more.
        """
        excess = sum(holding.num_bytes for holding in holdings) - limit
        spare = sum(holding.spare_bytes for holding in holdings)
        for holding in sorted(holdings, key=lambda holding: holding.is_in_use):  # which fails, if it comes to that
            if excess + spare > 0 and holding.id not in self.failures:
                with self.failures.noted(holding):
                    gone = self._inventory.trim(holding.id, max(0, excess))
                    self._count(holding, gone)
                    excess -= gone
                    spare -= holding.spare_bytes

    def _count(self, holding: Holding, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.spare_bytes += holding.spare_bytes
        if num_bytes:
            self.holdings.append(holding)


def _pruned(deleted: _Deletions, left: Sequence[Holding]) -> str:
    """What was deleted, what was given back, and what is left, in a sentence."""
    of_what = f" of {_short_ids(deleted.holdings)}" if deleted.holdings else ""
    spare = f"; gave back {format_bytes(deleted.spare_bytes)} without chunks" if deleted.spare_bytes else ""
    num_bytes = format_bytes(sum(holding.num_bytes for holding in left))
    return f"deleted {format_bytes(deleted.num_bytes)}{of_what}{spare}; {num_bytes} are left"


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


def _verified(
    inventory: Inventory, holdings: Sequence[Holding], failures: _Failures, *, delete: bool
) -> Counter[Verification]:
    """Verify namespaces, behind a progress bar; returns how often there was which finding."""
    counts: Counter[Verification] = Counter()
    with progress(TextColumn("{task.completed}/{task.fields[of]}")) as bar:
        for holding in holdings:
            of = "?" if holding.num_chunks is None else str(holding.num_chunks)
            task = bar.add_task(holding.short_id, total=holding.num_chunks, of=of)
            with failures.noted(holding):
                for finding in inventory.verify(holding.id, delete=delete):
                    counts[finding] += 1
                    bar.advance(task)
    return counts


def _tell_remarks(holdings: Sequence[Holding]) -> None:
    for holding in holdings:
        if holding.remark:
            typer.echo(f"{holding.short_id}: {_printable(holding.remark)}", err=True)


def _use(holding: Holding) -> str:
    """A namespace's use in words. What has a remark may be another user's, whose use is unknown."""
    return "perhaps in use" if holding.remark else "in use"


def _age_s(holding: Holding) -> float:
    return 0.0 if holding.last_used_s is None else time.time() - holding.last_used_s


def _as_dict(holding: Holding) -> dict[str, object]:
    return {
        "id": holding.id,
        "chunks": holding.num_chunks,
        "bytes": holding.num_bytes,
        "spare_bytes": holding.spare_bytes,
        "plain_bytes": holding.plain_bytes,
        "last_used_s": holding.last_used_s,
        "in_use": holding.is_in_use,
        "remark": holding.remark,
        "namespace": dict(holding.facts),
    }


def _table(holdings: Sequence[Holding]) -> Table:
    table = Table(box=None, header_style="bold")
    for title in ("id", "model", "part"):
        table.add_column(title)
    is_packed = any(holding.plain_bytes for holding in holdings)
    for title in ("chunks", "size", *["plain"] * is_packed, "last used"):
        table.add_column(title, justify="right")
    table.add_column("")
    for holding in holdings:
        facts = holding.facts
        remarks = [_use(holding)] * holding.is_in_use + ["encrypted"] * bool(facts.get("encryption"))
        names = [_shown(facts.get(name, "?")) for name in ("label", "split")]
        chunks = "unknown" if holding.num_chunks is None else f"{holding.num_chunks:,}"
        plain = format_bytes(holding.plain_bytes) if holding.plain_bytes else ""
        sizes = [chunks, format_bytes(holding.num_bytes), *[plain] * is_packed, _ago(holding)]
        table.add_row(holding.short_id, *names, *sizes, ", ".join(remarks))
    return table


def _shown(fact: str) -> Text:
    """Text from a store, for a table. Brackets are not markup."""
    return Text(_printable(fact))


def _printable(text: str) -> str:
    """Text made safe for a terminal: people who can write to a store must not control the reader's terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _ago(holding: Holding) -> str:
    if holding.last_used_s is None:
        return "?"
    seconds = _age_s(holding)
    return "just now" if seconds < 60 else f"{format_time(seconds)} ago"
