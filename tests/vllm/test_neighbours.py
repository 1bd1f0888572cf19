"""What vLLM's own connectors find, ours finds; and the simulation sees what may go wrong where a prefix ends inside a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

# Something that vLLM has since 0.32, whose inside the simulation follows.
pytest.importorskip(
    "vllm.v1.metrics.cache_hit_source", reason="vLLM 0.32 has an environment of its own: make test-vllm"
)

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler

from benchmarks.neighbours import ALONE, MODELS, NOBODY, OURS, THEIRS, Traffic, compare, play
from cargohold.lab.simulation.fingerprints import WrongTokenError
from cargohold.lab.simulation.traffic import Action, Writer

TAILED = "recurrent state, hashed by 4 tokens"


@pytest.mark.parametrize(
    ("model", "traffic"),
    [
        ("full attention, 1 token drafted", "turns"),
        ("a window beside it", "forks"),
        ("recurrent state beside it", "shared_beginnings"),
    ],
)
def test_no_request_finds_less_than_with_vllms_own_connectors(model: str, traffic: str) -> None:
    row = compare(MODELS[model], traffic, (0,), (NOBODY, *THEIRS, OURS))
    assert row.found_less == {}
    assert int(row.computed[OURS]) < 0.9 * int(row.computed[NOBODY]), "hardly anything is found: this proves little"


@pytest.mark.xfail(strict=True, reason="prefixes that end inside a chunk of several blocks are not kept")
def test_prefixes_that_end_inside_a_chunk_are_found() -> None:
    row = compare(MODELS["full attention, chunks of 3 blocks"], "same_prompts", (0,), (ALONE, OURS))
    assert int(row.computed[OURS]) <= int(row.computed[ALONE])


@pytest.mark.xfail(strict=True, reason="a load is promised up to the last whole chunk before the last token")
def test_a_whole_prompt_that_ends_with_a_block_is_found_beside_local_attention() -> None:
    assert compare(MODELS["local attention beside it"], "same_prompts", (0,), (THEIRS[0], OURS)).found_less == {}


# --- the simulation sees what goes wrong, in the connector that keeps such prefixes -----------------------------------

KeyOf = Callable[[Any, Any, int, int, Any], Any]


def nested() -> Sequence[Action]:
    """A prompt after its own beginnings, each of which ends inside the same block."""
    to = Traffic(Writer(Random(1)))
    text = to.text(61, 61)
    for length in (53, 57, 61, 61):
        to.ask(text[:length], 2)
    return to.writer.sorted_actions()


def test_theirs_keeps_such_prefixes_and_ends_well() -> None:
    assert play(MODELS[TAILED], nested(), THEIRS[0]).total() == play(MODELS[TAILED], nested(), ALONE).total()


def a_shorter_one(own: KeyOf) -> KeyOf:
    return lambda self, request, group, end, context: own(self, request, group, end - 4, context)


def a_shorter_one_for_attention(own: KeyOf) -> KeyOf:
    shorter = a_shorter_one(own)
    return lambda self, request, group, *where: (own if group else shorter)(self, request, group, *where)


def the_block_before(own: KeyOf) -> KeyOf:
    return lambda self, request, group, end, context: own(self, request, group, end // 16 * 16, context)


@pytest.mark.parametrize("mistake", [a_shorter_one, a_shorter_one_for_attention, the_block_before])
def test_a_prefix_taken_for_one_of_another_length_is_a_wrong_token(
    mistake: Callable[[KeyOf], KeyOf], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = OffloadingConnectorScheduler.update_state_after_alloc
    key_of = OffloadingConnectorScheduler._make_boundary_key

    def load_another(self: Any, *args: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OffloadingConnectorScheduler, "_make_boundary_key", mistake(key_of))
            load(self, *args)

    monkeypatch.setattr(OffloadingConnectorScheduler, "update_state_after_alloc", load_another)
    with pytest.raises(WrongTokenError):
        play(MODELS[TAILED], nested(), THEIRS[0])
