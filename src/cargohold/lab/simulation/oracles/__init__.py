"""Oracles: checks of what must always hold in a simulated engine."""

from cargohold.lab.simulation.oracles.blocks import CopyOracle, EventOracle, Index, PoolOracle
from cargohold.lab.simulation.oracles.found import FoundOracle, LossOracle, ReuseOracle
from cargohold.lab.simulation.oracles.hints import HintOracle
from cargohold.lab.simulation.oracles.requests import (
    ContainmentOracle,
    Expectation,
    PatienceOracle,
    RequestOracle,
    StatsOracle,
)
from cargohold.lab.simulation.oracles.tiers import LimitOracle, LookUpOracle, TierOracle
from cargohold.lab.simulation.oracles.wishes import WishOracle
from cargohold.lab.simulation.replica import Oracle, OracleError

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
    "LossOracle",
    "Oracle",
    "OracleError",
    "PatienceOracle",
    "PoolOracle",
    "RequestOracle",
    "ReuseOracle",
    "StatsOracle",
    "TierOracle",
    "WishOracle",
]
