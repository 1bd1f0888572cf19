"""``kv_transfer_params``: wishes of clients."""

from __future__ import annotations

from typing import Any

import pytest

from cargohold.errors import RequestError
from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, simulated_layout
from tests.connector.common import alone, finish, prompt, serve_and_lose


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"do_remote_decode": "yes"}, "do_remote_decode='yes'"),
        ({"max_load_tokens": -1}, "max_load_tokens=-1"),
        ({"max_store_tokens": 2.5}, r"max_store_tokens=2\.5"),
        ({"max_load_tokens": True}, "max_load_tokens=True"),
    ],
)
def test_an_impossible_wish_is_refused_for_its_request_alone(params: dict[str, Any], named: str) -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading)
    with pytest.raises(RequestError, match=named):
        engine.add("bad", prompt(0, 30), 1, kv_transfer_params=params)
    engine.add("good", prompt(0, 30), 1, kv_transfer_params={"of_another_connector": object()})
    finish(engine, offloading)
    assert engine.tokens("good") == alone(prompt(0, 30), 1)


@pytest.mark.parametrize("wish", ["do_remote_decode", "max_load_tokens"])
def test_the_refusal_of_an_impossible_wish_fits_in_a_line(wish: str) -> None:
    engine = SimulatedEngine(simulated_layout(60), SimulatedOffloading(60))
    with pytest.raises(RequestError, match=f"{wish}='lll") as refused:
        engine.add("bad", prompt(0, 30), 1, kv_transfer_params={wish: 10_000 * "l"})
    assert len(str(refused.value)) < 200


def test_wishes_limit_what_is_loaded_and_stored() -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading, prefix_caching=False)
    engine.add("first", prompt(0, 30), 1, kv_transfer_params={"max_store_tokens": 18})
    finish(engine, offloading)
    assert offloading.manager.num_ready == 4
    engine.add("second", prompt(0, 30), 1, kv_transfer_params={"max_load_tokens": 9, "max_store_tokens": 0})
    finish(engine, offloading)
    assert engine.outputs["second"].cache_report.restored_tokens == {"host": 8}
    assert offloading.manager.num_ready == 4


@pytest.mark.parametrize(("allowed", "is_named"), [(16, True), (1000, False)])
def test_a_limit_is_named_as_the_reason_only_where_it_is_one(allowed: int, is_named: bool) -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading)
    serve_and_lose(engine, offloading, prompt(0, 32), 1)
    tokens = [*prompt(0, 32), *prompt(1, 16)]
    engine.add("more", tokens, 1, kv_transfer_params={"max_load_tokens": allowed})
    finish(engine, offloading)
    notes = " ".join(engine.outputs["more"].cache_report.notes)
    assert (f"the request allows {allowed}" in notes) is is_named, notes
