"""A rank in a process of its own: what it is made of, and its side of the conversation with its executor."""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cargohold.engine.core.request import SchedulerStep, StepOutput
from cargohold.engine.executor import RankPlace, RunnerFactory, Worker, merge_outputs
from cargohold.engine.ranks.step_codec import StepCodec
from cargohold.errors import (
    CargoholdError,
    ConfigError,
    EngineDeadError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from cargohold.process import made_for_good
from cargohold.protocol import Exchange, KVCacheLayout, KVConnectorFactory, OutputAggregator, WorkerEnvironment

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0

_READY, _OUTPUT, _ERROR, _REFUSED = b"R", b"O", b"E", b"X"
"""First byte of a frame: the rank has started; a step's output; the rank cannot go on; the rank refuses to start."""

_REFUSALS = {error.__name__: error for error in (ConfigError, ModelError, ModelNotFoundError, UnsupportedModelError)}


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


def _exchange(layout: KVCacheLayout) -> Exchange | None:
    if layout.num_replicas == 1:
        return None
    from cargohold.engine.model.weights import exchange_with_ranks  # noqa: PLC0415  # imports torch

    assert layout.num_shards == 1, "all ranks of the group hold the same"
    return exchange_with_ranks


class FramedRank:
    """A rank that answers every call with a frame and never raises: its executor may be in another process or machine."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._codec: StepCodec

    def start(self, spec: RankSpec, place: RankPlace) -> bytes:
        """Load the rank's shard of the model, in a process that is the rank's alone."""
        try:
            with made_for_good():
                self._worker = self._made(spec, place)
        except (ConfigError, ModelError) as error:
            return _encode_refusal(error)
        except Exception:  # noqa: BLE001  # whatever it is, the engine must learn of it
            return _ERROR + traceback.format_exc().encode()
        return _READY

    def execute(self, step: bytes) -> bytes:
        """Run one step."""
        assert self._worker is not None, "start comes first"
        try:
            return _OUTPUT + self._codec.encode_output(self._worker.execute(self._codec.decode_step(step)))
        except Exception:  # noqa: BLE001  # whatever it is, the engine must learn of it
            return _ERROR + traceback.format_exc().encode()

    def shutdown(self) -> None:
        """Let transfers end."""
        if self._worker is not None:
            self._worker.shutdown()

    def _made(self, spec: RankSpec, place: RankPlace) -> Worker:
        runner = spec.runners.make_runner(place)
        environment = WorkerEnvironment(spec.layout, place.rank, time.monotonic, _exchange(spec.layout))
        connector = spec.connectors.make_worker_side(environment)
        self._codec = StepCodec(metadata_type=connector.metadata_type)
        return Worker(runner, connector)


class RanksExecutor(ABC):
    """Runs each step on all ranks at once. Satisfies ``Executor``. Whatever ends a step early ends the ranks.

    Args:
        codec: decodes the ranks' outputs.
        aggregator: merges what their connectors report.
        step_timeout_s: the longest that a step may take.
    """

    def __init__(self, codec: StepCodec, aggregator: OutputAggregator, step_timeout_s: float) -> None:
        self._codec = codec
        self._aggregator = aggregator
        self._step_timeout_s = step_timeout_s

    def execute(self, step: SchedulerStep) -> StepOutput:
        """Run one step on every rank."""
        frame = self._codec.encode_step(step)
        try:
            frames = self._answers(frame)
        except BaseException:
            self._kill()
            raise
        return merge_outputs(self._aggregator, [self._codec.decode_output(content) for content in frames])

    @abstractmethod
    def _answers(self, frame: bytes) -> list[bytes]:
        """Send a step to all ranks; return the content of each rank's frame, in rank order."""

    @abstractmethod
    def _kill(self) -> None:
        """End all ranks now."""


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
    """A sentence about ranks that did not answer. One that hangs looks like those that wait for it in a collective call."""
    if len(ranks) == 1:
        return f"worker {ranks[0]} did not answer within {timeout_s:g} s: it hangs"
    names = ", ".join(map(str, ranks))
    return f"workers {names} did not answer within {timeout_s:g} s: one of them hangs, and others may be waiting for it"
