"""Replacement policies."""
