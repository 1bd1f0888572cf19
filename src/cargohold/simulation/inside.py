"""Finds the connectors that an engine's connector is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cargohold.connector.multi import MultiConnectorScheduler
from cargohold.connector.offloading import OffloadingScheduler
from cargohold.protocol import ConnectorGuard, ForwardingScheduler, KVConnectorScheduler


def walk(
    connector: KVConnectorScheduler, guards: Sequence[ConnectorGuard] = ()
) -> Iterator[tuple[KVConnectorScheduler, Sequence[ConnectorGuard]]]:
    """Yield ``connector`` and all connectors inside it, outer ones first, each with the guards around it, outermost first."""
    yield connector, guards
    for inner in _parts(connector):
        yield from walk(inner, [*guards, connector] if isinstance(connector, ConnectorGuard) else guards)


def offloading_sides(connector: KVConnectorScheduler) -> Iterator[tuple[OffloadingScheduler, Sequence[ConnectorGuard]]]:
    """Every offloading connector inside ``connector``, with the guards around it, outermost first."""
    return ((side, guards) for side, guards in walk(connector) if isinstance(side, OffloadingScheduler))


def live_sides(connector: KVConnectorScheduler) -> list[OffloadingScheduler]:
    """Every offloading connector inside ``connector`` that is not turned off, and no connector around it either."""
    return [side for side, guards in offloading_sides(connector) if all(guard.broken is None for guard in guards)]


def guards_of(connector: KVConnectorScheduler) -> list[ConnectorGuard]:
    """Every guard around or inside ``connector``."""
    return [guard for guard, _ in walk(connector) if isinstance(guard, ConnectorGuard)]


def innermost_guards(connector: KVConnectorScheduler) -> list[ConnectorGuard]:
    """For every connector that is made of no others, the guard closest around it."""
    return [guards[-1] for part, guards in walk(connector) if guards and not _parts(part)]


def num_stuck_jobs(connector: KVConnectorScheduler) -> int:
    """How many jobs of connectors that are not turned off have not ended in time, and may never end."""
    return sum(side.jobs.num_stuck for side in live_sides(connector))


def forget_engine(connector: KVConnectorScheduler) -> None:
    """End the jobs of a connector whose process has died, so that its tiers give up their pins and reservations."""
    for side, _ in offloading_sides(connector):
        for load in list(side.jobs.loads()):
            load.handle.release()
        for store in list(side.jobs.stores()):
            store.handle.forfeit()


def _parts(connector: KVConnectorScheduler) -> Sequence[KVConnectorScheduler]:
    match connector:
        case ConnectorGuard() | ForwardingScheduler():
            return [connector.inner]
        case MultiConnectorScheduler():
            return connector.children
        case _:
            return []
