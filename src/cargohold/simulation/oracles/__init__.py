"""Oracles: checks of what must always hold in a simulated engine."""

from cargohold.simulation.oracles.base import Oracle, OracleError
from cargohold.simulation.oracles.blocks import CopyOracle, PoolOracle
from cargohold.simulation.oracles.containment import ContainmentOracle
from cargohold.simulation.oracles.events import EventOracle, Index
from cargohold.simulation.oracles.look_ups import LookUpOracle
from cargohold.simulation.oracles.patience import PatienceOracle
from cargohold.simulation.oracles.requests import Expectation, RequestOracle
from cargohold.simulation.oracles.stats import StatsOracle
from cargohold.simulation.oracles.tiers import LimitOracle, TierOracle
from cargohold.simulation.oracles.wishes import WishOracle

__all__ = [
    "ContainmentOracle",
    "CopyOracle",
    "EventOracle",
    "Expectation",
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
