"""Oracle: the connectors' counters add up."""

from __future__ import annotations

from collections import Counter

from cargohold.protocol import Stats, add_stats, is_level, last_name
from cargohold.simulation.inside import guards_of, live_sides
from cargohold.simulation.oracles.base import Oracle
from cargohold.simulation.replica import Replica


class StatsOracle(Oracle):
    """Takes the counters now and then, and checks them, also after connectors were turned off.

    Counters never fall, no more tokens are found than were asked for, and levels equal what there is.

    Args:
        engine: the replica. Its connectors are offloading connectors, and nobody else takes their counters.
    """

    name = "stats"

    def __init__(self, engine: Replica) -> None:
        self._engine = engine
        self._total: Stats = {}

    def inspect(self) -> None:
        """Take the counters, and check them."""
        connector = self._engine.scheduler.connector
        stats = connector.get_stats()
        fallen = [counter for counter, value in stats.items() if value < 0 and not is_level(counter)]
        self.require(not fallen, f"counters fell: {fallen}")
        self._total = add_stats(self._total, stats)
        num_ready = sum(side.manager.num_ready for side in live_sides(connector))
        told = self._sum("num_ready_chunks")
        self.require(told == num_ready, f"counters tell of {told} chunks, {num_ready} can be found")
        for connector_name, num_found in self._num_found().items():
            num_asked = self._total.get(f"{connector_name}asked_tokens", 0)
            self.require(num_found <= num_asked, f"{num_found} tokens were found, {num_asked} were asked for")
        is_any_off = any(guard.broken is not None for guard in guards_of(connector))
        self.require(bool(self._sum("connectors_off")) is is_any_off, "connectors that are turned off are not counted")

    def at_end(self) -> None:
        """Check once more."""
        self.inspect()

    def _num_found(self) -> Counter[str]:
        """Tokens found on the device and in tiers, by the prefix of each connector's counters."""
        found: Counter[str] = Counter()
        for counter, value in self._total.items():
            if counter.endswith("_hit_tokens"):
                found[counter.removesuffix(last_name(counter))] += int(value)
        return found

    def _sum(self, name: str) -> float:
        return sum(value for counter, value in self._total.items() if last_name(counter) == name)
