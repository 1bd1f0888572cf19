"""A connector of somebody else, as options name it."""

from __future__ import annotations

from dataclasses import dataclass

from cargohold.errors import ConfigError
from cargohold.protocol import ClassFactory, SchedulerEnvironment, WorkerEnvironment
from examples.own_connector.shelf import FACTORY, ShelfScheduler, ShelfWorker
from examples.own_tier.folder import FolderConfig


@dataclass(frozen=True, kw_only=True)
class ShelfFactory:
    """A shelf with options."""

    places: int = 64
    label: str = "shelf"

    def __post_init__(self) -> None:
        if self.places < 1:
            raise ConfigError("places", self.places, "it must be an integer from 1")
        if not self.label:
            raise ValueError("a shelf without a label")

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> ShelfScheduler:
        side = ShelfScheduler(environment)
        side.num_places = self.places
        side.reset_cache()
        return side

    def make_worker_side(self, environment: WorkerEnvironment) -> ShelfWorker:
        return ShelfWorker(environment)


def make_shelf(*, width: int, colour: str = "oak") -> ClassFactory:
    """A shelf from a function."""
    if colour == "pink":
        raise RuntimeError("no such paint")
    return ClassFactory(ShelfScheduler, ShelfWorker)


def make_nothing() -> int:
    return 0


NUMBER = 3

__all__ = ["FACTORY", "NUMBER", "FolderConfig", "ShelfFactory", "make_nothing", "make_shelf"]
