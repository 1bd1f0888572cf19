"""Several ranks: the same steps in the same order everywhere, one output, and a clear end when a rank is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest

from cargohold import LLM
from cargohold.engine.core.request import SampleSpec, ScheduledTokens, SchedulerStep, StepOutput
from cargohold.engine.executor import Executor, InlineExecutor, RankPlace, Worker
from cargohold.engine.ranks import processes as processes_module
from cargohold.engine.ranks.processes import MultiprocessExecutor
from cargohold.engine.ranks.rank import RankSpec
from cargohold.engine.ranks.ray_actors import RayExecutor
from cargohold.engine.ranks.step_codec import StepCodec
from cargohold.errors import ConfigError, EngineDeadError, UnsupportedModelError
from cargohold.lab.simulation import simulated_layout
from cargohold.protocol import (
    ClassFactory,
    KVConnectorFactory,
    KVConnectorOutput,
    OutputAggregator,
    UndeliveredMetadata,
    WorkerEnvironment,
)
from tests.executor.ranks import (
    RANKS,
    Calls,
    CollectorWorker,
    CountlessWorker,
    NumpyWorker,
    Opaque,
    OpaqueWorker,
    ProbeMetadata,
    Probing,
    ProbingWorker,
    StubRunners,
    Trouble,
    Undeclared,
    UndeclaredWorker,
)
from tests.executor.split import OFFLOAD, OPTIONS, MakeModel, serve
from tests.forks import fork_server

LAYOUT = simulated_layout(20, windows=(None, 6), world_size=2)
ORDER = [
    "bind_connector_metadata",
    "handle_preemptions",
    "start_load_kv",
    *(f"{hook} layers.{layer}" for layer in (0, 1) for hook in ("wait_for_layer_load", "save_kv_layer")),
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "build_connector_worker_meta",
    "clear_connector_metadata",
]
"""The contract's table of the worker side."""


def step(number: int, *, empty: bool = False, metadata: Any = None) -> SchedulerStep:
    share = ScheduledTokens("r", (5, 6, 7), number * 3, 0, ([1, 2, 3], [0, 4, 5]), SampleSpec(index=number))
    return SchedulerStep(
        scheduled=() if empty else (share,),
        preempted_req_ids=frozenset({"p"}),
        finished_req_ids=frozenset({"f"}),
        connector_metadata=metadata or ProbeMetadata(number),
    )


NO_TROUBLE = Trouble()
PROBING = Probing()
MakeExecutor = Callable[..., Executor]


MANY = ["multiprocess", "ray"]
MOSTLY_PROCESSES = ["multiprocess", pytest.param("ray", marks=pytest.mark.long)]
"""Of what is the same code, over Ray in the long tests alone: its actors take seconds to start."""


@pytest.fixture
def make_executor(request: pytest.FixtureRequest) -> Iterator[MakeExecutor]:
    made: list[Executor] = []

    def make(
        kind: str,
        trouble: Trouble = NO_TROUBLE,
        step_timeout_s: float = 30.0,
        connectors: KVConnectorFactory = PROBING,
    ) -> Executor:
        runners = StubRunners(LAYOUT, trouble)
        if kind == "inline":
            runner = runners.make_runner(RankPlace(0, 1, ""))
            connector = connectors.make_worker_side(WorkerEnvironment(LAYOUT, 0, lambda: 0.0))
            made.append(InlineExecutor(Worker(runner, connector)))
        else:
            spec = RankSpec(runners, connectors, LAYOUT)
            codec = StepCodec(worker_metadata_type=Calls)
            if kind == "ray":
                request.getfixturevalue("ray_cluster")
                made.append(RayExecutor(spec, 2, codec, OutputAggregator(2), step_timeout_s=step_timeout_s))
            else:
                request.getfixturevalue("forked_ranks")
                made.append(MultiprocessExecutor(spec, 2, codec, OutputAggregator(2), step_timeout_s))
        return made[-1]

    yield make
    for executor in made:
        executor.shutdown()
        executor.shutdown()
    assert not multiprocessing.active_children(), "no process is left behind"


def calls_of(output: StepOutput) -> tuple[tuple[str, ...], ...]:
    meta = output.connector.kv_connector_worker_meta
    assert isinstance(meta, Calls)
    return meta.by_rank


@pytest.mark.parametrize("kind", ["inline", *MANY])
def test_workers_are_called_in_the_order_of_the_contract(kind: str, make_executor: MakeExecutor) -> None:
    """In its fourth forward pass a rank dies, which the engine names: a pair of actors takes seconds to start."""
    num_ranks = 1 if kind == "inline" else 2
    executor = make_executor(kind, NO_TROUBLE if kind == "inline" else Trouble("kill", "forward", 1, 3))
    seen: list[tuple[str, ...]] = [()] * num_ranks
    for number, empty in enumerate((False, True, False, False)):
        output = executor.execute(step(number, empty=empty))
        assert output.sampled == ({} if empty else {"r": number * 3 + 3})
        for rank, calls in enumerate(calls_of(output)):
            seen[rank] += calls
    with_layers, without = ORDER, [name for name in ORDER if " " not in name]
    expected = ["register_kv_caches", *with_layers, *without, *with_layers, *with_layers[:-1]]
    assert [list(calls) for calls in seen] == [expected] * num_ranks
    if kind != "inline":
        with pytest.raises(EngineDeadError, match="worker 1 died"):
            executor.execute(step(4))


def test_the_message_is_forgotten_last_also_when_the_forward_pass_raises(make_executor: MakeExecutor) -> None:
    executor = make_executor("inline", Trouble("raise", "forward", 0, 0))
    with pytest.raises(RuntimeError, match="the model broke"):
        executor.execute(step(0))
    (calls,) = calls_of(executor.execute(step(1)))
    first = [
        "register_kv_caches",
        "bind_connector_metadata",
        "handle_preemptions",
        "start_load_kv",
        "clear_connector_metadata",
    ]
    assert list(calls[: len(first)]) == first


@pytest.mark.parametrize("kind", MOSTLY_PROCESSES)
def test_jobs_end_when_the_last_rank_has_reported_them(kind: str, make_executor: MakeExecutor) -> None:
    executor = make_executor(kind)
    ended = [sorted(executor.execute(step(number)).connector.jobs) for number in range(4)]
    assert ended == [[], [0], [1], [2]], "rank 1 reports each a step later than rank 0"


@pytest.mark.parametrize("kind", MOSTLY_PROCESSES)
def test_stats_of_all_ranks_are_added_up(kind: str, make_executor: MakeExecutor) -> None:
    assert make_executor(kind).execute(step(0)).connector.kv_connector_stats == {RANKS: 2}


@pytest.mark.parametrize("kind", MOSTLY_PROCESSES)
def test_what_a_rank_has_loaded_is_never_looked_at_for_garbage(kind: str, make_executor: MakeExecutor) -> None:
    output = make_executor(kind, connectors=Probing(CollectorWorker)).execute(step(0))
    for calls in calls_of(output):
        assert "made while it is off" in calls
        assert "now it is on" in calls
        assert "it looks at later objects" in calls


def test_stats_that_were_counted_with_numpy_can_be_carried(make_executor: MakeExecutor) -> None:
    """Found by trying: the engine died of them."""
    output = make_executor("multiprocess", connectors=Probing(NumpyWorker)).execute(step(0))
    assert output.connector_error is None
    assert output.connector.kv_connector_stats == {RANKS: 2}


def test_a_connector_whose_report_cannot_be_carried_is_turned_off_alone(make_executor: MakeExecutor) -> None:
    executor = make_executor("multiprocess", connectors=Probing(CountlessWorker))
    output = executor.execute(step(0))
    assert output.sampled == {"r": 3}
    assert output.connector.step_failed, "what it has loaded is not known"
    assert output.connector_error is not None
    assert "worker 1: its report cannot be carried to another process: " in output.connector_error


def test_messages_to_a_side_that_declares_none_are_not_taken_for_empty_ones() -> None:
    carried = StepCodec().decode_step(StepCodec().encode_step(step(0, metadata=Undeclared())))
    assert isinstance(carried.connector_metadata, UndeliveredMetadata)
    report = KVConnectorOutput(kv_connector_worker_meta=Undeclared())
    output = StepCodec().decode_output(StepCodec().encode_output(StepOutput({}, report)))
    assert output.connector_error == "it sends messages of a type that the side which gets them does not declare"
    assert output.connector.kv_connector_worker_meta is None


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (Opaque(), "its Opaque cannot be carried to another process: "),
        (Undeclared(), "its message is no ProbeMetadata, as it declares: "),
    ],
    ids=["opaque", "undeclared"],
)
def test_a_connector_whose_message_cannot_be_delivered_is_turned_off_alone(
    metadata: Any, reason: str, make_executor: MakeExecutor
) -> None:
    executor = make_executor("multiprocess")
    output = executor.execute(step(0, metadata=metadata))
    assert output.sampled == {"r": 3}
    assert output.connector.step_failed, "what it was to load is not there"
    assert output.connector_error is not None
    assert [f"worker {rank}: " in output.connector_error for rank in (0, 1)] == [True, True]
    assert reason in output.connector_error
    assert executor.execute(step(1)).sampled == {"r": 6}


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        (OpaqueWorker, "its Opaque cannot be carried to another process: "),
        (UndeclaredWorker, "its message is no Calls, as it declares: "),
    ],
)
def test_a_connector_whose_workers_answer_what_cannot_be_read_is_turned_off_alone(
    worker: type[ProbingWorker], reason: str, make_executor: MakeExecutor
) -> None:
    executor = make_executor("multiprocess", connectors=Probing(worker))
    output = executor.execute(step(0))
    assert output.sampled == {"r": 3}
    assert not output.connector.step_failed, "the step itself went well"
    assert output.connector_error is not None
    assert reason in output.connector_error


@pytest.mark.parametrize("where", ["begin", "forward"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [0, 2])
def test_a_killed_rank_ends_the_engine_with_its_name(
    where: str, rank: int, number: int, make_executor: MakeExecutor
) -> None:
    if where == "begin":
        executor = make_executor("multiprocess")
        for at in range(number):
            executor.execute(step(at))
        assert isinstance(executor, MultiprocessExecutor)
        os.kill(executor.process_ids[rank], 9)
    else:
        executor = make_executor("multiprocess", Trouble("kill", "forward", rank, number))
        for at in range(number):
            executor.execute(step(at))
    with pytest.raises(EngineDeadError, match=f"worker {rank} died: killed by SIGKILL"):
        executor.execute(step(number))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("kind", "rank"),
    [("multiprocess", 0), ("multiprocess", 1), *(pytest.param("ray", rank, marks=pytest.mark.long) for rank in (0, 1))],
)
def test_a_rank_that_hangs_ends_the_engine_in_bounded_time(kind: str, rank: int, make_executor: MakeExecutor) -> None:
    executor = make_executor(kind, Trouble("hang", "forward", rank, 1), step_timeout_s=1.0)
    executor.execute(step(0))
    with pytest.raises(EngineDeadError, match=rf"worker {rank} did not answer within 1 s"):
        executor.execute(step(1))
    assert not multiprocessing.active_children()


def test_of_ranks_that_may_wait_for_each_other_none_is_blamed_alone(make_executor: MakeExecutor) -> None:
    """Found by use: a rank was stopped, and the one that waited for it was said to hang."""
    executor = make_executor("multiprocess", step_timeout_s=1.0)
    executor.execute(step(0))
    assert isinstance(executor, MultiprocessExecutor)
    for process_id in executor.process_ids:
        os.kill(process_id, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=r"workers 0, 1 did not answer within 1 s: one of them hangs"):
        executor.execute(step(1))
    assert not multiprocessing.active_children()


def test_all_ranks_have_one_deadline_over_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by reading: each answer gave the others the whole time again, so a step could take that times the ranks."""
    now = 0.0

    def wait(waiting: Sequence[Any], *, num_returns: int, timeout: float) -> tuple[Sequence[Any], Sequence[Any]]:
        """The next answer comes after six seconds."""
        nonlocal now
        now += min(timeout, 6.0)
        return (waiting[:num_returns], waiting[num_returns:]) if timeout >= 6.0 else ([], waiting)

    frame = b"O" + StepCodec().encode_output(StepOutput({}, KVConnectorOutput()))
    ray = MagicMock(wait=wait, get=lambda *_, **__: frame)
    ray.remote.return_value.options.return_value.remote.side_effect = MagicMock  # an actor for each rank
    monkeypatch.setattr("cargohold.engine.ranks.ray_actors._connect", lambda: (ray, False))
    spec = RankSpec(StubRunners(LAYOUT), Probing(), LAYOUT)
    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", lambda: now)
        executor = RayExecutor(spec, 3, StepCodec(), OutputAggregator(3), step_timeout_s=10.0)
        with pytest.raises(EngineDeadError, match="workers 1, 2 did not answer within 10 s"):
            executor.execute(step(0))


def test_ranks_that_cannot_be_killed_do_not_hang_the_engine(
    make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by freezing a file system: a killed process ends when its I/O does, and the engine waited for that."""
    monkeypatch.setattr(processes_module, "KILL_WAIT_S", 0.5)
    executor = make_executor("multiprocess", Trouble("hang", "forward", 1, 0), step_timeout_s=1.0)
    assert isinstance(executor, MultiprocessExecutor)
    process_ids, processes = executor.process_ids, multiprocessing.active_children()
    try:
        with monkeypatch.context() as frozen:
            frozen.setattr(SpawnProcess, "kill", lambda _: None)
            with pytest.raises(EngineDeadError, match="worker 1 did not answer within 1 s"):
                executor.execute(step(0))
        assert f"do not end: process ids {process_ids[0]}, {process_ids[1]}." in caplog.text
    finally:
        for process in processes:
            process.kill()
            process.join(20)


def test_a_program_ends_although_its_workers_do_not() -> None:
    """Found by reading: at the end of a program ``multiprocessing`` waits for all processes that it has started."""
    with _another_engine(_leave_stopped_workers) as (engine, channel):
        workers = channel.recv()
        engine.join(20)
        for process_id in workers:
            with suppress(ProcessLookupError):  # the kernel ends stopped processes that nobody can continue any more
                os.kill(process_id, signal.SIGKILL)
        assert engine.exitcode == 0


def _leave_stopped_workers(channel: multiprocessing.connection.Connection) -> None:
    processes_module.EXIT_WAIT_S = 0.5
    executor = _engine()
    for process_id in executor.process_ids:
        os.kill(process_id, signal.SIGSTOP)  # it does not even take the signal to end
    channel.send(executor.process_ids)


@pytest.mark.parametrize("kind", MOSTLY_PROCESSES)
def test_an_exception_in_a_rank_ends_the_engine_with_its_traceback(kind: str, make_executor: MakeExecutor) -> None:
    executor = make_executor(kind, Trouble("raise", "forward", 1, 0))
    with pytest.raises(EngineDeadError, match=r"(?s)worker 1 cannot go on.*the model broke"):
        executor.execute(step(0))


@pytest.mark.long
def test_a_model_split_over_ray_actors_answers_as_a_whole_one(
    model_with_heads: MakeModel, make_llm: Callable[..., LLM], ray_cluster: None
) -> None:
    model = model_with_heads("llama", 2)
    alone, _ = serve(make_llm(model, **OPTIONS))
    tokens, restored = serve(make_llm(model, **OPTIONS, tensor_parallel_size=2, executor="ray", offload=OFFLOAD))
    assert tokens == alone
    assert restored > 100


@pytest.mark.long  # that of rank 1 dies in the test of the order of calls
@pytest.mark.parametrize("rank", [0, 1])
def test_an_actor_that_dies_ends_the_engine_with_its_name(rank: int, make_executor: MakeExecutor) -> None:
    executor = make_executor("ray", Trouble("kill", "forward", rank, 1))
    executor.execute(step(0))
    with pytest.raises(EngineDeadError, match=f"worker {rank} died"):
        executor.execute(step(1))


def test_more_ranks_than_the_cluster_has_room_for_are_refused(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cargohold.engine.ranks.ray_actors.STOP_TIMEOUT_S", 0.2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=5 is not possible.*no room"):
        RayExecutor(RankSpec(StubRunners(LAYOUT), Probing(), LAYOUT), 5, StepCodec(), OutputAggregator(5))


BAD_STARTS: dict[str, tuple[type[Exception], str]] = {
    "kill": (EngineDeadError, "worker 1 died"),
    "raise": (EngineDeadError, "the model broke"),
    "refuse": (UnsupportedModelError, "model 'some model': it cannot be served"),
}


@pytest.mark.parametrize(("kind", "what"), [
    *(("multiprocess", what) for what in BAD_STARTS),
    *(pytest.param("ray", what, marks=pytest.mark.long) for what in BAD_STARTS),
])  # fmt: skip
def test_a_rank_that_cannot_start_leaves_none_running(kind: str, what: str, make_executor: MakeExecutor) -> None:
    error, message = BAD_STARTS[what]
    with pytest.raises(error, match=message):
        make_executor(kind, Trouble(what, "start", 1))
    assert not multiprocessing.active_children()


def test_nothing_is_left_behind_on_disk(
    make_executor: MakeExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    # Only what these processes use in shared memory: others may come and go there meanwhile.
    before = _shared_memory_of(os.getpid())
    executor = make_executor("multiprocess")
    assert isinstance(executor, MultiprocessExecutor)
    assert list(tmp_path.iterdir()) == [], "even while it runs"
    executor.execute(step(0))
    used = set[Path]().union(*(_shared_memory_of(pid) for pid in (os.getpid(), *executor.process_ids)))
    executor.shutdown()
    assert not [file for file in used - before if file.exists()]


def _shared_memory_of(pid: int) -> set[Path]:
    process = psutil.Process(pid)
    used = [*(mapped.path for mapped in process.memory_maps()), *(file.path for file in process.open_files())]
    return {Path(path) for path in used if path.startswith("/dev/shm/")}


@pytest.mark.parametrize("forks", [False, True])
def test_workers_end_when_the_engine_is_killed(forks: bool) -> None:
    """Found by trying: with a forked child, as of a pool, they waited for ever for a step, and kept their disk locked."""
    with _another_engine(_wait_for_the_end, forks) as (engine, channel):
        workers, children = ([psutil.Process(process_id) for process_id in ids] for ids in channel.recv())
        engine.kill()
        gone, alive = psutil.wait_procs(workers, timeout=20)
        for process in (*alive, *children):
            process.kill()
    assert (len(gone), len(children)) == (2, int(forks))


def _wait_for_the_end(channel: multiprocessing.connection.Connection, forks: bool) -> None:
    executor = _engine()
    children = [multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))] if forks else []
    for child in children:
        child.start()
    channel.send((executor.process_ids, [child.pid for child in children]))
    channel.recv()


def test_a_forked_child_has_no_workers_and_leaves_those_of_its_parent_alone() -> None:
    with _another_engine(_step_in_a_child) as (_, channel):
        assert channel.poll(60)
        assert channel.recv() == "its workers belong to the process from which this one was forked"
        assert channel.recv() == {"r": 3}


def _step_in_a_child(channel: multiprocessing.connection.Connection) -> None:
    executor = _engine()
    child = multiprocessing.get_context("fork").Process(target=_try_a_step, args=(executor, channel))
    child.start()
    child.join()
    channel.send(executor.execute(step(0)).sampled)
    executor.shutdown()


def _try_a_step(executor: MultiprocessExecutor, channel: multiprocessing.connection.Connection) -> None:
    try:
        executor.execute(step(0))
    except EngineDeadError as error:
        channel.send(str(error))
    executor.shutdown()


@contextmanager
def _another_engine(
    run: Callable[..., None], *options: object
) -> Iterator[tuple[BaseProcess, multiprocessing.connection.Connection]]:
    """A process that runs ``run`` on its end of a pipe, and our end."""
    context = fork_server()
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs, *options))
    with ours, theirs:
        process.start()
        try:
            yield process, ours
        finally:
            process.kill()
            process.join()


def _engine() -> MultiprocessExecutor:
    spec = RankSpec(StubRunners(LAYOUT), Probing(), LAYOUT)
    return MultiprocessExecutor(spec, 2, StepCodec(worker_metadata_type=Calls), OutputAggregator(2))


@pytest.mark.usefixtures("forked_ranks")
def test_a_connector_that_cannot_travel_is_refused_by_name() -> None:
    connectors = ClassFactory(lambda _: None, lambda _: None)  # type: ignore[arg-type, return-value]  # never called
    with pytest.raises(ConfigError, match="cannot be sent to workers in other processes"):
        MultiprocessExecutor(RankSpec(StubRunners(LAYOUT), connectors, LAYOUT), 2, StepCodec(), OutputAggregator(2))
