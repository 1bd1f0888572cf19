"""A connector around another that writes down what was asked for and reused: a block trace."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from cargohold.errors import ConfigError, one_line
from cargohold.protocol import (
    BlockIds,
    ForwardingScheduler,
    KVConnectorFactory,
    KVConnectorOutput,
    KVConnectorScheduler,
    KVConnectorWorker,
    RequestView,
    SchedulerEnvironment,
    TurnEnd,
    WorkerEnvironment,
)

logger = logging.getLogger(__name__)

_ID_BITS: Final = 53
"""Number of bits of an id: every JSON reader represents such integers exactly."""
_KEY_BYTES: Final = 16


class TraceFile:
    """A file with one JSON line per request, readable only by its owner. A failure ends the trace, but not the engine.

    Block hashes are digests of tokens, so anyone who guesses a prompt could verify the guess with them. The file has digests of
    the hashes under a random key that is not kept: within the file equal blocks have equal ids, and outside it the ids mean
    nothing.

    Args:
        path: path of the file, which must not exist.

    Raises:
        ConfigError: the file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._encoder = msgspec.json.Encoder()
        try:
            self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError("record", str(path), error.strerror or one_line(error)) from error

    def ids(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Return the ids of blocks in this file."""
        key, shift = self._key, 64 - _ID_BITS
        # Python's own keyed hash (SipHash): a tenth of the time of a cryptographic one, in the scheduler's thread.
        return [(hash(key + block_hash) & 0xFFFF_FFFF_FFFF_FFFF) >> shift for block_hash in block_hashes]

    def write(self, line: dict[str, Any]) -> None:
        """Add a line, whole or not at all as far as the system allows. The first failure is logged and ends the trace."""
        if self._descriptor is None:
            return
        try:
            self._write_all(self._descriptor, self._encoder.encode(line) + b"\n")
        except OSError as error:
            logger.warning("recording to %s has ended: %s", self._path, one_line(error))
            self.close()

    @staticmethod
    def _write_all(descriptor: int, data: bytes) -> None:
        num_written = os.write(descriptor, data)
        if num_written < len(data):
            raise OSError(f"only {num_written} of {len(data)} bytes were written")

    def close(self) -> None:
        """Close the file; ``write`` does nothing from now on."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


@dataclass(slots=True)
class _Seen:
    """The state of one request.

    Attributes:
        device_tokens: number of tokens found on the device when the connector was last asked.
        admitted_ms: time of its first admission, in milliseconds since the start; ``None`` before that.
        reused_tokens: number of tokens found at its first admission, on the device and in tiers; reduced when a load fails.
        loading: its block tables while a load fills them; empty otherwise.
    """

    device_tokens: int = 0
    admitted_ms: float | None = None
    reused_tokens: int = 0
    loading: BlockIds = ()


class RecordingScheduler(ForwardingScheduler):
    """Wraps a connector and writes one line for each request that was admitted, when the request ends.

    The reuse in a line is what the engine decided when it first admitted the request, without tokens that a load then failed to
    bring. Requests that were never admitted leave no line.

    Args:
        inner: the connector that does the work.
        file: the trace; closed by ``shutdown``.
        environment: facts about the engine.
    """

    def __init__(self, inner: KVConnectorScheduler, file: TraceFile, environment: SchedulerEnvironment) -> None:
        super().__init__(inner)
        self._file = file
        self._clock = environment.clock
        self._block_tokens = environment.layout.hash_block_tokens
        self._step_tokens = environment.max_step_tokens
        self._groups = environment.layout.groups
        self._finds_partial = environment.finds_partial_loads
        self._started = environment.clock()
        self._last_ms = 0.0
        self._seen: dict[str, _Seen] = {}

    def on_new_request(self, request: RequestView) -> None:
        self.inner.on_new_request(request)
        self._seen[request.request_id] = _Seen()

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        seen = self._seen.get(request.request_id)
        if seen is not None:
            seen.device_tokens = num_computed_tokens
        return self.inner.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        seen = self._seen.get(request.request_id)
        if seen is not None and seen.admitted_ms is None:
            seen.admitted_ms = self._next_ms()
            seen.reused_tokens = seen.device_tokens + num_external_tokens
            if num_external_tokens:
                seen.loading = tuple(tuple(table) for table in blocks)
        self.inner.update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._take_back(connector_output)
        self.inner.update_connector_output(connector_output)

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, Mapping[str, Any] | None]:
        seen = self._seen.pop(request.request_id, None)
        if seen is not None and seen.admitted_ms is not None:
            self._file.write(self._line(request, seen, seen.admitted_ms))
        return self.inner.request_finished(request, block_ids)

    def shutdown(self) -> None:
        self._file.close()
        self.inner.shutdown()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _next_ms(self) -> float:
        """Return the time in milliseconds since the start, but always more than the last call did.

        A replay admits and ends requests in the order of these times, which must be the order in which they were.
        """
        now = round(1000 * (self._clock() - self._started), 3)
        self._last_ms = max(now, round(self._last_ms + 0.001, 3))
        return self._last_ms

    def _take_back(self, output: KVConnectorOutput) -> None:
        """Reduce the reused tokens of requests by those that a load failed to bring."""
        if output.invalid_block_ids:
            for seen in self._seen.values():
                if seen.loading:
                    seen.reused_tokens = min(seen.reused_tokens, self._num_good_tokens(seen, output.invalid_block_ids))
        for request_id in output.finished_recving & self._seen.keys():
            seen = self._seen[request_id]
            if seen.loading and request_id in output.failed_recving:
                seen.reused_tokens = seen.device_tokens
            seen.loading = ()

    def _num_good_tokens(self, seen: _Seen, bad_blocks: AbstractSet[int]) -> int:
        """Return how many leading tokens are reused if these blocks are bad, of those that a load fills for the request."""
        num_good = seen.reused_tokens
        for group, table in zip(self._groups, seen.loading, strict=True):
            first_bad = next((at for at, block_id in enumerate(table) if block_id in bad_blocks), None)
            if first_bad is not None:
                num_good = min(num_good, first_bad * group.block_tokens if self._finds_partial else 0)
        return max(num_good, seen.device_tokens)

    def _line(self, request: RequestView, seen: _Seen, admitted_ms: float) -> dict[str, Any]:
        num_prompt_blocks = request.num_prompt_tokens // self._block_tokens
        # The last token was generated, but its KV was not computed.
        num_blocks = max(num_prompt_blocks, (request.num_tokens - 1) // self._block_tokens)
        ids = self._file.ids(request.block_hashes[:num_blocks])
        end = request.turn_end
        return {
            "timestamp_ms": admitted_ms,
            "ended_ms": self._next_ms(),
            "input_length": request.num_prompt_tokens,
            "output_length": request.num_tokens - request.num_prompt_tokens,
            "block_tokens": self._block_tokens,
            "step_tokens": self._step_tokens,
            "reused_blocks": seen.reused_tokens // self._block_tokens,
            "hash_ids": ids[:num_prompt_blocks],
            "output_hash_ids": ids[num_prompt_blocks:],
            **({} if end is TurnEnd.UNKNOWN else {"stop": end.value}),
        }


@dataclass(frozen=True, slots=True)
class RecordingFactory:
    """Makes a connector that records. Satisfies ``cargohold.protocol.KVConnectorFactory``.

    Raises ``ConfigError`` if the path is empty, the file exists already, or its directory does not.

    Attributes:
        inner: makes the connector that does the work; ``NULL_CONNECTOR`` for none.
        file: path of the trace; ``{pid}`` in it stands for the process's id, for engines with several replicas. The file must
            not exist yet.
    """

    inner: KVConnectorFactory
    file: str

    def __post_init__(self) -> None:
        if not self.file:
            raise ConfigError("record", self.file, "it must be the path of a file to write")
        path = self._path()
        if path.is_dir():
            raise ConfigError("record", self.file, "it is a directory; give the path of a file to write")
        if path.exists():
            raise ConfigError("record", self.file, "the file exists; traces are not overwritten")
        if not path.parent.is_dir():
            raise ConfigError("record", self.file, "there is no such directory")

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> KVConnectorScheduler:
        """Make the inner scheduler side and a wrapper that records it. Raises ``ConfigError`` if the file cannot be created."""
        inner = self.inner.make_scheduler_side(environment)
        try:
            file = TraceFile(self._path())
        except BaseException:
            inner.shutdown()
            raise
        return RecordingScheduler(inner, file, environment)

    def make_worker_side(self, environment: WorkerEnvironment) -> KVConnectorWorker:
        """Make the inner worker side, where there is nothing to record."""
        return self.inner.make_worker_side(environment)

    def _path(self) -> Path:
        return Path(self.file.replace("{pid}", str(os.getpid())))
