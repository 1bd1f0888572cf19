"""What runs in a rank's own process."""

from __future__ import annotations

import signal
import time
import traceback

import msgspec

from cargohold.engine.executor.channel import Channel, ChannelClosedError
from cargohold.engine.executor.rank import RankPlace, RankSpec, RankWorker
from cargohold.errors import CargoholdError, ConfigError, ModelError, ModelNotFoundError, UnsupportedModelError

READY, OUTPUT, ERROR, REFUSED = b"R", b"O", b"E", b"X"
"""First byte of a frame from a rank: it can start; a step's output; it cannot go on; what was asked for cannot work."""

STOP = b""
"""The frame that ends a rank."""


def run_rank(spec: RankSpec, place: RankPlace, channel: Channel) -> None:
    """Serve steps until told to stop, or until the engine's process is gone."""
    # Ctrl-C reaches every process of the terminal; the engine decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        worker = RankWorker(spec, place, time.monotonic)
        channel.send(READY)
        try:
            while (step := channel.receive()) != STOP:
                channel.send(OUTPUT + worker.execute(step))
        finally:
            worker.shutdown()
    except ChannelClosedError:
        return  # the engine's process has ended: nobody is left to tell
    except (ConfigError, ModelError) as error:
        channel.send(_encode_refusal(error))
    except Exception:  # noqa: BLE001  # whatever it is, the engine must learn of it before this process ends
        channel.send(ERROR + traceback.format_exc().encode())


def _encode_refusal(error: ConfigError | ModelError) -> bytes:
    facts = (
        [error.key, str(error.value), error.expected] if isinstance(error, ConfigError) else [error.model, error.reason]
    )
    return REFUSED + msgspec.msgpack.encode([type(error).__name__, facts])


def decode_refusal(frame: bytes) -> CargoholdError:
    """The error that made a rank refuse to start."""
    kind, facts = msgspec.msgpack.decode(frame[1:], type=tuple[str, list[str]])
    refusals = {error.__name__: error for error in (ConfigError, ModelError, ModelNotFoundError, UnsupportedModelError)}
    return refusals[kind](*facts)
