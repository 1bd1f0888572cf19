"""A policy of somebody else in the tiers of a real engine: named in the options, and contained when it fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cargohold import LLM
from cargohold.protocol import metrics
from examples.own_policy.oldest_ends import OldestEnds
from tests.connector.test_tiers_with_models import OPTIONS, ask, disk, offload, prompts, restored, tokens
from tests.llms import SettledLLM

OLDEST_ENDS = "examples.own_policy.oldest_ends:OldestEnds"
FAILING = f"{__name__}:Failing"


class Failing(OldestEnds):
    """Ends with an error when it is to choose."""

    def make_room(self, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:
        raise ZeroDivisionError("no idea")


def test_a_policy_of_ones_own_decides_in_host_memory_and_on_disk(
    tmp_path: Path, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    config = offload(disk(tmp_path, policy=OLDEST_ENDS), policy=OLDEST_ENDS)
    with SettledLLM(tiny_model("llama"), offload=config, **OPTIONS) as first:
        expected = tokens(ask(first, prompts()))
    again = ask(make_llm(tiny_model("llama"), offload=config, **OPTIONS), prompts())
    assert tokens(again) == expected
    assert restored(again) == [{"disk": 100}] * 3


@pytest.mark.parametrize("place", ["host", "disk"])
def test_one_that_fails_costs_what_it_was_to_keep(
    place: str,
    tmp_path: Path,
    tiny_model: Callable[[str], str],
    make_llm: Callable[..., LLM],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with SettledLLM(tiny_model("llama"), **OPTIONS) as plain:
        expected = tokens(ask(plain, prompts()))
        block_bytes = plain.plan.layout.block_bytes
    # Room for one prompt of three, and for what a disk keeps beside it.
    if place == "host":
        config = offload(policy=FAILING, host_bytes=30 * block_bytes)
    else:
        config = offload(disk(tmp_path, policy=FAILING, max_bytes=60 * (block_bytes + 512)))
    llm = make_llm(tiny_model("llama"), offload=config, **OPTIONS)
    assert tokens(ask(llm, prompts())) == expected
    stats = llm.stats()
    assert stats[metrics.FAILURES.of("connector_off") if place == "host" else metrics.TIER_FAILURES.of("disk")] > 0
    assert "ZeroDivisionError('no idea')" in caplog.text or "ZeroDivisionError: no idea" in caplog.text
    assert tokens(ask(llm, prompts())) == expected
