"""The engine's own thread: the only one that uses the engine, and torch. It steps while there is work, and sleeps otherwise.

Callers post commands and wait for what comes back. Posting waits for no lock, so a signal handler, the garbage collector
and an event loop may post at any moment, also in the middle of another call of theirs::

    caller                       engine's thread
    ------                       ---------------
    submit(requests, mailbox) -> adds the requests     \\
    mailbox.take()            <- puts outputs           |  between two steps
    ask(question)             -> asks the engine        |
    the answer's result       <-                       /
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from cargohold.engine.core.request import SamplingParams
from cargohold.engine.llm_engine import LLMEngine
from cargohold.engine.model.tokenizer import Tokenizer
from cargohold.engine.outputs import EngineStatus, RequestOutput
from cargohold.errors import EngineDeadError, RequestError, one_line
from cargohold.process import interrupt_thread
from cargohold.protocol import Clock

T = TypeVar("T")

_BUSY_PAUSE_S: Final = 0.0005
"""Pause after a step in which nothing happened. Requests wait for a transfer, so the next step must notice its end soon."""
_QUIET_PAUSE_S: Final = 0.01
"""Longest pause while no request waits for the transfers in flight: the program needs the processor more."""
_INTERRUPTED_START_S: Final = 5.0
"""Longest time to wait for a start to end that was interrupted."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as a caller asks for it.

    Attributes:
        prompt, sampling, options: see ``LLMEngine.add_request``.
    """

    prompt: str | Sequence[int]
    sampling: SamplingParams | None
    options: Mapping[str, Any]


class Mailbox:
    """Outputs of one call's requests until the call takes them. The engine's thread puts them in, one other takes them.

    Keeps at most one output per request, however slowly it is read. Each output has all of a request's text and tokens so far,
    so those of a long answer that is not read would together take memory with the square of its length.

    Args:
        num_requests: requests of the call.
        notify: called in the engine's thread after a step that put something in. Must not wait, or raise.
        wants_pieces: whether the reader is to hear of every output, or of the first and the last of each request.
    """

    def __init__(self, num_requests: int, notify: Callable[[], object], *, wants_pieces: bool = True) -> None:
        self._unread: dict[int, RequestOutput] = {}
        self._silent: set[int] | None = None if wants_pieces else set()
        self._num_unfinished = num_requests
        self._error: BaseException | None = None
        self.notify = notify

    @property
    def is_done(self) -> bool:
        """Whether the last output of every request was taken."""
        return self._num_unfinished == 0

    def put(self, at: int, output: RequestOutput) -> bool:
        """Add an output of the request at that position, in place of its last one if that was not taken.

        Returns:
            Whether the reader is to be notified.
        """
        # Not looked at and replaced: the reader may take it in between, and would then get its text twice.
        before = self._unread.pop(at, None)
        if before is not None:
            output = replace(output, new_text=before.new_text + output.new_text)
        self._unread[at] = output
        if self._silent is None or output.finished or at not in self._silent:
            if self._silent is not None:
                self._silent.add(at)
            return True
        return False

    def fail(self, error: BaseException) -> None:
        """End the call: the caller that takes outputs gets this error when the others are taken."""
        self._error = error
        self.notify()

    def take(self) -> Iterator[tuple[int, RequestOutput]]:
        """Take out the outputs that are there, each with the position of its request. Raises the error that ended the call."""
        while self._unread:
            try:
                at, output = self._unread.popitem()
            except KeyError:  # it is being replaced; a notification follows
                return
            self._num_unfinished -= output.finished
            yield at, output
        if self._error is not None and not self.is_done:
            raise self._error


@dataclass(frozen=True, slots=True)
class _Question:
    """Something to ask the engine, and its answer. ``deadline`` is for questions that wait for transfers."""

    ask: Callable[[LLMEngine], Any]
    answer: Future[Any]
    deadline: float


class EngineThread:
    """Makes an engine and runs it, in a thread of its own. Waits until the engine is made.

    The thread also loads the model: OpenMP starts a team of threads for every thread that computes, and two teams slow each
    other down even when one of them is idle. It ends with the engine, by ``close`` or because a step has failed. From then on,
    and in a process that is forked from this one, every method but ``close`` raises ``EngineDeadError``.

    Args:
        build: makes the engine.
        shutdown_timeout_s: the longest that ``close`` goes on making steps for transfers in flight.
        clock: monotonic time in seconds.

    Raises:
        CargoholdError: what ``build`` has raised.
    """

    def __init__(
        self, build: Callable[[], LLMEngine], *, shutdown_timeout_s: float, clock: Clock = time.monotonic
    ) -> None:
        self._process = os.getpid()
        self._shutdown_timeout_s = shutdown_timeout_s
        self._clock = clock
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._engine: LLMEngine
        self._receivers: dict[str, tuple[Mailbox, int]] = {}
        self._settling: list[_Question] = []
        # An interrupt during the start must know whether it has begun.
        self._beginning = threading.Lock()
        self._has_begun = self._is_closing = self._is_hurried = False
        self._end: EngineDeadError | None = None
        self._close_error: BaseException | None = None
        self.status = EngineStatus()
        started = Future[None]()
        self._thread = threading.Thread(target=self._run, args=(build, started), name="cargohold-engine", daemon=True)
        try:
            self._thread.start()
            started.result()
        except Exception:
            raise
        except BaseException:  # Ctrl-C, which only the main thread gets
            with self._beginning:
                self._is_closing = True
            self.start_closing()  # if it waits for commands already
            if self._has_begun:  # otherwise it ends when it begins
                interrupt_thread(self._thread)
                self._thread.join(_INTERRUPTED_START_S)
            raise

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, which any thread may use; ``None`` if it has none."""
        return self._engine.tokenizer

    # --- for callers --------------------------------------------------------------------------------------------------

    def submit(self, asked: Sequence[Asked], mailbox: Mailbox) -> None:
        """Ask for tokens. All requests join at the same time, or none does if one is refused; ``mailbox`` gets the error."""
        self._post(lambda: self._add(asked, mailbox))

    def abandon(self, mailbox: Mailbox) -> None:
        """Abort what is left of a call's requests, whose results are no longer wanted. May be called at any moment."""
        self._commands.put(lambda: self._drop(mailbox))

    def abort(self, request_id: str) -> None:
        """End a request early, if it is being served. Does not wait."""
        self._commands.put(lambda: self._abort(request_id))

    def ask(self, question: Callable[[LLMEngine], T], settled_within_s: float | None = None) -> Future[T]:
        """Ask the engine something between two steps, unless the answer is cancelled before.

        With ``settled_within_s``, when no transfer is in flight any more, or requests are being served, or after so many
        seconds.
        """
        asked = _Question(question, Future[T](), self._clock() + (settled_within_s or 0.0))
        self._post(lambda: self._answer(asked) if settled_within_s is None else self._settling.append(asked))
        return asked.answer

    def start_closing(self) -> None:
        """End the engine, without waiting. Calls that wait for it get an ``EngineDeadError``."""
        self._commands.put(self._close)

    def close(self) -> None:
        """End the engine, and wait until it has ended. Does nothing in a process that was forked.

        If the wait is interrupted, the engine makes no more steps; what it has started ends in the background.

        Raises:
            CargoholdError: the engine could not be stopped properly.
        """
        if os.getpid() != self._process or threading.current_thread() is self._thread:
            return
        self.start_closing()
        try:
            self._thread.join()
        except BaseException:
            self._is_hurried = True
            raise
        error, self._close_error = self._close_error, None
        if error is not None:
            raise error

    def check_process(self) -> None:
        """Raise ``EngineDeadError`` in a process that was forked: it has no such thread, and would wait for ever."""
        if os.getpid() != self._process:
            raise EngineDeadError(f"this LLM belongs to process {self._process}; make one in each process")

    def _post(self, command: Callable[[], None]) -> None:
        self.check_process()
        if threading.current_thread() is self._thread:  # a connector, or a prompt of the caller's own class
            raise RequestError("the engine cannot wait for itself: call it from another thread")
        self._commands.put(command)
        # Looked at afterwards: the thread says that it ends before it looks at its commands for the last time.
        if self._end is not None:
            raise self._death()

    def _death(self) -> EngineDeadError:
        """A new error for each caller, as each adds its own traceback."""
        end = self._end
        assert end is not None
        error = EngineDeadError(*end.args)
        error.__cause__ = end.__cause__
        return error

    # --- in the engine's thread ---------------------------------------------------------------------------------------

    def _run(self, build: Callable[[], LLMEngine], started: Future[None]) -> None:
        with suppress(KeyboardInterrupt):  # a start that was interrupted may have ended before the interrupt came
            self._live(build, started)

    def _live(self, build: Callable[[], LLMEngine], started: Future[None]) -> None:
        try:
            self._begin()
            self._engine = build()
        except BaseException as error:  # noqa: BLE001  # goes to the caller that waits for the start
            self._end = EngineDeadError("the engine has not started")
            started.set_exception(error)
            return
        started.set_result(None)
        end = EngineDeadError("the engine has stopped: it was shut down")
        try:
            self._serve()
        except EngineDeadError as error:
            end = error
        except BaseException as error:  # noqa: BLE001  # goes to every caller that waits for the engine
            end = EngineDeadError(f"the engine has stopped: {one_line(error)}")
            end.__cause__ = error
        self._end = end
        self._fail_waiting()
        try:
            self._stop()
        except BaseException as error:  # noqa: BLE001  # goes to the caller of close
            self._close_error = error

    def _begin(self) -> None:
        with self._beginning:
            if self._is_closing:
                raise EngineDeadError("its start was interrupted")
            self._has_begun = True

    def _serve(self) -> None:
        pause_s: float | None = None
        while not self._is_closing:
            self._obey(pause_s)
            outputs = self._engine.step() if self._engine.has_work() else []
            self.status = self._engine.status()
            self._deliver(outputs)
            self._answer_settled()
            pause_s = self._pause_after_step(pause_s)

    def _pause_after_step(self, before: float | None) -> float | None:
        """How long to wait for a command before the next step; ``None`` if only a command can bring work."""
        if not self._engine.has_work():
            # Work may end with time, so also since waiting callers were last checked: then they are checked again.
            return 0.0 if self._settling else None
        if self._engine.made_progress:
            return 0.0
        longest = _BUSY_PAUSE_S if self._engine.num_unfinished else _QUIET_PAUSE_S
        return min(longest, max(_BUSY_PAUSE_S, 2 * (before or 0.0)))

    def _obey(self, pause_s: float | None) -> None:
        """Carry out what was posted; if there is nothing, wait for it, for ``pause_s`` at most."""
        try:
            command = self._commands.get(block=pause_s != 0.0, timeout=pause_s or None)
        except queue.Empty:
            return
        command()
        for _ in range(self._commands.qsize()):  # what is posted meanwhile does not keep the next step waiting
            self._commands.get()()

    def _add(self, asked: Sequence[Asked], mailbox: Mailbox) -> None:
        if self._end is not None:
            mailbox.fail(self._death())
            return
        try:
            for at, one in enumerate(asked):
                with _numbered(at, len(asked)):
                    request_id = self._engine.add_request(one.prompt, one.sampling, **one.options)
                    self._receivers[request_id] = (mailbox, at)
        except Exception as error:  # noqa: BLE001  # also what the caller's own objects raise when they are read
            self._drop(mailbox)
            mailbox.fail(error)

    def _drop(self, mailbox: Mailbox) -> None:
        for request_id in [request_id for request_id, (whose, _) in self._receivers.items() if whose is mailbox]:
            del self._receivers[request_id]
            self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        self._engine.abort(request_id)
        # Not with the next step, for another request may have the id by then.
        self._deliver(self._engine.take_outputs())

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        heard: dict[int, Mailbox] = {}
        for output in outputs:
            if output.request_id in self._receivers:
                mailbox, at = self._receivers[output.request_id]
                if output.finished:
                    del self._receivers[output.request_id]
                if mailbox.put(at, output):
                    heard[id(mailbox)] = mailbox
        # Readers wake up when all outputs are there: each costs this thread a turn of the interpreter.
        for mailbox in heard.values():
            mailbox.notify()

    def _answer(self, question: _Question) -> None:
        if not question.answer.set_running_or_notify_cancel():
            return
        if self._end is not None:
            question.answer.set_exception(self._death())
            return
        try:
            question.answer.set_result(question.ask(self._engine))
        except Exception as error:  # noqa: BLE001  # goes to the caller
            question.answer.set_exception(error)

    def _answer_settled(self) -> None:
        if not self._settling:
            return
        is_time = self._engine.num_unfinished > 0 or not self._engine.has_work()
        questions, self._settling = self._settling, []
        for question in questions:
            if is_time or self._clock() > question.deadline:
                self._answer(question)
            else:
                self._settling.append(question)

    def _close(self) -> None:
        self._is_closing = True

    def _fail_waiting(self) -> None:
        """Notify every waiting caller that the engine has ended. What is posted from now on raises at once."""
        mailboxes = {id(mailbox): mailbox for mailbox, _ in self._receivers.values()}
        self._receivers.clear()
        for mailbox in mailboxes.values():
            mailbox.fail(self._death())
        for _ in range(self._commands.qsize()):
            self._commands.get()()
        questions, self._settling = self._settling, []
        for question in questions:
            self._answer(question)

    def _stop(self) -> None:
        """Let transfers end, for ``shutdown_timeout_s`` at most, and stop the engine."""
        engine, deadline = self._engine, self._clock() + self._shutdown_timeout_s
        try:
            engine.abort_all()
            pause_s = 0.0
            while engine.has_work() and not self._is_hurried and self._clock() < deadline:
                engine.step()
                pause_s = self._pause_after_step(pause_s) or 0.0
                time.sleep(pause_s)
        finally:
            engine.shutdown()
            self.status = engine.status()


@contextmanager
def _numbered(at: int, num_prompts: int) -> Iterator[None]:
    """Add to a ``RequestError`` which of several prompts it is about."""
    try:
        yield
    except RequestError as error:
        if num_prompts == 1:
            raise
        raise RequestError(f"prompt {at + 1} of {num_prompts}: {error.reason}", error.request_id) from error
