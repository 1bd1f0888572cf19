"""The main function of a rank's own process."""

from __future__ import annotations

import os
import signal
import sys

from cargohold.engine.executor.channel import Channel, ChannelClosedError
from cargohold.engine.executor.rank import RankPlace, RankSpec
from cargohold.engine.executor.rank_frames import FramedRank

STOP = b""
"""The frame that ends a rank."""


def run_rank(spec: RankSpec, place: RankPlace, channel: Channel) -> None:
    """Serve steps until told to stop, or until the engine's process is gone."""
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
        pass  # the engine's process has ended: nobody is left to tell
    finally:
        rank.shutdown()
