"""Cargohold keeps the KV cache that an LLM engine has no room for, and puts it back when the prefix returns."""
