"""Media that hold chunks."""

from cargohold.offload.tier.host import ByteRows, HostMemory

__all__ = ["ByteRows", "HostMemory"]
