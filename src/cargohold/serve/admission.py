"""Admission: takes requests in while there is room, has the engine serve them, and sees to it that none outlives its client."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, cast

from fastapi import Request
from prometheus_client import CollectorRegistry
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from cargohold.base_llm import RequestOptions
from cargohold.engine.core.request import SamplingParams
from cargohold.engine.core.request_queues import QueuePolicy
from cargohold.engine.outputs import RequestOutput
from cargohold.errors import CargoholdError, EngineDeadError
from cargohold.llm import AsyncLLM
from cargohold.protocol import Stats, TierContents
from cargohold.serve.access import Client
from cargohold.serve.errors import ApiError, invalid
from cargohold.serve.records import Records
from cargohold.serve.scrape import History, Scrape
from cargohold.serve.settings import ServeConfig
from cargohold.serve.turns import Room, Turns

T = TypeVar("T")
Outputs = AsyncGenerator[tuple[int, RequestOutput]]


class State(Enum):
    """Stages of a server's life. Only a server that serves takes requests."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"


class Prompts(NamedTuple):
    """What the engine is given for one HTTP request.

    Attributes:
        token_ids: one list per answer.
        sampling: one per answer.
        options: for all of them.
    """

    token_ids: list[list[int]]
    sampling: list[SamplingParams]
    options: RequestOptions


@dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request asks of the engine.

    Attributes:
        request_id: as the client knows it.
        endpoint: the interface that it came by.
        client: the sender.
        num_answers: how many it wants.
        make_prompts: tokenizes what was sent, which takes long if that is long.
        num_bytes: size of what was sent.
        is_streamed: whether the client wants every piece as it comes.
    """

    request_id: str
    endpoint: str
    client: Client
    num_answers: int
    make_prompts: Callable[[], Prompts]
    num_bytes: int
    is_streamed: bool = False


_AHEAD: Final = 16
"""Answers that the engine has besides those that it can run: it looks their prompts up, and fetches what lower tiers have."""
_LONG_TEXT_BYTES: Final = 64 * 1024
_NUM_SHORT_TEXTS: Final = 2
"""Short texts that are tokenized at the same time. Of long ones it is one: it takes seconds, and 200 bytes per token."""


class RequestAdmission:
    """Admits requests to the model.

    Every request takes a place first. Then its text is tokenized, and then it goes to the engine, both when it is its turn.
    Tenants take turns, and each has a share of the places; see ``Room``.

    Args:
        records: where requests are remembered.
        max_queue: answers that may wait besides those that run.
        num_tenants: how many share the places.
    """

    def __init__(self, records: Records, max_queue: int, num_tenants: int = 1) -> None:
        self.records = records
        self.state = State.STARTING
        self.num_refused = 0
        self.has_changed = threading.Event()
        self.end: EngineDeadError | None = None
        self._max_queue = max_queue
        self._num_tenants = num_tenants
        self.loaded: AsyncLLM | None = None
        self._places = Room(0, 1)  # until there is a model
        self._short_texts = Turns(_NUM_SHORT_TEXTS)
        self._long_texts = Turns(1)
        self._engine_turns = Turns(None)
        self._is_by_priority = False

    # --- for the thread that started the server -----------------------------------------------------------------------

    def open(self, llm: AsyncLLM) -> None:
        """Begin to serve this model."""
        scheduler = llm.plan.scheduler
        if self._num_tenants > 1:  # otherwise the engine's own queue does it all
            self._engine_turns = Turns(scheduler.max_num_seqs + _AHEAD)
        self._is_by_priority = scheduler.policy is QueuePolicy.PRIORITY
        self._places = Room(llm.plan.config.max_num_seqs + self._max_queue, self._num_tenants)
        self.loaded = llm
        self.state = State.SERVING

    def start_draining(self) -> None:
        """Take no more requests; those that are here go on."""
        self.state = State.DRAINING

    def note_end(self, error: EngineDeadError) -> None:
        if self.state is State.SERVING:
            self.end, self.state = error, State.STOPPED
        self.has_changed.set()

    # --- for the event loop -------------------------------------------------------------------------------------------

    @property
    def llm(self) -> AsyncLLM:
        """The model. Raises ``ApiError`` 503 unless it is being served."""
        if self.loaded is None or self.state is not State.SERVING:
            why = "has stopped, because its engine has" if self.state is State.STOPPED else f"is {self.state.value}"
            message = f"the server {why}: try again later"
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code=self.state.value, retry_after_s=2)
        return self.loaded

    @property
    def num_answers(self) -> int:
        """Answers that clients wait for."""
        return self._places.num_taken

    async def outputs(self, job: Job) -> Outputs:
        """Have a request served: its outputs as they come, each with the number of its answer.

        Raises:
            ApiError: there is no room, or the server is not serving.
            CargoholdError: its prompt cannot be made, or the engine refuses it, or has ended.
        """
        llm, tenant = self.llm, job.client.tenant
        with self._admitted(job.client, job.num_answers):
            prompts = await self._tokenized(job.client, job.num_bytes, job.make_prompts)
            urgency = prompts.options.get("priority", 0) if self._is_by_priority else 0
            record = self.records.begin(job.request_id, job.endpoint, job.client, job.num_answers)
            state = "gone"
            try:
                async with self._engine_turns.of(tenant, job.num_answers, urgency):
                    outputs = llm.stream_each(
                        prompts.token_ids, prompts.sampling, wants_pieces=job.is_streamed, **prompts.options
                    )
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

    async def tokenized(self, client: Client, num_bytes: int, work: Callable[[], T]) -> T:
        """Do work on a text of a client that wants no answer of the model. It takes a place, too.

        Raises:
            ApiError: there is no room, or the server is not serving.
        """
        with self._admitted(client, 1):
            return await self._tokenized(client, num_bytes, work)

    async def _tokenized(self, client: Client, num_bytes: int, work: Callable[[], T]) -> T:
        """Do work on a text in a thread, when it is its turn. If this is cancelled, the work goes on until it ends."""
        turns = self._long_texts if num_bytes > _LONG_TEXT_BYTES else self._short_texts
        turn = await turns.enter(client.tenant)
        task = asyncio.ensure_future(asyncio.to_thread(work))

        def leave(task: asyncio.Future[T]) -> None:
            turns.leave(turn)
            if not task.cancelled():
                task.exception()  # is raised below, unless no caller waits for it any longer

        task.add_done_callback(leave)
        return await asyncio.shield(task)

    @contextmanager
    def _admitted(self, client: Client, num_answers: int) -> Iterator[None]:
        """Take places for answers. Never waits: if all are taken and the client has its share of them, it gets an error."""
        places = self._places
        if num_answers > places.limit:
            raise invalid(f"{num_answers} answers at once are more than the {places.limit} that this server takes", "n")
        if not places.take(client.tenant, num_answers):
            self.num_refused += 1
            message = (
                f"the queue is full: {places.num_taken} of {places.limit} places are taken (--max-queue); try again"
            )
            raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code="queue_full", retry_after_s=1)
        try:
            yield
        finally:
            places.give_back(client.tenant, num_answers)
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
            with suppress(asyncio.CancelledError, Exception):  # what it raised was raised above, or is ignored
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
        with suppress(TypeError, ValueError):  # a line that cannot be written is none
            self._lines.append({"time": record.created, "level": record.levelname, "text": record.getMessage()})

    def lines(self) -> list[dict[str, Any]]:
        """The lines, the latest first."""
        return list(reversed(self._lines))


class EngineWatch:
    """The engine's counters as they were a second ago, and what has happened since the start.

    Args:
        admission: has the model.
        registry: what Prometheus reads.

    Attributes:
        stats: what connectors have counted; empty before there is any.
        now: what Prometheus reads.
        history: what has happened.
        contents: what is kept below the device, tier by tier; empty before the first question.
        log: the last warnings.
    """

    def __init__(self, admission: RequestAdmission, registry: CollectorRegistry) -> None:
        self.stats: Stats = {}
        self.now = Scrape(0.0)
        self.history = History(self.now)
        self.contents: Sequence[TierContents] = ()
        self.log = LogLines()
        self._admission = admission
        self._registry = registry

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
        llm = self._admission.loaded
        if llm is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                self.stats = await llm.stats()
                if inside:
                    self.contents = await llm.contents()
            self.now = Scrape.of_families(time.monotonic(), self._registry.collect())
            self.history.add(self.now)
        except EngineDeadError as error:
            self._admission.note_end(error)
        except (TimeoutError, CargoholdError):
            pass  # of a connector that cannot count: its requests report what is wrong with it


# --- what all requests are served with --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerContext:
    """What requests are served with.

    Attributes:
        admission: admits them.
        config: the server's options.
        watch: looks at the engine.
        registry: what Prometheus reads.
        started: when, in seconds since 1970.
    """

    admission: RequestAdmission
    config: ServeConfig
    watch: EngineWatch
    registry: CollectorRegistry
    started: float = field(default_factory=time.time)

    def names(self) -> list[str]:
        """The names that clients may ask for the model by; the first is for people. Raises ``ApiError`` before it is loaded."""
        llm = self.admission.loaded or self.admission.llm
        return list(self.config.served_names) or [_short(llm.plan.info.name)]

    def check_model(self, name: str) -> str:
        """Return the name. Raises ``ApiError`` 404 if the model is not served under it."""
        if name not in self.names():
            message = f"there is no model {name!r:.200} here, but {self.names()[0]!r}"
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")
        return name


def context_of(request: Request) -> ServerContext:
    return cast("ServerContext", request.app.state.context)


def client_of(request: Request) -> Client:
    """The client that sent the request, as the gate has found out."""
    return cast("Client", request.state.client)


def size_of(request: Request) -> int:
    """Bytes of the body of the request, which has been read."""
    return int(request.state.body.num_bytes)


def trace_of(request: Request) -> dict[str, str] | None:
    """The trace that the request belongs to, as its headers say it; ``None`` if it belongs to none."""
    return {name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers} or None


def _short(model: str) -> str:
    """The name of a directory or a file without what is before it; any other name as it is."""
    return Path(model).name if Path(model).exists() else model
