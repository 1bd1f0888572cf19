"""Values that clients give: subclasses of numbers and text, numbers beyond all bounds, mappings with a life of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum, IntEnum
from typing import Any

import numpy as np
import pytest

from cargohold import LLM, OffloadConfig, RequestError, SamplingParams
from cargohold.engine.llm_engine import LLMEngine
from cargohold.protocol import metrics

MakeLLM = Callable[..., LLM]
PROMPT = list(range(5, 45))


class Tenant(str, Enum):  # noqa: UP042  # of a StrEnum, str() would be the value
    ANNE = "anne"


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class Seed(IntEnum):
    FIVE = 5


ODD = SamplingParams(
    max_tokens=Number(3),
    temperature=np.float64(0.7),
    top_k=Number(40),
    top_p=np.float64(0.5),
    seed=Seed.FIVE,
    stop_token_ids=[Number(198)],
)
PLAIN = SamplingParams(max_tokens=3, temperature=0.7, top_k=40, top_p=0.5, seed=5, stop_token_ids=[198])


@pytest.fixture
def llama(tiny_model: Callable[[str], str], make_llm: MakeLLM) -> MakeLLM:
    return lambda **options: make_llm(tiny_model("llama"), num_device_blocks=64, **options)


def test_sampling_parameters_are_of_the_declared_types_whatever_they_were_made_of() -> None:
    fields = [getattr(ODD, field) for field in ("max_tokens", "temperature", "top_k", "top_p", "seed")]
    assert [type(value) for value in fields] == [int, float, int, float, int]
    assert PLAIN == ODD
    assert [type(token_id) for token_id in ODD.stop_token_ids] == [int]
    assert type(SamplingParams(temperature=1).temperature) is float
    for stop in (Tenant.ANNE, [Text("anne")], [np.str_("anne")]):
        (text,) = SamplingParams(stop=stop).stop
        assert (text, type(text)) == ("anne", str)


@pytest.mark.usefixtures("forked_ranks")
def test_values_of_subclasses_do_not_end_an_engine_with_workers_in_other_processes(llama: MakeLLM) -> None:
    """Found by a review: each of them passed the checks, could not be sent, and ended the engine for everybody."""
    llm = llama(executor="multiprocess")
    expected = llm.generate([PROMPT], PLAIN)[0].token_ids
    for value in (np.str_("a"), Text("b"), Tenant.ANNE):
        (output,) = llm.generate([PROMPT], ODD, request_id=value, salt=value, priority=Number(1))
        assert output.token_ids == expected
        assert (output.request_id, type(output.request_id)) == (str.__str__(value), str)


@pytest.mark.parametrize("salt", [np.str_("anne"), Text("anne"), Tenant.ANNE])
def test_a_salt_of_a_subclass_is_the_text_and_turns_nothing_off(salt: str, llama: MakeLLM) -> None:
    llm = llama(kv_events=True, block_tokens=4, offload=OffloadConfig(host_bytes="1MiB"))
    hits = [
        llm.generate([PROMPT], SamplingParams(max_tokens=2), salt=value)[0].metrics.device_tokens
        for value in (salt, "anne", salt, None)
    ]
    assert hits == [0, 36, 36, 0]
    assert metrics.FAILURES.of("connector_off") not in llm.stats()


def test_a_request_is_aborted_by_the_member_of_an_enumeration_that_is_its_id(llama: MakeLLM) -> None:
    llm = llama()
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=150), request_id=Tenant.ANNE)
    assert next(stream).request_id == "anne"
    with pytest.raises(RequestError, match="request anne: a request with this id is being served already"):
        llm.generate([PROMPT], request_id=Tenant.ANNE)
    llm.abort(Tenant.ANNE)
    (*_, last) = stream
    assert last.finish_reason == "abort"


@pytest.mark.parametrize("temperature", [2**64, 10**300])
def test_temperatures_that_no_integer_of_64_bits_holds_are_served(temperature: int, llama: MakeLLM) -> None:
    """Found by a review: they ended the engine."""
    (output,) = llama().generate([PROMPT], SamplingParams(max_tokens=2, temperature=temperature))
    assert len(output.token_ids) == 2


class FromAfar(Mapping[str, Any]):
    """Reads its values from a service that is away."""

    def __getitem__(self, key: str) -> Any:
        raise ConnectionError("the service is away")

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        return iter(["max_load_tokens"])


def test_parameters_that_cannot_be_read_are_the_fault_of_their_client_alone(llama: MakeLLM) -> None:
    """Found by a review: the connector that read them was turned off, for everybody."""
    llm = llama(offload=OffloadConfig(host_bytes="1MiB"))
    with pytest.raises(RequestError, match="kv_transfer_params cannot be read: the service is away"):
        llm.generate([PROMPT], kv_transfer_params=FromAfar())
    assert llm.generate([PROMPT], SamplingParams(max_tokens=2))[0].finish_reason == "length"
    assert metrics.FAILURES.of("connector_off") not in llm.stats()


def test_parameters_that_change_while_the_request_is_served_change_nothing(
    tiny_model: Callable[[str], str], make_engine: Callable[..., LLMEngine]
) -> None:
    engine = make_engine(tiny_model("llama"), block_tokens=4, offload=OffloadConfig(host_bytes="1MiB"))
    params: dict[str, Any] = {"max_store_tokens": 0}
    engine.add_request(PROMPT, SamplingParams(max_tokens=2), kv_transfer_params=params)
    params["max_store_tokens"] = "nonsense"
    while engine.has_work():
        engine.step()
    assert engine.stats().get(metrics.STORED.of("host"), 0) == 0
