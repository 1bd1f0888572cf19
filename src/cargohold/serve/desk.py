"""The desk: takes requests in while there is room, has the engine serve them, and sees to it that none outlives its client."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeVar

from fastapi import Request
from prometheus_client import CollectorRegistry
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from cargohold.base_llm import RequestOptions
from cargohold.engine.core.request import SamplingParams
from cargohold.engine.outputs import RequestOutput
from cargohold.errors import CargoholdError, EngineDeadError
from cargohold.llm import AsyncLLM
from cargohold.protocol import TierContents
from cargohold.serve.errors import ApiError, invalid
from cargohold.serve.records import Records
from cargohold.serve.settings import Client, ServeConfig

T = TypeVar("T")
Outputs = AsyncGenerator[tuple[int, RequestOutput]]


class State(Enum):
    """Stages of a server's life. Only a server that serves takes requests."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request asks of the engine.

    Attributes:
        request_id: as the client knows it.
        endpoint: the interface that it came by.
        client: who has sent it.
        prompts: token ids, one list per answer.
        sampling: one per answer.
        options: for all of them.
        is_streamed: whether the client wants every piece as it comes.
    """

    request_id: str
    endpoint: str
    client: Client
    prompts: list[list[int]]
    sampling: list[SamplingParams]
    options: RequestOptions
    is_streamed: bool = False


class Desk:
    """Admits requests to the model.

    Args:
        records: where requests are remembered.
        max_queue: answers that may wait beside those that run.
    """

    def __init__(self, records: Records, max_queue: int) -> None:
        self.records = records
        self.state = State.STARTING
        self.num_answers = 0
        self.num_refused = 0
        self.has_changed = threading.Event()
        self.end: EngineDeadError | None = None
        self._max_queue = max_queue
        self._llm: AsyncLLM | None = None

    # --- for the thread that started the server -----------------------------------------------------------------------

    def open(self, llm: AsyncLLM) -> None:
        """Begin to serve this model."""
        self._llm = llm
        self.state = State.SERVING

    def start_draining(self) -> None:
        """Take no more requests; those that are here go on."""
        self.state = State.DRAINING

    def note_end(self, error: EngineDeadError) -> None:
        """Note that the engine has ended."""
        if self.state is State.SERVING:
            self.end, self.state = error, State.STOPPED
        self.has_changed.set()

    # --- for the event loop -------------------------------------------------------------------------------------------

    @property
    def llm(self) -> AsyncLLM:
        """The model. Raises ``ApiError`` 503 unless it is being served."""
        if self._llm is None or self.state is not State.SERVING:
            why = "has stopped, because its engine has" if self.state is State.STOPPED else f"is {self.state.value}"
            message = f"the server {why}: try again later"
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code=self.state.value, retry_after_s=2)
        return self._llm

    @property
    def loaded(self) -> AsyncLLM | None:
        """The model, if it has been loaded, whether it is served or not."""
        return self._llm

    async def outputs(self, job: Job) -> Outputs:
        """Have a request served: its outputs as they come, each with the number of its answer.

        Raises:
            ApiError: there is no room, or the server is not serving.
            CargoholdError: the engine refuses the request, or has ended.
        """
        llm = self.llm
        with self._admitted(len(job.prompts)):
            record = self.records.begin(job.request_id, job.endpoint, job.client, len(job.prompts))
            state = "gone"
            try:
                outputs = llm.stream_each(job.prompts, job.sampling, wants_pieces=job.is_streamed, **job.options)
                async with aclosing(outputs):
                    async for at, output in outputs:
                        record.sequences[at].update(output)
                        yield at, output
                state = "finished"
            except EngineDeadError as error:
                state = "failed"
                self.note_end(error)
                raise
            except Exception:
                state = "failed"
                raise
            finally:
                self.records.end(record, state)

    @contextmanager
    def _admitted(self, num_answers: int) -> Iterator[None]:
        """Take places for answers. Never waits: who comes when all are taken is told so."""
        places = self.llm.plan.config.max_num_seqs + self._max_queue
        if num_answers > places:
            raise invalid(f"{num_answers} answers at once are more than the {places} that this server takes", "n")
        if self.num_answers + num_answers > places:
            self.num_refused += 1
            message = f"the queue is full: {self.num_answers} of {places} places are taken (--max-queue); try again"
            raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code="queue_full", retry_after_s=1)
        self.num_answers += num_answers
        try:
            yield
        finally:
            self.num_answers -= num_answers
            self.has_changed.set()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do work for a client, as long as it is there.

    Raises:
        ClientDisconnect: it has gone; the work was cancelled, and has ended.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for one in (task, gone):
            one.cancel()
            with suppress(asyncio.CancelledError, Exception):  # what it raised was raised above, or nobody hears it
                await one


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_INTERVAL_S: Final = 1.0
_MAX_LINES: Final = 50


# --- looking at the engine --------------------------------------------------------------------------------------------


class LogLines(logging.Handler):
    """The last warnings and errors of the log: they say what is suspended, and why."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[dict[str, Any]] = deque(maxlen=_MAX_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Remember a line."""
        with suppress(TypeError, ValueError):  # a line that cannot be written is none
            self._lines.append({"time": record.created, "level": record.levelname, "text": record.getMessage()})

    def lines(self) -> list[dict[str, Any]]:
        """The lines, the latest first."""
        return list(reversed(self._lines))


class Watch:
    """The engine's counters as they were a second ago.

    Args:
        desk: has the model.
        looked: called with the model and its counters after each look.

    Attributes:
        stats: the counters; empty before there are any.
        contents: what is kept below the device, tier by tier; empty before somebody has asked.
        log: the last warnings.
    """

    def __init__(self, desk: Desk, looked: Callable[[AsyncLLM, Mapping[str, float]], object]) -> None:
        self.stats: Mapping[str, float] = {}
        self.contents: Sequence[TierContents] = ()
        self.log = LogLines()
        self._desk = desk
        self._looked = looked

    async def run(self) -> None:
        """Look again and again, until this is cancelled."""
        logger = logging.getLogger("cargohold")
        logger.addHandler(self.log)
        try:
            while True:
                await self.look()
                await asyncio.sleep(_INTERVAL_S)
        finally:
            logger.removeHandler(self.log)

    async def look(self, timeout_s: float | None = None, *, inside: bool = False) -> None:
        """Look now, also at contents if ``inside``. A step may take longer than ``timeout_s``: then all stays as it was."""
        llm = self._desk.loaded
        if llm is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                self.stats = await llm.stats()
                if inside:
                    self.contents = await llm.contents()
            self._looked(llm, self.stats)
        except TimeoutError:
            pass
        except EngineDeadError as error:
            self._desk.note_end(error)
        except CargoholdError:
            pass  # a connector that cannot count; its requests are told what is wrong with it


# --- what all requests are served with --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hall:
    """What requests are served with.

    Attributes:
        desk: admits them.
        config: the server's options.
        watch: looks at the engine.
        registry: what Prometheus reads.
        started: when, in seconds since 1970.
    """

    desk: Desk
    config: ServeConfig
    watch: Watch
    registry: CollectorRegistry
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


def trace_of(request: Request) -> dict[str, str] | None:
    """The trace that the request belongs to, as its headers say it; ``None`` if it belongs to none."""
    return {name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers} or None


def _short(model: str) -> str:
    """The name of a directory or a file without what is before it; any other name as it is."""
    return Path(model).name if Path(model).exists() else model
