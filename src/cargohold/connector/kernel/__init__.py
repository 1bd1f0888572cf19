"""Moves chunks between the device and host memory: what is there, what to load, what to store, holds, jobs, ends."""
