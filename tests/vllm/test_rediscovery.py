"""Mistakes that vLLM's users have reported and vLLM has mended: with the fix taken out in memory, seeds find them."""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import Any

import pytest

pytest.importorskip(
    "vllm.v1.metrics.cache_hit_source", reason="vLLM 0.32 has an environment of its own: make test-vllm"
)

from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as module
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler

from cargohold.integrations.vllm import compat
from cargohold.lab.vllm.others.recipe import kind_of
from tests.vllm.test_others import FILES, HOST_EVENTS, OFFLOADING, WRONG_TOKEN, play

pytestmark = pytest.mark.skipif(compat.vllm_version() != (0, 32), reason="the fixes are looked for in the text of 0.32")

Scheduler = module.OffloadingConnectorScheduler
Request = next(kind for kind in vars(module).values() if isinstance(kind, type) and "storable_chunks" in vars(kind))


@pytest.fixture
def undo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces one line of a method by what it was before the fix."""

    def undo(owner: Any, name: str, fixed: str, before: str) -> None:
        source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
        assert source.count(fixed) == 1, "the fix looks different in this version"
        names = dict(vars(sys.modules[owner.__module__]))
        exec("from __future__ import annotations\n" + source.replace(fixed, before), names)  # vLLM's own text
        monkeypatch.setattr(owner, name, names[name])

    return undo


def failures(workload: str, seeds: range) -> list[str]:
    errors = (play(seed, OFFLOADING, workload).error for seed in seeds)
    # Resets without events are another mistake, and an open one.
    return [str(error) for error in errors if kind_of(error) not in (None, HOST_EVENTS)]


def test_an_aborted_request_that_never_ran_kills_the_engine(undo: Any) -> None:
    # vllm-project/vllm 49118, and 52170, which was reported with MultiConnector and has the same cause.
    assert failures("aborts", range(3)) == []
    undo(Scheduler, "_build_store_jobs", "if req.status is RequestStatus.FINISHED_ABORTED:", "if False:")
    undo(Request, "storable_chunks", "min(num_chunks, num_allocated_chunks, num_keyed_chunks)", "num_chunks")
    found = failures("aborts", range(3))
    assert found
    assert all("AssertionError" in error and "_build_store_jobs" in error for error in found)


def test_the_last_sampled_token_is_stored_as_if_it_had_been_computed(undo: Any) -> None:
    # vllm-project/vllm 54193
    assert failures("any", range(26, 27)) == []
    undo(Scheduler, "_build_store_jobs", "max(req.num_prompt_tokens, req.num_tokens - 1)", "req.num_tokens")
    assert "does not hold the KV of token" in failures("any", range(26, 27))[0]


def test_a_sibling_s_load_overwrites_what_is_being_stored_until_it_is_mended(undo: Any) -> None:
    # vllm-project/vllm 46951 is open. With what its pull requests propose, the seed ends well.
    both = f"{OFFLOADING}+OffloadingConnector"
    assert play(19, both).error is not None
    early = "if num_external_tokens == 0:\n        return\n"
    noted = (
        "for group in blocks.blocks:\n"
        "        self._current_batch_allocated_block_ids.update(b.block_id for b in group if b.block_id != 0)\n    "
    )
    undo(Scheduler, "update_state_after_alloc", early, noted + early)
    assert play(19, both).error is None


def test_a_chunk_is_stored_in_part_and_found_whole(undo: Any) -> None:
    # 0.33 has mended a part of it. The second seed has tiers on files.
    def ends(seed: int, config: dict[str, Any]) -> str | None:
        return kind_of(play(seed, OFFLOADING, "any", "none", config).error)

    seeds: dict[int, dict[str, Any]] = {145: {}, 300422: FILES}
    assert {ends(seed, config) for seed, config in seeds.items()} == {WRONG_TOKEN}
    before = (
        "if block_id == 0:\n                    continue\n                abs_chunk_idx = start_chunk_idx + key_idx\n"
    )
    begin = "(start_chunk_idx + key_idx) * blocks_per_chunk"
    whole = f"0 in group_state.block_ids[{begin} : {begin} + blocks_per_chunk]"
    undo(Scheduler, "_build_store_jobs", before, before.replace("block_id == 0", whole))
    assert {ends(seed, config) for seed, config in seeds.items()} == {None}


def test_loaded_requests_leave_no_room_for_speculative_tokens(undo: Any) -> None:
    # vllm-project/vllm 57104
    assert failures("returning", range(45, 46)) == []
    undo(VllmScheduler, "schedule", "+ self._spec_decode_step_blocks", "+ 0")
    undo(VllmScheduler, "_request_remaining_blocks", "if self.num_spec_tokens:", "if False:")
    assert "standstill: for 200 steps nothing runs" in failures("returning", range(45, 46))[0]


def test_a_preempted_request_comes_back_while_its_store_is_in_flight(undo: Any) -> None:
    # vllm-project/vllm 46014. It needs steps that overlap, and another request that ends in the step of the preemption.
    assert failures("preemption", range(576, 577)) == []
    undo(Scheduler, "get_num_new_matched_tokens", "if req_status.transfer_jobs:", "if False:")
    assert "assert not req_status.transfer_jobs" in failures("preemption", range(576, 577))[0]
