"""A wrapper around any connector that writes a block trace of the traffic: only hashes of blocks, no text and no tokens."""

from cargohold.connector.recording.factory import RecordingFactory

__all__ = ["RecordingFactory"]
