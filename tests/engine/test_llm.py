"""What a user of the library sees of the engine: priorities, endings, aborts in every state, seeds."""

from __future__ import annotations

import gc
import json
import random
import shutil
import threading
from collections.abc import Callable, Generator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import AddedToken, AutoTokenizer

from cargohold import (
    LLM,
    ConfigError,
    DiskTierConfig,
    EngineDeadError,
    OffloadConfig,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from cargohold.deadlines import LOCK
from cargohold.engine.llm_engine import LLMEngine
from cargohold.protocol import (
    AllBlocksCleared,
    BlockIds,
    ClassFactory,
    EmptyMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    RequestView,
    StepView,
    metrics,
)
from cargohold.protocol.checks import AnnouncedBlocks
from cargohold.protocol.connector import NullConnectorScheduler, NullConnectorWorker
from tests.llms import in_engine, scheduler_of
from tests.models import VOCAB_SIZE

MakeLLM = Callable[..., LLM]
MakeEngine = Callable[..., LLMEngine]


def prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCAB_SIZE) for _ in range(length)]


@pytest.fixture
def llama(tiny_model: Callable[[str], str], make_llm: MakeLLM) -> MakeLLM:
    def make(**options: Any) -> LLM:
        return make_llm(tiny_model("llama"), **{"block_tokens": 4, **options})

    return make


@pytest.fixture
def llama_engine(tiny_model: Callable[[str], str], make_engine: MakeEngine) -> MakeEngine:
    def make(**options: Any) -> LLMEngine:
        return make_engine(tiny_model("llama"), **{"block_tokens": 4, **options})

    return make


# --- who is served first ----------------------------------------------------------------------------------------------


def finish_order(engine: LLMEngine, priorities: Sequence[int]) -> list[int]:
    """Positions of requests in the order in which they end, all asked for at once, served one at a time."""
    ids = [
        engine.add_request(prompt(at, 10), SamplingParams(max_tokens=3), priority=p) for at, p in enumerate(priorities)
    ]
    order: list[int] = []
    while engine.has_work():
        order += [ids.index(output.request_id) for output in engine.step() if output.finished]
    return order


def test_lower_priority_numbers_are_served_first_and_equals_in_order(llama_engine: MakeEngine) -> None:
    assert finish_order(llama_engine(max_num_seqs=1, queue_policy="priority"), [5, 0, 5, -3, 0]) == [3, 1, 4, 0, 2]


def test_first_come_first_served_ignores_priorities(llama_engine: MakeEngine) -> None:
    assert finish_order(llama_engine(max_num_seqs=1), [5, 0, 5, -3, 0]) == [0, 1, 2, 3, 4]


# --- how requests end -------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_the_request_and_is_the_last_of_its_tokens(llama: MakeLLM) -> None:
    llm = llama()
    (whole,) = llm.generate(prompt(0, 12), SamplingParams(max_tokens=20))
    stop = whole.token_ids[7]
    (output,) = llm.generate(prompt(0, 12), SamplingParams(max_tokens=20, stop_token_ids=[stop]))
    assert output.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert output.finish_reason == "stop"
    assert whole.finish_reason == "length"


def test_a_request_ends_at_the_longest_sequence(llama: MakeLLM) -> None:
    (output,) = llama(max_model_len=20).generate(prompt(0, 12), SamplingParams(max_tokens=100))
    assert len(output.token_ids) == 8
    assert output.finish_reason == "length"


def test_the_end_of_sequence_token_ends_a_request_unless_it_is_told_to_ignore_it(
    chat_model: str, make_llm: MakeLLM, tmp_path: Path
) -> None:
    sampling = SamplingParams(max_tokens=12)
    (free,) = make_llm(chat_model).generate("Once upon a time", sampling)
    eos = free.token_ids[4]
    talkative = shutil.copytree(chat_model, tmp_path / "talkative")
    (talkative / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos]}), encoding="utf-8")
    llm = make_llm(str(talkative))
    (ended,) = llm.generate("Once upon a time", sampling)
    (ignoring,) = llm.generate("Once upon a time", replace(sampling, ignore_eos=True))
    assert ended.token_ids == free.token_ids[: free.token_ids.index(eos) + 1]
    assert ended.finish_reason == "stop"
    assert free.text.startswith(ended.text) and len(ended.text) < len(free.text)
    assert ignoring.token_ids == free.token_ids


def test_a_stop_string_that_is_a_special_token_stops_at_that_token(
    chat_model: str, make_llm: MakeLLM, tmp_path: Path
) -> None:
    (free,) = make_llm(chat_model).generate("Once upon a time", SamplingParams(max_tokens=12))
    stop_id = free.token_ids[4]
    special = shutil.copytree(chat_model, tmp_path / "special")
    tokenizer = AutoTokenizer.from_pretrained(special)
    stop = tokenizer.convert_ids_to_tokens(stop_id)
    tokenizer.add_tokens([AddedToken(stop, special=True, normalized=False)], special_tokens=True)
    tokenizer.save_pretrained(special)
    (ended,) = make_llm(str(special)).generate(
        "Once upon a time", SamplingParams(max_tokens=12, stop=["nothing", stop])
    )
    assert ended.token_ids == free.token_ids[: free.token_ids.index(stop_id) + 1]
    assert ended.finish_reason == "stop"


@pytest.mark.parametrize(
    "offload", [None, OffloadConfig(host_bytes="8MiB"), OffloadConfig(mode="lazy", host_bytes="8MiB")]
)
def test_an_abort_in_any_state_leaves_nothing_behind(offload: Any, llama_engine: MakeEngine) -> None:
    # Room for little more than one request: some wait, run in chunks, generate, are preempted, or wait for loads.
    engine = llama_engine(offload=offload, num_device_blocks=24, max_model_len=80, max_num_batched_tokens=16)
    prompts = [prompt(at, 40) for at in range(3)]
    ended: dict[str, RequestOutput] = {}

    def ask() -> list[str]:
        return [engine.add_request(tokens, SamplingParams(max_tokens=16)) for tokens in prompts]

    def step() -> None:
        ended.update({output.request_id: output for output in engine.step() if output.finished})

    def answers() -> list[tuple[int, ...]]:
        ids = ask()
        while engine.has_work():
            step()
        return [ended.pop(request_id).token_ids for request_id in ids]

    expected = answers()
    for num_steps in (0, 1, 4, 7, 11, 16):
        ids = ask()
        for _ in range(num_steps):
            step()
        for request_id in (*ids, *ids, "never heard of"):
            engine.abort(request_id)
        while engine.has_work():
            step()
        assert ended.keys() == set(ids), "every request has one last output"
        for request_id, tokens in zip(ids, expected, strict=True):
            output = ended[request_id]
            assert output.finish_reason == ("length" if len(output.token_ids) == 16 else "abort")
            assert output.token_ids == tokens[: len(output.token_ids)]
        engine.scheduler.check_settled()
        ended.clear()
    assert answers() == expected


def test_a_stream_closed_early_is_aborted(llama: MakeLLM) -> None:
    llm = llama()
    stream = llm.stream(prompt(0, 10), SamplingParams(max_tokens=150))
    first = next(stream)
    assert not first.finished
    stream.close()
    assert llm.settle()
    assert in_engine(llm, LLMEngine.has_work) is False


def test_a_request_may_be_aborted_by_its_id_from_another_thread(llama: MakeLLM) -> None:
    llm = llama()
    sampling = SamplingParams(max_tokens=150)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(llm.generate, prompt(0, 10), sampling, request_id="long")
        while not in_engine(llm, lambda engine: engine.num_unfinished):
            pass
        llm.abort("another")
        llm.abort("long")
        (output,) = waiting.result(timeout=60)
    assert (output.request_id, output.finish_reason) == ("long", "abort")
    assert len(output.token_ids) < 150
    llm.abort("long")
    (whole,) = llm.generate(prompt(0, 10), SamplingParams(max_tokens=9), request_id="longer")
    assert len(whole.token_ids) == 9


def test_streams_may_be_read_in_turn(llama: MakeLLM) -> None:
    llm = llama()
    sampling = SamplingParams(max_tokens=6)
    alone = [llm.generate(prompt(at, 10), sampling)[0].token_ids for at in range(2)]
    streams = [llm.stream(prompt(at, 10), sampling) for at in range(2)]
    seen = list(zip_longest(*streams))
    lasts = [[output for output in outputs if output is not None][-1] for outputs in zip(*seen, strict=True)]
    assert [last.token_ids for last in lasts] == alone
    assert all(output.finished for output in lasts)


def test_of_a_stream_that_is_not_read_one_output_is_kept(chat_model: str, make_llm: MakeLLM) -> None:
    """Found by reading: each has the whole text so far, so unread ones took memory with the square of an answer's length."""
    llm = make_llm(chat_model, num_device_blocks=40)
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    whole = llm.generate("a slow reader", sampling)[0]
    slow = llm.stream("a slow reader", sampling)
    first = next(slow)
    assert list(llm.stream("a fast one", sampling))[-1].finished
    outputs = [first, *slow]
    last = outputs[-1]
    assert len(outputs) <= 3 and last.finished
    assert (last.text, last.token_ids) == (whole.text, whole.token_ids)
    assert whole.text and "".join(output.new_text for output in outputs) == whole.text


def test_several_threads_may_ask_at_the_same_time(llama: MakeLLM) -> None:
    """Found by trying: the engine had stopped, for "the last step's output was not handed in"."""
    llm = llama(offload=OffloadConfig(host_bytes="1MiB"))
    prompts = [prompt(seed, 30) for seed in range(8)]
    expected = llama().generate(prompts, SamplingParams(max_tokens=12))

    def ask(at: int) -> list[bool]:
        right = []
        for turn in range(3):
            if turn == at % 3:
                outputs = list(llm.stream(prompts[at], SamplingParams(max_tokens=12)))
            else:
                outputs = llm.generate([prompts[at]], SamplingParams(max_tokens=12))
            llm.stats()
            right.append(outputs[-1].token_ids == expected[at].token_ids)
        return right

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(8))) == [[True] * 3] * 8


class Collecting(NullConnectorScheduler):
    """Has the garbage collector run where it may run anyway: in the middle of a step."""

    def build_connector_meta(self, step: StepView) -> KVConnectorMetadata:
        gc.collect()
        return EmptyMetadata()


def test_a_stream_that_the_garbage_collector_closes_in_the_middle_of_a_step_harms_nobody(llama: MakeLLM) -> None:
    """Found by trying: its request was gone when the connector was told of its tokens, which turned the connector off."""
    collecting = ClassFactory(lambda _: Collecting(), lambda _: NullConnectorWorker())
    llm = llama(offload=[collecting, OffloadConfig(host_bytes="1MiB")])
    expected = llama().generate([prompt(1, 30)], SamplingParams(max_tokens=9))[0].token_ids
    gc.disable()  # so that it runs in that step, and not before
    try:
        forget_in_a_cycle(llm.stream(prompt(0, 30), SamplingParams(max_tokens=50)))
        assert llm.generate([prompt(1, 30)], SamplingParams(max_tokens=9))[0].token_ids == expected
    finally:
        gc.enable()
    assert llm.settle()
    assert llm.status.num_running == 0
    assert not llm.stats()[metrics.FAILURES.of("connector_off")._replace(connector="offloading")]


def forget_in_a_cycle(stream: Generator[RequestOutput]) -> None:
    """Read the beginning of a stream, and leave it to the garbage collector: as does who keeps an exception."""
    next(stream)
    cycle: list[object] = [stream]
    cycle.append(cycle)


def test_an_id_that_is_made_up_is_nobody_elses(llama_engine: MakeEngine) -> None:
    engine = llama_engine()
    for at in (1, 2, 4):
        engine.add_request(prompt(at, 5), request_id=f"request-{at}")
    made_up = [engine.add_request(prompt(at, 5)) for at in range(3)]
    assert made_up == ["request-3", "request-5", "request-6"]


def test_progress_counts_the_prompts_done(llama: MakeLLM) -> None:
    seen: list[tuple[int, int]] = []
    llama().generate(
        [prompt(at, 5 + at) for at in range(3)],
        SamplingParams(max_tokens=2),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_closed_model_says_so(llama: MakeLLM) -> None:
    llm = llama()
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="it was shut down"):
        llm.generate(prompt(0, 5))


def test_a_closed_model_leaves_no_thread_and_no_open_file(tiny_model: Callable[[str], str], tmp_path: Path) -> None:
    disk = DiskTierConfig(directory=tmp_path, max_bytes="1MiB", reserve_bytes=0)
    offload: list[OffloadConfig] = [
        OffloadConfig(host_bytes="1MiB", tiers=[disk]),
        OffloadConfig(mode="lazy", host_bytes="1MiB"),
    ]
    left = []
    for number in range(3):
        with LLM(tiny_model("llama"), offload=offload, record=tmp_path / f"{number}.jsonl") as llm:
            llm.generate(prompt(number, 60), SamplingParams(max_tokens=2))
            next(llm.stream(prompt(number, 60), SamplingParams(max_tokens=9)))
        left.append((threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))))
    assert left[1] == left[2], "the first may have loaded a library that keeps some"


def test_a_model_that_is_forgotten_is_stopped_in_the_background(
    tiny_model: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, whose cells run again. Its threads kept KV, host memory and the disk's directory."""
    monkeypatch.setattr("cargohold.tiers.disk.shard.LOCK", replace(LOCK, plus_s=60.0))
    before = set(threading.enumerate())
    disk = DiskTierConfig(directory=tmp_path, max_bytes="1MiB", reserve_bytes=0)
    offload = OffloadConfig(host_bytes="1MiB", tiers=[disk], restore="always")
    llm = LLM(tiny_model("llama"), offload=offload)
    llm.generate(prompt(0, 60), SamplingParams(max_tokens=2))
    threads = [one for one in set(threading.enumerate()) - before if one.name.startswith("cargohold")]
    assert threads
    del llm
    with LLM(tiny_model("llama"), offload=offload) as another:
        (answer,) = another.generate(prompt(0, 60), SamplingParams(max_tokens=2))
    assert answer.metrics.restored_tokens["disk"] > 0
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), thread.name


class AskedForEvents(NullConnectorScheduler):
    """Counts how often it is asked for events."""

    num_asked = 0

    def take_events(self) -> tuple[()]:
        type(self).num_asked += 1
        return ()


@pytest.mark.parametrize("kv_events", [False, True])
def test_a_connector_is_asked_for_events_in_each_step_if_somebody_listens(
    kv_events: bool, llama: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AskedForEvents, "num_asked", 0)
    llm = llama(kv_events=kv_events, offload=ClassFactory(lambda _: AskedForEvents(), lambda _: NullConnectorWorker()))
    llm.generate(prompt(0, 5), SamplingParams(max_tokens=3))
    assert AskedForEvents.num_asked >= 3 if kv_events else AskedForEvents.num_asked == 0


def test_events_that_nobody_takes_are_dropped_and_an_index_of_them_has_nothing_that_is_not_there(
    llama: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by a soak: a program that stopped taking them lost memory with every block, for as long as it lived."""
    monkeypatch.setattr("cargohold.engine.llm_engine.MAX_KEPT_EVENTS", 60)
    llm = llama(num_device_blocks=30, kv_events=True, offload=OffloadConfig(host_bytes="1MiB"))
    for seed in range(20):
        llm.generate(prompt(seed, 40), SamplingParams(max_tokens=4))
    assert not in_engine(llm, lambda engine: engine.scheduler.take_events()), "they were taken with each step"
    events = llm.take_events()
    assert 0 < len(events) <= 62
    assert events[:2] == [AllBlocksCleared("CPU"), AllBlocksCleared("GPU")]
    index = AnnouncedBlocks()
    index.follow(events)
    llm.generate(
        prompt(20, 40), SamplingParams(max_tokens=4)
    )  # those before may all have been dropped: stores take time
    index.follow(llm.take_events())
    assert llm.take_events() == []
    known = {block_hash for event in index.withdraw() if event.medium == "GPU" for block_hash in event.block_hashes}
    pool = scheduler_of(llm).kv.pool
    assert known and all(pool.contains(block_hash, 0) for block_hash in known)


def test_memory_is_added_up_before_the_model_is_loaded(llama: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by a newcomer: each part was compared with the machine's memory alone, and the sum would have filled it."""
    monkeypatch.setattr("cargohold.base_llm.memory_limit_bytes", lambda: 10 * 1024**2)
    monkeypatch.setattr("cargohold.base_llm.build_engine", Mock(side_effect=AssertionError("the model was loaded")))
    offload = [OffloadConfig(host_bytes="4MiB"), OffloadConfig(mode="lazy", host_bytes="5MiB")]
    with pytest.raises(ConfigError, match=r"host_bytes='9.0 MiB'.*device pool of .* more than the 10 MiB"):
        llama(num_device_blocks=1000, offload=offload)


# --- what is drawn ----------------------------------------------------------------------------------------------------


def test_a_seed_decides_whatever_the_request_is_batched_with(llama: MakeLLM) -> None:
    sampling = [SamplingParams(max_tokens=16, temperature=1.2, top_k=20, seed=seed) for seed in range(4)]
    prompts = [prompt(at, 10 + 9 * at) for at in range(4)]
    alone = [llama(prefix_caching=False).generate(*pair)[0].token_ids for pair in zip(prompts, sampling, strict=True)]
    crowded = llama(max_num_batched_tokens=16, num_device_blocks=24, max_model_len=80)
    outputs = crowded.generate(prompts, sampling)
    assert [output.token_ids for output in outputs] == alone
    assert sum(output.metrics.preemptions for output in outputs) > 0, "the pool was not small enough"


def test_without_a_seed_every_request_draws_its_own(llama: MakeLLM) -> None:
    outputs = llama().generate([prompt(0, 10)] * 3, SamplingParams(max_tokens=16, temperature=2.0))
    assert len({output.token_ids for output in outputs}) == 3


def test_each_prompt_may_have_its_own_sampling(llama: MakeLLM) -> None:
    outputs = llama().generate([prompt(0, 5)] * 2, [SamplingParams(max_tokens=2), SamplingParams(max_tokens=5)])
    assert [len(output.token_ids) for output in outputs] == [2, 5]


# --- what is reused ---------------------------------------------------------------------------------------------------


def test_metrics_say_where_the_prompt_came_from(llama: MakeLLM) -> None:
    llm = llama(num_device_blocks=24, offload=OffloadConfig(host_bytes="8MiB"))
    first, other = prompt(1, 42), prompt(2, 80)
    metrics = [llm.generate(tokens, SamplingParams(max_tokens=1))[0].metrics for tokens in (first, first, other, first)]
    assert [(one.device_tokens, dict(one.restored_tokens)) for one in metrics[:3]] == [(0, {}), (40, {}), (0, {})]
    back = metrics[3]
    assert back.device_tokens + back.restored_tokens["host"] == 40 and back.restored_tokens["host"] > 0
    assert back.ttft_s is not None and back.total_s is not None and 0 <= back.load_wait_s <= back.ttft_s <= back.total_s


def test_salts_keep_what_is_cached_apart(llama: MakeLLM) -> None:
    llm = llama()
    hits = [
        llm.generate(prompt(0, 40), SamplingParams(max_tokens=1), salt=salt)[0].metrics.device_tokens
        for salt in ("a", "a", "b", None, "b")
    ]
    assert hits == [0, 36, 0, 0, 36]


def test_reset_forgets_the_device_and_the_host(llama: MakeLLM) -> None:
    llm = llama(num_device_blocks=24, offload=OffloadConfig(host_bytes="8MiB"))
    for seed in (1, 2, 3):
        llm.generate(prompt(seed, 70), SamplingParams(max_tokens=1))
    assert llm.reset_cache()
    metrics = llm.generate(prompt(1, 70), SamplingParams(max_tokens=1))[0].metrics
    assert (metrics.device_tokens, dict(metrics.restored_tokens)) == (0, {})


class Keeping(NullConnectorScheduler):
    """Keeps the blocks of every request that ends, until a step says that they are sent."""

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, None]:
        return True, None


class Sending(NullConnectorWorker):
    """Has sent the blocks of a request as soon as it hears of its end; or never."""

    def __init__(self, ends: bool) -> None:
        self._ends = ends

    def get_transfer_results(self, finished_req_ids: AbstractSet[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults(finished_sending=frozenset(finished_req_ids) if self._ends else frozenset())


def test_a_reset_waits_for_the_transfers_of_requests_that_have_been_given_up(llama: MakeLLM) -> None:
    """Found by a review: nobody made the steps that end them, so it failed for as long as nothing else was asked for."""
    llm = llama(offload=ClassFactory(lambda _: Keeping(), lambda _: Sending(ends=True)))
    unread = llm.stream(prompt(2, 40), SamplingParams(max_tokens=2))
    given_up = llm.stream(prompt(1, 40), SamplingParams(max_tokens=150))
    first = next(unread)  # the last one, if both tokens were there before it was read
    next(given_up)
    assert not llm.reset_cache(), "requests are being served"
    given_up.close()
    assert [first, *unread][-1].finish_reason == "length"
    assert llm.reset_cache()
    assert llm.generate(prompt(1, 40), SamplingParams(max_tokens=1))[0].metrics.device_tokens == 0


def test_a_reset_does_not_wait_for_ever(llama: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cargohold.base_llm.load_timeout_s", lambda _: 0.1)
    llm = llama(offload=ClassFactory(lambda _: Keeping(), lambda _: Sending(ends=False)))
    llm.generate(prompt(0, 10), SamplingParams(max_tokens=2))
    assert not llm.reset_cache()
    in_engine(
        llm, lambda engine: engine.scheduler.connector.break_off("was never done")
    )  # or closing it would wait, too


class NeverDone(NullConnectorScheduler):
    """Says for ever that work is pending."""

    def has_pending_work(self) -> bool:
        return True


def test_nobody_waits_for_ever_for_a_connector_that_is_never_done(
    llama: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cargohold.base_llm.load_timeout_s", lambda _: 0.1)
    factory = ClassFactory(lambda _: NeverDone(), lambda _: NullConnectorWorker())
    llm = llama(offload=factory)
    for _ in range(2):
        (output,) = llm.generate(prompt(0, 10), SamplingParams(max_tokens=3))
        assert len(output.token_ids) == 3
    in_engine(
        llm, lambda engine: engine.scheduler.connector.break_off("was never done")
    )  # or closing it would wait, too


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"prompts": []}, None),
        ({"prompts": [[]]}, "the prompt is empty"),
        ({"prompts": "text"}, "this model has no tokenizer; give the prompt as token ids"),
        ({"prompts": [1, 2, VOCAB_SIZE]}, f"token id {VOCAB_SIZE} is not an integer from 0 to {VOCAB_SIZE - 1}"),
        ({"prompts": [1, -1]}, "token id -1 is not an integer"),
        ({"prompts": [1, 2.5]}, "token id 2.5 is not an integer"),
        ({"prompts": [[1], [True]]}, "prompt 2 of 2: token id True is not an integer"),
        ({"prompts": [[1], [2, None]]}, "prompt 2 of 2: token id None is not an integer"),
        ({"prompts": 7}, "a prompt is text or a list of token ids, not int"),
        ({"prompts": b"abc"}, "a prompt is text or a list of token ids, not bytes"),
        ({"prompts": {"prompt": "text"}}, "a prompt is text or a list of token ids, not dict"),
        ({"prompts": torch.tensor([1, 2])}, "a prompt is text or a list of token ids, not Tensor"),
        ({"prompts": torch.tensor(4)}, "a prompt is text or a list of token ids, not Tensor"),
        ({"prompts": np.array(4)}, "a prompt is text or a list of token ids, not ndarray"),
        ({"prompts": [1] * 80}, "the prompt has 80 tokens; with one token to generate, at most 79 fit"),
        ({"prompts": [[1], [2]], "sampling": [SamplingParams()]}, "SamplingParams are for 1 of 2 prompts"),
        ({"prompts": [1], "sampling": {"max_tokens": 3}}, "it must be SamplingParams"),
        ({"prompts": [1], "sampling": SamplingParams(stop="x")}, "cannot stop at strings; use stop_token_ids"),
        ({"prompts": [1], "salt": 5}, "salt=5 is not possible: it must be text"),
        ({"prompts": [1], "salt": "\udc80"}, "salt='\\udc80' is not possible: it must be text"),
        ({"prompts": [1], "request_id": 5}, "request_id=5 is not possible: it must be text"),
        ({"prompts": [1], "request_id": "\udc80"}, "request_id='\\udc80' is not possible: it must be text"),
        ({"prompts": [1], "priority": "high"}, "priority='high' is not possible: it must be an integer"),
        ({"prompts": [1], "kv_transfer_params": 3}, "kv_transfer_params=3 is not possible: it must be a mapping"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_and_harm_nobody(
    arguments: dict[str, Any], expected: str | None, llama: MakeLLM
) -> None:
    llm = llama(max_model_len=80)
    if expected is None:
        assert llm.generate(**arguments) == []
        return
    with pytest.raises(RequestError) as raised:
        llm.generate(**arguments)
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not in_engine(llm, LLMEngine.has_work), "of several prompts none was started"
    assert len(llm.generate([1, 2, 3], SamplingParams(max_tokens=4))[0].token_ids) == 4


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user"}, "message 2 of 2 has no content: "),
        ({"content": "And now?"}, "message 2 of 2 has no role: "),
        ({"role": "user", "content": ["And now?"]}, "message 2 of 2 has a content that is no text: "),
        ("And now?", "message 2 of 2 is not a mapping but 'And now?': "),
    ],
)
def test_of_messages_that_cannot_be_the_wrong_one_is_named(
    message: Any, expected: str, chat_model: str, make_llm: MakeLLM
) -> None:
    with pytest.raises(RequestError) as raised:
        make_llm(chat_model).chat([{"role": "user", "content": "Hello"}, message])
    assert str(raised.value) == f"{expected}each message needs role and content, both text"


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"max_tokens": 5}, r"max_tokens=5 .* give sampling=SamplingParams\(max_tokens=...\) to METHOD"),
        ({"sampling_params": 5}, r"there is no such option of METHOD; did you mean sampling\?"),
        ({"kv_transfer_param": 5}, r"there is no such option of METHOD; did you mean kv_transfer_params\?"),
        (
            {"colour": "red"},
            "of METHOD; there are .*kv_transfer_params, .*priority, .*request_id, salt, sampling, .*tenant",
        ),
    ],
)
@pytest.mark.parametrize("method", ["generate", "stream", "chat"])
def test_an_option_that_there_is_not_is_told_by_the_name_of_the_method(
    method: str, option: dict[str, Any], expected: str, llama: MakeLLM
) -> None:
    with pytest.raises(ConfigError, match=expected.replace("METHOD", method)):
        getattr(llama(), method)([1, 2, 3], **option)


def test_a_token_that_the_tokenizer_has_and_the_model_has_not_is_refused_and_harms_nobody(
    chat_model: str, make_llm: MakeLLM, tmp_path: Path
) -> None:
    seeing = shutil.copytree(chat_model, tmp_path / "seeing")
    tokenizer = AutoTokenizer.from_pretrained(seeing)
    tokenizer.add_tokens(["<|image|>"], special_tokens=True)
    tokenizer.save_pretrained(seeing)
    llm = make_llm(str(seeing))
    with pytest.raises(RequestError, match=r"prompt 2 of 2: .* into token 800, which the model lacks: it has 800"):
        llm.generate(["Once upon a time", "Look at this: <|image|>"])
    with pytest.raises(RequestError, match="token id 800 is not an integer from 0 to 799"):
        llm.chat([{"role": "user", "content": "Look at this: <|image|>"}])
    assert len(llm.generate("Once upon a time", SamplingParams(max_tokens=4))[0].token_ids) == 4


def test_messages_that_a_chat_template_stumbles_over_are_refused(
    chat_model: str, make_llm: MakeLLM, tmp_path: Path
) -> None:
    calling = shutil.copytree(chat_model, tmp_path / "calling")
    tokenizer = AutoTokenizer.from_pretrained(calling)
    tokenizer.chat_template = "{% for message in messages %}{{ message.call | tojson }}{% endfor %}"
    tokenizer.save_pretrained(calling)
    llm = make_llm(str(calling))
    with pytest.raises(RequestError, match=r"the conversation does not fit the model's chat template: .* not JSON"):
        llm.chat([{"role": "assistant", "content": "I shall call somebody"}])
