"""Ranks in other processes: steps as bytes, framed, with a deadline on everything.

They are msgpack, decoded into declared types by msgspec, so that bytes can become data and nothing else. Connectors' messages
are carried inside, and decoded into the types that the connector's two sides declare. A message that cannot be carried is the
connector's error; the step itself is carried all the same.
"""

from __future__ import annotations

import os
import socket
import struct
import time
import traceback
import weakref
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from cargohold.engine.core.request import SampleSpec, ScheduledTokens, SchedulerStep, StepOutput
from cargohold.engine.executor import RankPlace, RunnerFactory, Worker
from cargohold.errors import (
    CargoholdError,
    ConfigError,
    EngineDeadError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
    one_line,
)
from cargohold.process import made_for_good
from cargohold.protocol import (
    Clock,
    EmptyMetadata,
    Exchange,
    KVCacheLayout,
    KVConnectorFactory,
    KVConnectorOutput,
    KVConnectorScheduler,
    TransferOutcome,
    UndeliveredMetadata,
    WorkerEnvironment,
    metrics,
)

_INT32 = "i"
_EMPTY = msgspec.msgpack.encode(EmptyMetadata())


class _WireShare(msgspec.Struct, array_like=True):
    """``ScheduledTokens`` with packed integers: a long context has thousands of them, in every step."""

    request_id: str
    token_ids: bytes
    num_computed_tokens: int
    write_from: int
    block_ids: list[bytes]
    sample: SampleSpec | None
    is_first: bool


class _WireStep(msgspec.Struct, array_like=True):
    """``SchedulerStep``. For ``EmptyMetadata``, as of a connector that is turned off, there is no connector metadata."""

    scheduled: list[_WireShare]
    preempted_req_ids: list[str]
    finished_req_ids: list[str]
    connector_metadata: bytes | None
    undelivered: str | None
    drop_connector: bool


class _WireOutput(msgspec.Struct, array_like=True):
    """``StepOutput``."""

    sampled: dict[str, int | None]
    finished_sending: list[str]
    finished_recving: list[str]
    failed_recving: list[str]
    jobs: dict[int, TransferOutcome]
    expected_finished_count: int
    step_failed: bool
    invalid_block_ids: list[int]
    worker_meta: bytes | None
    stats: list[metrics.Row]
    connector_error: str | None


class StepCodec:
    """Encodes steps for workers and decodes their outputs, or the other way round.

    Args:
        metadata_type: type of the messages to a worker's connector; needed to decode steps.
        worker_metadata_type: type of the messages that it sends back; needed to decode outputs.
    """

    def __init__(self, metadata_type: type = EmptyMetadata, worker_metadata_type: type = EmptyMetadata) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._step_decoder = msgspec.msgpack.Decoder(_WireStep)
        self._output_decoder = msgspec.msgpack.Decoder(_WireOutput)
        self._metadata_decoder: Any = msgspec.msgpack.Decoder(metadata_type)
        self._worker_metadata_decoder: Any = msgspec.msgpack.Decoder(worker_metadata_type)

    @classmethod
    def for_outputs_of(cls, connector: KVConnectorScheduler) -> StepCodec:
        """The codec for the scheduler's end, which decodes the outputs of this connector's workers."""
        return cls(worker_metadata_type=connector.worker_metadata_type)

    def encode_step(self, step: SchedulerStep) -> bytes:
        """A step as bytes."""
        metadata = step.connector_metadata
        raw, undelivered = (None, None) if isinstance(metadata, EmptyMetadata) else self._carry(metadata)
        return self._encoder.encode(
            _WireStep(
                scheduled=[self._wire_share(share) for share in step.scheduled],
                preempted_req_ids=list(step.preempted_req_ids),
                finished_req_ids=list(step.finished_req_ids),
                connector_metadata=raw,
                undelivered=undelivered,
                drop_connector=step.drop_connector,
            )
        )

    def decode_step(self, data: bytes) -> SchedulerStep:
        """A step from bytes. Raises ``msgspec.MsgspecError`` for bytes that are none."""
        wire = self._step_decoder.decode(data)
        metadata, problem = _read(self._metadata_decoder, wire.connector_metadata)
        if undelivered := wire.undelivered or problem:
            metadata = UndeliveredMetadata(undelivered)
        return SchedulerStep(
            scheduled=tuple(_share(share) for share in wire.scheduled),
            preempted_req_ids=frozenset(wire.preempted_req_ids),
            finished_req_ids=frozenset(wire.finished_req_ids),
            connector_metadata=EmptyMetadata() if metadata is None else metadata,
            drop_connector=wire.drop_connector,
        )

    def encode_output(self, output: StepOutput) -> bytes:
        """An output as bytes."""
        try:
            return self._encode_output(output)
        except Exception as error:  # noqa: BLE001  # a third party's numbers and names: whatever making bytes of them raises
            # The report said which loads failed. Without it, nothing of the step can be trusted.
            failed = KVConnectorOutput(step_failed=True)
            reason = f"its report cannot be carried to another process: {one_line(error)}"
            return self._encode_output(StepOutput(output.sampled, failed, output.connector_error or reason))

    def _encode_output(self, output: StepOutput) -> bytes:
        report = output.connector
        raw, undelivered = (
            (None, None) if report.kv_connector_worker_meta is None else self._carry(report.kv_connector_worker_meta)
        )
        return self._encoder.encode(
            _WireOutput(
                sampled=dict(output.sampled),
                finished_sending=list(report.finished_sending),
                finished_recving=list(report.finished_recving),
                failed_recving=list(report.failed_recving),
                jobs=dict(report.jobs),
                expected_finished_count=report.expected_finished_count,
                step_failed=report.step_failed,
                invalid_block_ids=list(report.invalid_block_ids),
                worker_meta=raw,
                stats=metrics.pack(report.kv_connector_stats),
                connector_error=output.connector_error or undelivered,
            )
        )

    def decode_output(self, data: bytes) -> StepOutput:
        """An output from bytes. Raises ``msgspec.MsgspecError`` for bytes that are none."""
        wire = self._output_decoder.decode(data)
        worker_meta, problem = _read(self._worker_metadata_decoder, wire.worker_meta)
        report = KVConnectorOutput(
            finished_sending=frozenset(wire.finished_sending),
            finished_recving=frozenset(wire.finished_recving),
            failed_recving=frozenset(wire.failed_recving),
            jobs=wire.jobs,
            expected_finished_count=wire.expected_finished_count,
            step_failed=wire.step_failed,
            invalid_block_ids=frozenset(wire.invalid_block_ids),
            kv_connector_worker_meta=worker_meta,
            kv_connector_stats=metrics.unpack(wire.stats),
        )
        sampled: Mapping[str, int | None] = wire.sampled
        return StepOutput(sampled=sampled, connector=report, connector_error=wire.connector_error or problem)

    def _carry(self, message: object) -> tuple[bytes | None, str | None]:
        """A connector's message as bytes, or the reason why it cannot be carried."""
        try:
            return self._encoder.encode(message), None
        except Exception as error:  # noqa: BLE001  # a third party's types: whatever making bytes of them raises
            return None, f"its {type(message).__name__} cannot be carried to another process: {one_line(error)}"

    @staticmethod
    def _wire_share(share: ScheduledTokens) -> _WireShare:
        return _WireShare(
            request_id=share.request_id,
            token_ids=array(_INT32, share.token_ids).tobytes(),
            num_computed_tokens=share.num_computed_tokens,
            write_from=share.write_from,
            block_ids=[array(_INT32, table).tobytes() for table in share.block_ids],
            sample=share.sample,
            is_first=share.is_first,
        )


def _share(wire: _WireShare) -> ScheduledTokens:
    return ScheduledTokens(
        request_id=wire.request_id,
        token_ids=tuple(_unpack(wire.token_ids)),
        num_computed_tokens=wire.num_computed_tokens,
        write_from=wire.write_from,
        block_ids=tuple(_unpack(table) for table in wire.block_ids),
        sample=wire.sample,
        is_first=wire.is_first,
    )


def _read(decoder: Any, raw: bytes | None) -> tuple[Any, str | None]:
    """A connector's message from bytes, or the reason why they are not of its declared type."""
    if raw is None:
        return None, None
    if decoder.type is EmptyMetadata and raw != _EMPTY:
        return None, "it sends messages of a type that the side which gets them does not declare"
    try:
        return decoder.decode(raw), None
    except Exception as error:  # noqa: BLE001  # a third party's types: whatever making them of bytes raises
        return None, f"its message is no {decoder.type.__name__}, as it declares: {one_line(error)}"


def _unpack(data: bytes) -> array[int]:
    numbers = array(_INT32)
    numbers.frombytes(data)
    return numbers


# --- one rank of several ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankSpec:
    """All that a rank needs to start.

    Attributes:
        runners: makes the model runner.
        connectors: makes the worker side of the connector.
        layout: the paged KV cache.
    """

    runners: RunnerFactory
    connectors: KVConnectorFactory
    layout: KVCacheLayout


class RankWorker:
    """A worker that takes steps and gives outputs as bytes.

    Args:
        spec: makes the worker's parts.
        place: which rank this is.
        clock: monotonic time in seconds.
    """

    def __init__(self, spec: RankSpec, place: RankPlace, clock: Clock) -> None:
        runner = spec.runners.make_runner(place)
        environment = WorkerEnvironment(spec.layout, place.rank, clock, _exchange(spec.layout))
        connector = spec.connectors.make_worker_side(environment)
        self._codec = StepCodec(metadata_type=connector.metadata_type)
        self._worker = Worker(runner, connector)

    def execute(self, step: bytes) -> bytes:
        """Run one step."""
        return self._codec.encode_output(self._worker.execute(self._codec.decode_step(step)))

    def shutdown(self) -> None:
        """Let transfers end."""
        self._worker.shutdown()


def _exchange(layout: KVCacheLayout) -> Exchange | None:
    if layout.num_replicas == 1:
        return None
    from cargohold.engine.model.weights import exchange_with_ranks  # noqa: PLC0415  # imports torch

    assert layout.num_shards == 1, "all ranks of the group hold the same"
    return exchange_with_ranks


# --- a rank's side of the conversation with its executor --------------------------------------------------------------

_READY, _OUTPUT, _ERROR, _REFUSED = b"R", b"O", b"E", b"X"
"""First byte of a frame: the rank has started; a step's output; the rank cannot go on; the rank refuses to start."""

_REFUSALS = {error.__name__: error for error in (ConfigError, ModelError, ModelNotFoundError, UnsupportedModelError)}


class FramedRank:
    """A rank that answers every call with a frame and never raises: its executor may be in another process or machine."""

    def __init__(self) -> None:
        self._worker: RankWorker | None = None

    def start(self, spec: RankSpec, place: RankPlace) -> bytes:
        """Load the rank's shard of the model, in a process that is the rank's alone."""
        try:
            with made_for_good():
                self._worker = RankWorker(spec, place, time.monotonic)
        except (ConfigError, ModelError) as error:
            return _encode_refusal(error)
        except Exception:  # noqa: BLE001  # whatever it is, the engine must learn of it
            return _ERROR + traceback.format_exc().encode()
        return _READY

    def execute(self, step: bytes) -> bytes:
        """Run one step."""
        assert self._worker is not None, "start comes first"
        try:
            return _OUTPUT + self._worker.execute(step)
        except Exception:  # noqa: BLE001  # whatever it is, the engine must learn of it
            return _ERROR + traceback.format_exc().encode()

    def shutdown(self) -> None:
        """Let transfers end."""
        if self._worker is not None:
            self._worker.shutdown()


def open_frame(rank: int, frame: bytes) -> bytes:
    """The content of a frame from a rank.

    Raises:
        ConfigError, ModelError: the rank refused to start.
        EngineDeadError: the rank cannot go on.
    """
    kind, content = frame[:1], frame[1:]
    if kind in (_READY, _OUTPUT):
        return content
    if kind == _REFUSED:
        raise _decode_refusal(content)
    raise EngineDeadError(f"worker {rank} cannot go on:\n{content.decode()}")


def _encode_refusal(error: ConfigError | ModelError) -> bytes:
    facts = (
        [error.key, str(error.value), error.expected] if isinstance(error, ConfigError) else [error.model, error.reason]
    )
    return _REFUSED + msgspec.msgpack.encode([type(error).__name__, facts])


def _decode_refusal(content: bytes) -> CargoholdError:
    kind, facts = msgspec.msgpack.decode(content, type=tuple[str, list[str]])
    return _REFUSALS[kind](*facts)


def describe_silence(ranks: Sequence[int], timeout_s: float) -> str:
    """A sentence about ranks that did not answer. One that hangs cannot be told from those that wait for it in a collective."""
    if len(ranks) == 1:
        return f"worker {ranks[0]} did not answer within {timeout_s:g} s: it hangs"
    names = ", ".join(map(str, ranks))
    return f"workers {names} did not answer within {timeout_s:g} s: one of them hangs, and others may be waiting for it"


# --- frames of bytes between two processes ----------------------------------------------------------------------------

_LENGTH = struct.Struct("!Q")

_ends: Final[weakref.WeakSet[Channel]] = weakref.WeakSet()
"""The ends that this process uses, or hands over to another one."""


def _let_go_as_child() -> None:
    """Close all ends in a forked child, which inherits them: else nobody would learn that its parent is gone."""
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
            raise ChannelClosedError("the other end is gone") from error

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Wait for a frame. Raises like ``send``."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        return self._read(length, deadline)

    def close(self) -> None:
        """Close this end."""
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
                raise ChannelClosedError("the other end is gone") from error
            if count == 0:
                raise ChannelClosedError("the other end is gone")
            view = view[count:]
        return bytes(data)


def _time_until(deadline: float) -> float:
    """Seconds until a time on the monotonic clock. Raises ``TimeoutError`` if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
