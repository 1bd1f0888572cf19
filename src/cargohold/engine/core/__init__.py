"""Scheduler-side of the engine: requests, block tables, scheduling. No torch, no model."""
