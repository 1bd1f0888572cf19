"""Steps and outputs as bytes, for ranks in other processes.

They are msgpack, decoded into declared types by msgspec, so that bytes can become data and nothing else. Connectors' messages
are carried next to them, and decoded into the types that the connector's two sides declare. A message that cannot be carried is
the connector's error; the step itself is carried all the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from cargohold.engine.core.request import SchedulerStep, StepOutput
from cargohold.errors import one_line
from cargohold.protocol import (
    EmptyMetadata,
    KVConnectorOutput,
    KVConnectorScheduler,
    UndeliveredMetadata,
    metrics,
)

_NO_METADATA = EmptyMetadata()
_EMPTY = msgspec.msgpack.encode(_NO_METADATA)


class _WireStep(msgspec.Struct, array_like=True):
    """A step without its connector's metadata. For ``EmptyMetadata``, as of a connector that is turned off, there is none."""

    step: SchedulerStep
    metadata: bytes | None
    undelivered: str | None


class _WireOutput(msgspec.Struct, array_like=True):
    """An output without its connector's message and counters."""

    output: StepOutput
    worker_meta: bytes | None
    stats: list[metrics.Row]


class StepCodec:
    """Encodes steps for workers and decodes their outputs, or the other way round.

    Args:
        metadata_type: type of the messages to a worker's connector; needed to decode steps.
        worker_metadata_type: type of the messages that it sends back; needed to decode outputs.
    """

    def __init__(self, metadata_type: type = EmptyMetadata, worker_metadata_type: type = EmptyMetadata) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        # What the message of a step or an output is of cannot be declared there, and is read apart from it.
        self._step_decoder = msgspec.msgpack.Decoder(_WireStep, dec_hook=lambda *_: _NO_METADATA)
        self._output_decoder = msgspec.msgpack.Decoder(_WireOutput, dec_hook=lambda *_: None)
        self._metadata_decoder: Any = msgspec.msgpack.Decoder(metadata_type)
        self._worker_metadata_decoder: Any = msgspec.msgpack.Decoder(worker_metadata_type)

    @classmethod
    def for_outputs_of(cls, connector: KVConnectorScheduler) -> StepCodec:
        """The codec for the scheduler's end, which decodes the outputs of this connector's workers."""
        return cls(worker_metadata_type=connector.worker_metadata_type)

    def encode_step(self, step: SchedulerStep) -> bytes:
        metadata = step.connector_metadata
        raw, undelivered = (None, None) if isinstance(metadata, EmptyMetadata) else self._carry(metadata)
        bare = msgspec.structs.replace(step, connector_metadata=_NO_METADATA)
        return self._encoder.encode(_WireStep(bare, raw, undelivered))

    def decode_step(self, data: bytes) -> SchedulerStep:
        """A step from bytes. Raises ``msgspec.MsgspecError`` for bytes that are none."""
        wire = self._step_decoder.decode(data)
        metadata, problem = _read(self._metadata_decoder, wire.metadata)
        if undelivered := wire.undelivered or problem:
            metadata = UndeliveredMetadata(undelivered)
        return wire.step if metadata is None else msgspec.structs.replace(wire.step, connector_metadata=metadata)

    def encode_output(self, output: StepOutput) -> bytes:
        try:
            return self._encode_output(output)
        except Exception as error:  # noqa: BLE001  # a third party's numbers and names: whatever making bytes of them raises
            # The report said which loads failed. Without it, nothing of the step can be trusted.
            failed = KVConnectorOutput(step_failed=True)
            reason = f"its report cannot be carried to another process: {one_line(error)}"
            return self._encode_output(StepOutput(output.sampled, failed, output.connector_error or reason))

    def _encode_output(self, output: StepOutput) -> bytes:
        report, meta = output.connector, output.connector.kv_connector_worker_meta
        raw, undelivered = (None, None) if meta is None else self._carry(meta)
        bare = replace(report, kv_connector_worker_meta=None, kv_connector_stats={})
        error = output.connector_error or undelivered
        rows = metrics.pack(report.kv_connector_stats)
        return self._encoder.encode(_WireOutput(StepOutput(output.sampled, bare, error), raw, rows))

    def decode_output(self, data: bytes) -> StepOutput:
        """An output from bytes. Raises ``msgspec.MsgspecError`` for bytes that are none."""
        wire = self._output_decoder.decode(data)
        output = wire.output
        meta, problem = _read(self._worker_metadata_decoder, wire.worker_meta)
        stats = metrics.unpack(wire.stats)
        report = replace(output.connector, kv_connector_worker_meta=meta, kv_connector_stats=stats)
        return StepOutput(output.sampled, report, output.connector_error or problem)

    def _carry(self, message: object) -> tuple[bytes | None, str | None]:
        """A connector's message as bytes, or the reason why it cannot be carried."""
        try:
            return self._encoder.encode(message), None
        except Exception as error:  # noqa: BLE001  # a third party's types: whatever making bytes of them raises
            return None, f"its {type(message).__name__} cannot be carried to another process: {one_line(error)}"


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
