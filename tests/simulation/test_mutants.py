from __future__ import annotations

import pytest

from cargohold.connector.multi import MultiConnectorFactory
from cargohold.connector.offloading import OffloadingScheduler
from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, WrongTokenError, simulated_layout
from cargohold.lab.simulation.fingerprints import tokens_alone
from cargohold.lab.simulation.replica import VOCAB_SIZE
from cargohold.lab.simulation.run import quiet_logging
from cargohold.protocol import ClassFactory
from examples.own_connector.shelf import ShelfScheduler, ShelfWorker
from tests.simulation.mutants import MUTANTS
from tests.simulation.mutation import Mutant, assert_caught

MAX_SEEDS = 200


SLOW = {
    "never lets go of what it has fetched",
    "takes a job that hangs for one too many",
    "waits although there is nothing worth waiting for",
}
"""Who waits in vain plays thousands of steps before it is found out."""


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(mutant, id=mutant.what, marks=pytest.mark.long if mutant.what in SLOW else ()) for mutant in MUTANTS],
)
def test_every_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch, MAX_SEEDS)


class RaisingShelfWorker(ShelfWorker):
    """Raises when it is to load anything."""

    def start_load_kv(self) -> None:
        assert not self._orders.loads, "the shelf has fallen down"


def serve_after_a_failed_step() -> list[int]:
    """A request is computed in a step whose loads did not happen, and asked for again when the device has lost it."""
    shelf = ClassFactory(ShelfScheduler, RaisingShelfWorker)
    engine = SimulatedEngine(
        simulated_layout(24), MultiConnectorFactory((shelf, SimulatedOffloading(60))), as_tensors=True
    )
    stem, prompt = list(range(16)), list(range(24))
    with quiet_logging():
        for name, tokens in (("stem", stem), ("other", [500] * 80), ("failed", prompt), ("more", [600] * 80)):
            engine.add(name, tokens)
            engine.run()
    assert engine.requests["failed"].num_preemptions == 1
    engine.add("again", [*prompt, 7])
    engine.run()
    return engine.tokens("again")


def test_what_a_failed_step_computed_is_not_found_again() -> None:
    assert serve_after_a_failed_step() == tokens_alone([*range(24), 7], 1, VOCAB_SIZE)


def test_a_connector_that_keeps_what_a_failed_step_computed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadingScheduler, "_spoil_stores", lambda self, spoiled_requests: None)
    with pytest.raises(WrongTokenError):
        serve_after_a_failed_step()
