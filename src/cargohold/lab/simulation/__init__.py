"""The simulation: the real scheduler and connectors, a model whose KV says which prefix it belongs to, and virtual time."""

from cargohold.lab.simulation.connectors import SimulatedOffloading
from cargohold.lab.simulation.faults import VirtualClock
from cargohold.lab.simulation.fingerprints import FingerprintRunner, PrefixChains, WrongTokenError, simulated_layout
from cargohold.lab.simulation.replica import SimulatedEngine
from cargohold.lab.simulation.transfers import HeldTransfers

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
