"""Oracles: checks of what must always hold in a simulated engine."""

from cargohold.testing.simulation.oracles.blocks import CopyOracle, EventOracle, Index, PoolOracle
from cargohold.testing.simulation.oracles.found import FoundOracle
from cargohold.testing.simulation.oracles.hints import HintOracle
from cargohold.testing.simulation.oracles.requests import (
    ContainmentOracle,
    Expectation,
    PatienceOracle,
    RequestOracle,
    StatsOracle,
)
from cargohold.testing.simulation.oracles.tiers import LimitOracle, LookUpOracle, TierOracle
from cargohold.testing.simulation.oracles.wishes import WishOracle
from cargohold.testing.simulation.replica import Oracle, OracleError

__all__ = [
    "ContainmentOracle",
    "CopyOracle",
    "EventOracle",
    "Expectation",
    "FoundOracle",
    "HintOracle",
    "Index",
    "LimitOracle",
    "LookUpOracle",
    "Oracle",
    "OracleError",
    "PatienceOracle",
    "PoolOracle",
    "RequestOracle",
    "StatsOracle",
    "TierOracle",
    "WishOracle",
]
