"""Features that are notified of what the connector does: meters, KV events, hints. None of them imports another."""
