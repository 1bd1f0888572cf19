"""Stores that several machines share: a directory, object stores, Redis or Valkey."""
