"""The simulation: the real scheduler and connectors, a model whose KV says which prefix it belongs to, and virtual time."""

from cargohold.simulation.chains import PrefixChains, WrongTokenError
from cargohold.simulation.clock import VirtualClock
from cargohold.simulation.engine import SimulatedEngine
from cargohold.simulation.fingerprints import FingerprintRunner
from cargohold.simulation.layouts import simulated_layout
from cargohold.simulation.offloading import SimulatedOffloading
from cargohold.simulation.transfers import HeldTransfers

__all__ = [
    "FingerprintRunner",
    "HeldTransfers",
    "PrefixChains",
    "SimulatedEngine",
    "SimulatedOffloading",
    "VirtualClock",
    "WrongTokenError",
    "simulated_layout",
]
