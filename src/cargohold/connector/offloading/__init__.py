"""Copies KV down as it is computed, and loads it back on a prefix hit."""
