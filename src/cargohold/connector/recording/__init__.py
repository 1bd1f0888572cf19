"""A wrapper around any connector that writes the block trace of the traffic it sees: hashes only, no text, no tokens."""

from cargohold.connector.recording.factory import RecordingFactory

__all__ = ["RecordingFactory"]
