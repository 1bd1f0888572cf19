"""The simulation: the real scheduler and connectors, a model whose KV says which prefix it belongs to, and virtual time."""

from cargohold.testing.simulation.connectors import SimulatedOffloading
from cargohold.testing.simulation.faults import VirtualClock
from cargohold.testing.simulation.fingerprints import FingerprintRunner, PrefixChains, WrongTokenError, simulated_layout
from cargohold.testing.simulation.replica import SimulatedEngine
from cargohold.testing.simulation.transfers import HeldTransfers

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
