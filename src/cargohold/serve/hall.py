"""What all requests are served with."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

from fastapi import Request

from cargohold.async_llm import AsyncLLM
from cargohold.serve.desk import Desk
from cargohold.serve.errors import ApiError
from cargohold.serve.meters import Meters
from cargohold.serve.settings import Client, ServeConfig
from cargohold.serve.watch import Watch


@dataclass(frozen=True, slots=True)
class Hall:
    """What requests are served with.

    Attributes:
        desk: admits them.
        config: the server's options.
        watch: looks at the engine.
        meters: count them.
        started: when, in seconds since 1970.
    """

    desk: Desk
    config: ServeConfig
    watch: Watch
    meters: Meters
    started: float = field(default_factory=time.time)

    def names(self) -> list[str]:
        """The names that clients may ask for the model by."""
        return self._names(self.desk.llm)

    @property
    def shown_name(self) -> str | None:
        """The name of the model for people; ``None`` while it is loaded."""
        return None if self.desk.loaded is None else self._names(self.desk.loaded)[0]

    def check_model(self, name: str) -> str:
        """Return the name. Raises ``ApiError`` 404 if the model is not served under it."""
        if name not in self.names():
            message = f"there is no model {name!r:.200} here, but {self.shown_name!r}"
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")
        return name

    def _names(self, llm: AsyncLLM) -> list[str]:
        return list(self.config.served_names) or [_short(llm.plan.info.name)]


def hall_of(request: Request) -> Hall:
    """What this request is served with."""
    hall: Hall = request.app.state.hall
    return hall


def client_of(request: Request) -> Client:
    """Who has sent the request, as the gate has found out."""
    client: Client = request.state.client
    return client


def _short(model: str) -> str:
    """The name of a directory or a file without what is before it; any other name as it is."""
    return Path(model).name if Path(model).exists() else model
