"""A rank's side of the conversation with its executor: it answers every call with a frame, also when it fails."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence

import msgspec

from cargohold.engine.executor.rank import RankPlace, RankSpec, RankWorker
from cargohold.errors import (
    CargoholdError,
    ConfigError,
    EngineDeadError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from cargohold.garbage import made_for_good

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
