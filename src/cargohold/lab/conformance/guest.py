"""The conformance suite for guests: a feature that only listens changes nothing, and fails alone."""

from __future__ import annotations

import logging
from abc import abstractmethod

import pytest

from cargohold.connector.config import find_guest
from cargohold.connector.kernel.guest import PORT, Guest
from cargohold.connector.offloading import OffloadConfig, OffloadingFactory
from cargohold.lab.conformance.connector import BLOCK_TOKENS, NUM_BLOCKS, ConnectorConformance
from cargohold.lab.simulation.connectors import SimulatedOffloading
from cargohold.lab.simulation.fingerprints import simulated_layout
from cargohold.lab.simulation.replica import SimulatedEngine
from cargohold.protocol import KVConnectorFactory, Stats

_NUM_SLOTS = 100
_NUM_REQUESTS = 12


class GuestConformance(ConnectorConformance):
    """Tests a guest in an offloading connector, which must still pass all of ``ConnectorConformance``."""

    takes_real_time = True

    @abstractmethod
    def guest(self) -> str:
        """The guest as options name it: ``MODULE:CLASS``."""

    def factory(self) -> KVConnectorFactory:
        return OffloadingFactory(OffloadConfig(host_bytes=64 * _NUM_SLOTS, guests=[self.guest()]))

    def test_it_hears_something(self) -> None:
        """At least one fact is overridden, under its right name."""
        kind = find_guest(self.guest())
        assert [fact for fact in PORT if getattr(kind, fact) is not getattr(Guest, fact)], f"{kind} overrides no fact"

    def test_it_is_never_turned_off(self, caplog: pytest.LogCaptureFixture) -> None:
        """It raises in no fact, whatever comes: requests that share prefixes, answers that end, a reset."""
        with caplog.at_level(logging.ERROR):
            _serve([self.guest()])
        assert [record.getMessage() for record in caplog.records if "is turned off" in record.getMessage()] == []

    def test_it_changes_no_step(self) -> None:
        """The same tokens are computed and restored, the same blocks stored, in the same time, as without it."""
        assert _serve([self.guest()]) == _serve([])


def _serve(guests: list[str]) -> Stats:
    """Serve prompts of which some come back, then reset, and serve on; return what the connector has counted before that."""
    engine = SimulatedEngine(simulated_layout(NUM_BLOCKS, BLOCK_TOKENS), SimulatedOffloading(_NUM_SLOTS, guests=guests))
    for number in range(_NUM_REQUESTS):
        engine.add(f"r{number}", [1 + number % 4, *range(3, 3 + 4 * BLOCK_TOKENS + number % 3)], 2)
        engine.run()
    stats = dict(engine.connector.get_kv_connector_stats())
    engine.scheduler.reset_cache()
    engine.add("again", range(3, 3 + 3 * BLOCK_TOKENS), 2)
    engine.run()
    engine.shutdown()
    return stats
