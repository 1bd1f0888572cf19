"""Writes below host memory that are refused, put off or fail for a moment: the prompt is found below all the same."""

from __future__ import annotations

import pytest

from cargohold.tiers import StoreOutcome
from cargohold.tiers.scheduler_side import TierOptions
from tests.connector.common import evict_everything, prompt
from tests.connector.tiering import finish, lose_host_memory, make_engine, restored, serve
from tests.held_tiers import SimulatedTiering


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize("outcome", [StoreOutcome.REFUSED, StoreOutcome.LATER, StoreOutcome.FAILED])
@pytest.mark.parametrize("source", ["device", "host"])
def test_a_prompt_in_use_is_below_although_some_of_its_chunks_were_not_taken_at_first(
    outcome: StoreOutcome, source: str, *, has_index: bool
) -> None:
    """Found by use: 0 of 160 tokens were restored in six of eight cases, for ten minutes."""
    tiering = SimulatedTiering(80, [TierOptions(name="low", has_index=has_index)])
    engine = make_engine(tiering)
    tiering.media[0][0].not_now = [outcome] * 3
    serve(engine, tiering, "first", prompt(0, 41), 1)
    for number in range(3):
        if source == "host":
            evict_everything(engine)
        serve(engine, tiering, f"again {number}", [*prompt(0, 41), number], 1)
    lose_host_memory(engine, tiering)
    engine.add("last", [*prompt(0, 41), 9], 3)
    finish(engine, tiering)
    assert restored(engine, "last") == {"low": 40}
