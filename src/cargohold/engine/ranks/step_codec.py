"""Steps and outputs as bytes, for ranks in other processes.

They are msgpack, decoded into declared types by msgspec, so that bytes can become data and nothing else. Connectors' messages
are carried inside, and decoded into the types that the connector's two sides declare. A message that cannot be carried is the
connector's error; the step itself is carried all the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from cargohold.engine.core.request import SampleSpec, ScheduledTokens, SchedulerStep, StepOutput
from cargohold.errors import one_line
from cargohold.protocol import (
    EmptyMetadata,
    KVConnectorOutput,
    KVConnectorScheduler,
    TransferOutcome,
    UndeliveredMetadata,
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
