"""An executor with one process per rank, on this machine; there is a deadline on everything that it says and hears."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import weakref
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Final

from cargohold.engine.core.request import SchedulerStep, StepOutput
from cargohold.engine.executor import RankPlace
from cargohold.engine.ranks.rank import (
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    FramedRank,
    RanksExecutor,
    RankSpec,
    describe_silence,
    open_frame,
)
from cargohold.engine.ranks.step_codec import StepCodec
from cargohold.errors import ConfigError, EngineDeadError
from cargohold.protocol import OutputAggregator

logger = logging.getLogger(__name__)

STOP = b""
"""The frame that ends a rank."""
BLAME_WAIT_S = 0.2
KILL_WAIT_S = 30.0
"""Longest time to wait for killed processes. Giving back a lot of pinned memory takes a while; I/O that the kernel cannot break
off takes for ever."""
EXIT_WAIT_S = 5.0
"""Longest time to wait for each process when the program ends."""
_LENGTH = struct.Struct("!Q")

_ends: Final[weakref.WeakSet[Channel]] = weakref.WeakSet()
"""The ends that this process uses, or hands over to another one."""


def _let_go_as_child() -> None:
    """Close all ends in a forked child, which inherits them: otherwise it would not be noticed that its parent is gone."""
    for end in list(_ends):
        end.close()
    _ends.clear()


os.register_at_fork(after_in_child=_let_go_as_child)


class ChannelClosedError(ConnectionError):
    """The other end is gone."""


class Channel:
    """One end of a stream socket that carries frames. A child that is forked from its process cannot use it.

    Args:
        sock: a connected stream socket; owned by the channel from now on.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        _ends.add(self)

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected ends, private to this process and those it hands one to."""
        left, right = socket.socketpair()
        return cls(left), cls(right)

    def __reduce__(self) -> tuple[type[Channel], tuple[socket.socket]]:
        return Channel, (self._socket,)  # multiprocessing hands sockets over to the processes it starts

    def fileno(self) -> int:
        """The socket's descriptor, for ``multiprocessing.connection.wait``."""
        return self._socket.fileno()

    def send(self, frame: bytes, timeout_s: float | None = None) -> None:
        """Send a frame. Raises ``TimeoutError`` if the other end does not take it in time, ``ChannelClosedError`` if gone."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(_LENGTH.pack(len(frame)))
            self._socket.sendall(frame)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosedError("the other end has closed") from error

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Wait for a frame. Raises like ``send``."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        return self._read(length, deadline)

    def close(self) -> None:
        self._socket.close()

    def _read(self, length: int, deadline: float | None) -> bytes:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            # A socket's timeout begins again with every piece.
            self._socket.settimeout(None if deadline is None else _time_until(deadline))
            try:
                count = self._socket.recv_into(view)
            except ConnectionResetError as error:
                raise ChannelClosedError("the other end has closed") from error
            if count == 0:
                raise ChannelClosedError("the other end has closed")
            view = view[count:]
        return bytes(data)


def _time_until(deadline: float) -> float:
    """Seconds until a time on the monotonic clock. Raises ``TimeoutError`` if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def run_rank(spec: RankSpec, place: RankPlace, channel: Channel) -> None:
    """Serve steps until asked to stop, or until the engine's process is gone."""
    # Ctrl-C reaches every process of the terminal; the engine decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.stderr is not None:
        os.dup2(2, 1)  # standard output belongs to the engine's process, but torch 2.8 announces its peers there
    rank = FramedRank()
    try:
        channel.send(rank.start(spec, place))
        while (step := channel.receive()) != STOP:
            channel.send(rank.execute(step))
    except ChannelClosedError:
        pass  # the engine's process has ended
    finally:
        rank.shutdown()


class RankProcess(SpawnProcess):
    """A rank's process. Nothing waits forever for its end, not even ``multiprocessing`` when the program ends.

    SIGKILL does not end a process while one of its threads is in I/O that cannot be broken off, as on a frozen file system or
    a network mount whose server is gone.
    """

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended: at most ``timeout`` seconds, or ``EXIT_WAIT_S``."""
        super().join(EXIT_WAIT_S if timeout is None else timeout)


class MultiprocessExecutor(RanksExecutor):
    """One process per rank.

    A rank that dies, raises, or does not answer in time ends the engine: the others are killed, for they would wait for it in
    a collective for ever. A child that is forked from the engine's process has no ranks: ``execute`` raises there, and
    ``shutdown`` does nothing.

    Args:
        spec: what each rank is made of.
        world_size: ranks.
        codec, aggregator, step_timeout_s: see ``RanksExecutor``.

    Raises:
        ConfigError: the spec cannot travel to another process.
        CargoholdError: a rank could not start; none is left running.
    """

    def __init__(
        self,
        spec: RankSpec,
        world_size: int,
        codec: StepCodec,
        aggregator: OutputAggregator,
        step_timeout_s: float = 300.0,
    ) -> None:
        _check_can_travel(spec)
        super().__init__(codec, aggregator, step_timeout_s)
        self._owner = os.getpid()
        self._processes: list[RankProcess] = []
        self._channels: list[Channel] = []
        scratch = Path(tempfile.mkdtemp(prefix="cargohold-"))  # readable by its owner alone
        try:
            self._start(spec, world_size, f"file://{scratch / 'rendezvous'}")
        except BaseException:
            self._kill()
            raise
        finally:
            # All ranks have met, or the start has failed: nothing in the directory is needed any more.
            shutil.rmtree(scratch, ignore_errors=True)

    @property
    def process_ids(self) -> list[int]:
        """The ranks' processes, in rank order; empty once they have been stopped."""
        return [process.pid for process in self._processes if process.pid is not None]

    def execute(self, step: SchedulerStep) -> StepOutput:
        """Run one step on every rank."""
        if os.getpid() != self._owner:
            raise EngineDeadError("its workers belong to the process from which this one was forked")
        return super().execute(step)

    def shutdown(self) -> None:
        """Let transfers end, then the processes; those that do not end in time are killed."""
        if os.getpid() != self._owner:
            return
        for channel in self._channels:
            try:
                channel.send(STOP, STOP_TIMEOUT_S)
            except (ChannelClosedError, TimeoutError):
                logger.warning("a worker did not take the message to stop")
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self, spec: RankSpec, world_size: int, rendezvous: str) -> None:
        for rank in range(world_size):
            ours, theirs = Channel.pair()
            self._channels.append(ours)
            process = RankProcess(
                target=run_rank,
                args=(spec, RankPlace(rank, world_size, rendezvous), theirs),
                name=f"cargohold-worker-{rank}",
                daemon=True,
            )
            process.start()
            self._processes.append(process)
            theirs.close()
        self._gather(START_TIMEOUT_S)

    def _answers(self, frame: bytes) -> list[bytes]:
        try:
            for rank, channel in enumerate(self._channels):
                self._send(rank, channel, frame)
            return self._gather(self._step_timeout_s)
        except EngineDeadError as error:
            raise self._blame(error) from error

    def _send(self, rank: int, channel: Channel, frame: bytes) -> None:
        try:
            channel.send(frame, self._step_timeout_s)
        except TimeoutError as error:
            raise EngineDeadError(f"worker {rank} does not take a step: it hangs") from error
        except ChannelClosedError as error:
            raise EngineDeadError(self._epitaph(rank)) from error

    def _gather(self, timeout_s: float) -> list[bytes]:
        """The content of each rank's frame, in rank order. Raises ``EngineDeadError`` if a rank fails or does not answer."""
        deadline = time.monotonic() + timeout_s
        frames: dict[int, bytes] = {}
        while len(frames) < len(self._channels):
            waiting = {self._channels[rank].fileno(): rank for rank in range(len(self._channels)) if rank not in frames}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise EngineDeadError(describe_silence(list(waiting.values()), timeout_s))
            for rank in (rank for descriptor, rank in waiting.items() if descriptor in ready):
                frames[rank] = self._receive(rank, max(1.0, deadline - time.monotonic()))
        return [frames[rank] for rank in range(len(self._channels))]

    def _receive(self, rank: int, timeout_s: float) -> bytes:
        try:
            frame = self._channels[rank].receive(timeout_s)
        except TimeoutError as error:
            raise EngineDeadError(f"worker {rank} stopped in the middle of its answer") from error
        except ChannelClosedError as error:
            raise EngineDeadError(self._epitaph(rank)) from error
        return open_frame(rank, frame)

    def _blame(self, error: EngineDeadError) -> EngineDeadError:
        """The error to report: if a rank has died, that is the cause, as the others then fail in their collectives."""
        for rank, process in enumerate(self._processes):
            process.join(BLAME_WAIT_S)
            if process.exitcode is not None and process.exitcode != 0:
                return EngineDeadError(self._epitaph(rank))
        return error

    def _epitaph(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(STOP_TIMEOUT_S)
        code = process.exitcode
        if code is not None and code < 0:
            return f"worker {rank} died: killed by {signal.Signals(-code).name}"
        return f"worker {rank} died with exit status {code}"

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        deadline = time.monotonic() + KILL_WAIT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        left = [process.pid for process in self._processes if process.exitcode is None]
        if left:
            logger.error(
                "workers were killed and do not end: process ids %s. They wait for a medium that does not answer, and keep "
                "what they have locked until it does",
                ", ".join(map(str, left)),
            )
        for channel in self._channels:
            channel.close()
        self._processes.clear()
        self._channels.clear()


def _check_can_travel(spec: RankSpec) -> None:
    if multiprocessing.parent_process() is not None and multiprocessing.current_process().name.startswith("cargohold-"):
        raise ConfigError(
            "executor",
            "multiprocess",
            'a worker must not start an engine: put the program\'s main part under if __name__ == "__main__":',
        )
    try:
        pickle.dumps(spec)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            "offload", spec.connectors, f"it cannot be sent to workers in other processes: {error}"
        ) from error
