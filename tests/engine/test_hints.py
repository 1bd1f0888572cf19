"""Hints given to ``LLM``: what each is answered, whatever clients send, and that they keep what they say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from cargohold import AsyncLLM, Hint, HintConfig, OffloadConfig, RequestError, SamplingParams
from cargohold.engine.llm_engine import LLMEngine
from cargohold.protocol import MAX_HINTS, ClassFactory, HintOutcome, HintStatus, RequestView, metrics, parse_hints
from cargohold.protocol.connector import NullConnectorScheduler, NullConnectorWorker
from tests.llms import SettledLLM, in_engine
from tests.models import save_model

ONE = SamplingParams(max_tokens=4, ignore_eos=True)
PROMPT = list(range(3, 67))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def llm(model: str) -> Iterator[SettledLLM]:
    offload = OffloadConfig(host_bytes="1MiB", hints=HintConfig(pin_fraction=0.5))
    with SettledLLM(model, num_device_blocks=12, block_tokens=16, max_num_batched_tokens=64, offload=offload) as llm:
        yield llm


def test_each_hint_of_a_request_has_one_outcome_and_changes_no_token(llm: SettledLLM) -> None:
    (plain,) = llm.generate(PROMPT, ONE)
    hints = [Hint.pin(ttl_s=60, lease="a"), Hint.retain(priority=99, ttl_s=10**9), Hint.prefetch(), Hint.release("b")]
    (out,) = llm.generate(PROMPT, ONE, hints=hints)
    assert out.token_ids == plain.token_ids
    assert [(outcome.action_id, outcome.status) for outcome in out.hint_outcomes] == [
        (hints[0].action_id, HintStatus.ACCEPTED),
        (hints[1].action_id, HintStatus.CLIPPED),
        (hints[2].action_id, HintStatus.REJECTED),
        (hints[3].action_id, HintStatus.MISSING),
    ]
    assert any("3600 s at most" in note for note in out.cache_notes)
    stats = llm.stats()
    assert {series.labels[0]: count for series, count in stats.items() if series.family is metrics.HINTS} == {
        "accepted": 1,
        "clipped": 1,
        "rejected": 1,
        "missing": 1,
    }


def test_a_hint_without_a_request_acts_on_what_is_there(llm: SettledLLM) -> None:
    assert [outcome.status for outcome in llm.hint(Hint.pin(ttl_s=60), prompt=PROMPT)] == [HintStatus.MISSING]
    llm.generate(PROMPT, ONE)
    (outcome,) = llm.hint(Hint.pin(ttl_s=60, lease="mine"), prompt=PROMPT)
    assert (outcome.status, outcome.num_tokens) == (HintStatus.ACCEPTED, 64)
    assert llm.stats()[metrics.PINNED_CHUNKS] == 4
    assert [outcome.status for outcome in llm.hint(Hint.release("mine"))] == [HintStatus.ACCEPTED]
    assert llm.stats()[metrics.PINNED_CHUNKS] == 0
    assert [event.end for event in llm.take_hint_events()] == ["released"]
    assert [outcome.status for outcome in llm.hint(Hint.retain(), request_id="nobody")] == [HintStatus.MISSING]
    with pytest.raises(RequestError):
        llm.hint(Hint.retain(), prompt=[-1])


def test_hints_are_their_tenant_s_also_those_about_another_prompt(llm: SettledLLM) -> None:
    llm.generate(PROMPT, ONE, tenant="ann")
    for hint in (Hint.pin(ttl_s=60, lease="mine"), Hint.pin(ttl_s=60, lease="mine", token_ids=tuple(PROMPT))):
        if hint.token_ids:
            llm.generate([1, 2, 3], ONE, tenant="ann", hints=hint)
        else:
            llm.hint(hint, prompt=PROMPT, tenant="ann")
        assert [pin.tenant for tier in llm.contents() for pin in tier.pins] == ["ann"]
        assert [outcome.status for outcome in llm.hint(Hint.release("mine"), tenant="bob")] == [HintStatus.MISSING]
        assert [outcome.status for outcome in llm.hint(Hint.release("mine"), tenant="ann")] == [HintStatus.ACCEPTED]
        assert [event.tenant for event in llm.take_hint_events()] == ["ann"]


def test_the_envelope_comes_in_kv_transfer_params_too(llm: SettledLLM) -> None:
    action = {"action_id": "a1", "action_type": "pin", "action_version": "1", "payload": {"ttl_s": 5}}
    envelope = {"protocol_version": "1", "message_id": "m", "actions": [action]}
    for key in ("kv_hint", "cargohold_hints"):
        (out,) = llm.generate(PROMPT, ONE, kv_transfer_params={key: envelope})
        assert [(outcome.action_id, outcome.status) for outcome in out.hint_outcomes] == [("a1", HintStatus.ACCEPTED)]


def test_async_callers_have_the_same(model: str) -> None:
    async def ask() -> list[Any]:
        async with AsyncLLM(model, num_device_blocks=12, offload=OffloadConfig(host_bytes="1MiB")) as llm:
            (out,) = await llm.generate(PROMPT, ONE, hints=Hint.pin(ttl_s=60, lease="a"))
            return [out.hint_outcomes[0].status, (await llm.hint(Hint.release("a")))[0].status]

    assert asyncio.run(ask()) == [HintStatus.ACCEPTED, HintStatus.ACCEPTED]


class _Hostile:
    """An object whose attributes cannot be read."""

    @property
    def actions(self) -> None:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "given",
    [
        42,
        "pin",
        b"\x00",
        {},
        {"actions": None},
        {"protocol_version": "1", "message_id": "m", "actions": 7},
        {"protocol_version": "2", "message_id": "m", "actions": [{"action_id": "a", "action_type": "pin"}]},
        [{"action_id": "a", "action_type": "explode", "action_version": "1", "payload": {}}],
        [{"action_id": "a", "action_type": ["pin"], "action_version": "1", "payload": {}}],
        [{"action_id": "a", "action_type": "pin", "action_version": "9", "payload": {}}],
        [{"action_id": "a", "action_type": "pin", "action_version": "1", "payload": {"ttl_s": "soon"}}],
        [{"action_id": "a", "action_type": "pin", "action_version": "1", "payload": {"ttl_s": float("nan")}}],
        [{"action_id": "a", "action_type": "pin", "action_version": "1", "payload": {"ttl_s": True}}],
        [{"action_id": "a", "action_type": "pin", "action_version": "1", "payload": {"lease": "x" * 1000}}],
        [{"action_id": "a", "action_type": "pin", "action_version": "1", "payload": {"colour": "red"}}],
        [{"action_id": "a", "action_type": "pin", "action_version": "1", "payload": {"tokens": [5]}}],
        [{"action_id": "a", "action_type": "pin", "action_version": "1", "payload": {"tokens": [5, 2]}}],
        [{"action_id": "a", "action_type": "pin", "action_version": "1", "payload": [1]}],
        [{"action_id": "a", "action_type": "pin", "action_version": "1", "payload": {1: 2}}],
        [{"action_id": "a", "action_type": "retain", "action_version": "1", "payload": {"priority": 101}}],
        [{"action_id": 7, "action_type": "release", "action_version": "1", "payload": {"to": "host"}}],
        [{"action_id": "a", "action_type": "pin", "action_version": "1", "payload": {"ttl_s": 10**400}}],
        [{"action_id": "a", "action_type": "prefetch", "action_version": "1", "payload": {"deadline_s": 10**400}}],
        [{"action_id": "a", "action_type": "pin", "action_version": "1", "payload": {"token_ids": [2**32]}}],
        [None],
        _Hostile(),
    ],
)
def test_what_is_no_hint_is_rejected_and_never_raises(given: object) -> None:
    hints, outcomes = parse_hints(given)
    assert not hints
    assert [outcome.status for outcome in outcomes] == [HintStatus.REJECTED]
    assert outcomes[0].reason
    assert len(str(outcomes[0])) < 400


def test_malformed_hints_do_not_fail_their_request(llm: SettledLLM) -> None:
    (plain,) = llm.generate(PROMPT, ONE)
    (out,) = llm.generate(PROMPT, ONE, hints={"actions": [{"action_id": "x", "action_type": "pin", "payload": 3}]})
    assert out.token_ids == plain.token_ids
    assert [outcome.status for outcome in out.hint_outcomes] == [HintStatus.REJECTED]


@pytest.mark.parametrize("num_more", [1, 3, 100_000])
def test_one_outcome_for_all_that_are_too_many_and_for_repeated_names(num_more: int) -> None:
    action = {"action_type": "retain", "action_version": "1", "payload": {}}
    hints, outcomes = parse_hints([{**action, "action_id": str(at)} for at in range(MAX_HINTS + num_more)])
    assert (len(hints), len(outcomes)) == (MAX_HINTS, 1)
    assert outcomes[0].status is HintStatus.REJECTED and str(MAX_HINTS + num_more) in outcomes[0].reason
    hints, outcomes = parse_hints([{**action, "action_id": "same"}, {**action, "action_id": "same"}])
    assert (len(hints), [outcome.action_id for outcome in outcomes]) == (1, ["same"])


def test_a_hint_with_tokens_of_its_own_is_about_that_prefix(llm: SettledLLM) -> None:
    """A request may carry a hint about another prompt, such as that of the next turn."""

    def carried(token_ids: object) -> list[HintStatus]:
        action = {"action_id": "a", "action_type": "pin", "action_version": "1", "payload": {"token_ids": token_ids}}
        envelope = {"protocol_version": "1", "message_id": "m", "actions": [action]}
        (out,) = llm.generate([[9] * 40], SamplingParams(max_tokens=2), hints=envelope)
        return [outcome.status for outcome in out.hint_outcomes]

    known, unknown = [3] * 40, [4] * 40
    llm.generate([known], SamplingParams(max_tokens=2))
    llm.settle()
    assert carried(known) == [HintStatus.ACCEPTED]
    assert carried(unknown) == [HintStatus.MISSING]
    assert carried("text") == [HintStatus.REJECTED]
    assert llm.stats()[metrics.PINNED_CHUNKS] == 40 // 16


def test_a_second_action_of_the_same_name_does_not_change_what_the_first_is_about(llm: SettledLLM) -> None:
    def action(**payload: object) -> dict[str, object]:
        return {"action_id": "a", "action_type": "pin", "action_version": "1", "payload": payload}

    envelope = {"protocol_version": "1", "message_id": "m", "actions": [action(), action(token_ids=[4] * 40)]}
    (out,) = llm.generate([[9] * 40], SamplingParams(max_tokens=2), hints=envelope)
    assert {outcome.status for outcome in out.hint_outcomes} == {HintStatus.REJECTED, HintStatus.ACCEPTED}


@pytest.mark.parametrize("token_id", [259, 2**31, 2**32 - 1, 2**32, 2**63, 2**64])
def test_a_hint_about_a_prompt_that_cannot_be_is_rejected_and_its_request_served(
    llm: SettledLLM, token_id: int
) -> None:
    """With 2**32, its request failed and ran on to its last token, and nobody could end it."""
    action = {"action_type": "retain", "payload": {"token_ids": [token_id] * 40}}
    (out,) = llm.generate(PROMPT, ONE, hints=[action])
    assert [outcome.status for outcome in out.hint_outcomes] == [HintStatus.REJECTED]
    assert "token_ids" in out.hint_outcomes[0].reason
    assert (out.finish_reason, in_engine(llm, lambda engine: engine.num_unfinished)) == ("length", 0)


def test_hints_of_one_request_name_no_more_tokens_than_a_prompt_may_have(llm: SettledLLM) -> None:
    most = llm.plan.scheduler.max_model_len
    hints = [Hint.retain(token_ids=(5,) * (most - 3)), Hint.retain(token_ids=(5,) * 4), Hint.retain()]
    (out,) = llm.generate(PROMPT, ONE, hints=hints)
    reasons = {outcome.action_id: outcome.reason for outcome in out.hint_outcomes}
    assert "more than a prompt may have" in reasons[hints[1].action_id]
    assert not any("more than" in reasons[hints[at].action_id] for at in (0, 2))


class _EndsTheProgram(NullConnectorScheduler):
    """Raises what no guard contains."""

    def on_hints(self, request: RequestView, hints: Sequence[Hint]) -> Sequence[HintOutcome]:
        raise SystemExit


def test_a_request_whose_hints_raise_is_not_queued(model: str) -> None:
    def num_queued(engine: LLMEngine) -> int:
        for hint in (Hint.pin(), Hint.pin(token_ids=(5,) * 40)):
            with pytest.raises(SystemExit):
                engine.add_request(PROMPT, ONE, hints=hint)
        return engine.num_unfinished

    offload = ClassFactory(lambda _: _EndsTheProgram(), lambda _: NullConnectorWorker())
    with SettledLLM(model, num_device_blocks=12, offload=offload) as llm:
        assert in_engine(llm, num_queued) == 0
