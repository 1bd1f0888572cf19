"""Requests that lose what they were to begin with while they wait for a place."""

from __future__ import annotations

from tests.connector.common import alone, evict_everything, prompt
from tests.connector.tiering import DISK, finish, make_engine, restored, serve
from tests.held_tiers import SimulatedTiering


def test_a_request_whose_beginning_the_device_has_lost_while_it_waited_gets_it_from_below() -> None:
    """Found by use: its end came up from the disk, its beginning was gone by then, and it computed all of 1,236 tokens."""
    tiering = SimulatedTiering(60, [DISK], restore="always")
    first = make_engine(tiering)
    serve(first, tiering, "first", prompt(0, 41), 1)
    tiering.num_slots = 40
    engine = make_engine(tiering, max_num_seqs=2)
    (queue,) = tiering.all_queues()
    serve(engine, tiering, "its beginning", prompt(0, 21), 1)
    tiering.manager.remove(tiering.media[0][0].chunks)
    queue.auto = False
    engine.add("again", prompt(0, 41), 3)
    while not any(job.buffers for job in queue.pending):
        engine.step()
        for job in [job for job in queue.pending if not job.buffers]:
            queue.complete(job)
    (load,) = [job for job in queue.pending if job.buffers]
    assert len(load.keys) == 5, "the device has the other half"
    evict_everything(engine)
    queue.auto = True
    finish(engine, tiering)
    assert restored(engine, "again") == {"disk": 40} and engine.tokens("again") == alone(prompt(0, 41), 3)
