"""Standard error, where progress and remarks go, so that standard output has the answers and nothing else."""

from __future__ import annotations

from rich.console import Console

errors = Console(stderr=True)
