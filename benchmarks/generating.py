"""What connectors cost vLLM's scheduler, per step: while prompts are computed, and while many requests generate.

Processor time of ``schedule()`` and ``update_from_output()`` of vLLM's own scheduler, in turns of one step; all tiers
are full, and copies are taken to have ended a step later. Figures are means over all steps, because a connector may do
in one step what it has put off in seven, less the mean without a connector. With a disk below, which vLLM's connector
has not, all that is stored is written there, too.
"""

from __future__ import annotations

import gc
import importlib.util
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from benchmarks.environment import NotInstalledError
from cargohold.protocol import metrics

NOTHING = "no connector"
IDLE = "a connector that does nothing"
OURS = "cargohold"
OURS_WITH_DISK = "cargohold, a disk below"
OURS_PROMPTS = "cargohold, prompts alone"
OURS_TRACED = "cargohold, traces"
"""Measured by another benchmark: ``tracing``."""
THEIRS = "vllm"
THEIRS_PROMPTS = "vllm, prompts alone"
CONTENDERS = (NOTHING, IDLE, OURS, OURS_WITH_DISK, THEIRS, OURS_PROMPTS, THEIRS_PROMPTS)
STEP_TOKENS = 8192
BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Workload:
    """Requests that generate at the same time, with a full tier.

    Attributes:
        requests: number of requests.
        prompt_tokens: tokens of each prompt.
        steps: number of steps measured; in each of them, every request gets a token.
        tier_chunks: slots of the tier, which other prompts fill before.
    """

    requests: int
    prompt_tokens: int
    steps: int
    tier_chunks: int


WORKLOADS = (Workload(256, 512, 160, 40_000), Workload(256, 4_096, 64, 160_000), Workload(32, 4_096, 160, 40_000))
QUICK = (Workload(4, 64, 4, 40),)


def run(*, quick: bool) -> dict[str, Any]:
    if importlib.util.find_spec("vllm") is None:
        raise NotInstalledError("it drives vLLM's scheduler: `make bench-vllm` runs it where vLLM is")
    return {
        "workload": {
            "clock": "processor time of the calling thread",
            "what": "schedule() and update_from_output() of vLLM's own scheduler, copies taken to have ended a step later",
            "step_tokens": STEP_TOKENS,
            "block_tokens": BLOCK_TOKENS,
        },
        "rows": [_measure(workload) for workload in (QUICK if quick else WORKLOADS)],
    }


def _measure(workload: Workload) -> dict[str, Any]:
    """Measure all contenders in turns of one step."""
    engines = {name: Engine(name, workload) for name in CONTENDERS}
    for engine in engines.values():
        engine.fill()
        engine.add_prompts()
    # Seven engines share this process's heap, as none do elsewhere. To collect garbage in all of it takes up to a second, which
    # would be one contender's. vLLM does the same when it has started.
    gc.collect()
    gc.freeze()
    prompts: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    while any(engine.is_computing_prompts for engine in engines.values()):
        for name, engine in engines.items():
            if engine.is_computing_prompts:
                prompts[name].append(engine.step())
    for _ in range(2 * BLOCK_TOKENS):  # for stores that were deferred
        for engine in engines.values():
            engine.step()
    answers: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(workload.steps):
        for name, engine in engines.items():
            answers[name].append(engine.step())
    gc.unfreeze()
    row: dict[str, Any] = asdict(workload)
    for what, times in (("prompts", prompts), ("generating", answers)):
        # Means, not medians: a connector may do in one step what it has put off in seven.
        means = {name: fmean(taken) for name, taken in times.items()}
        row[f"{what}_us_per_step"] = {name: round(mean * 1e6) for name, mean in means.items()}
        row[f"{what}_us_of_longest_in_twenty"] = {
            name: round(sorted(taken)[len(taken) * 19 // 20] * 1e6) for name, taken in times.items()
        }
        beyond = {name: mean - means[NOTHING] for name, mean in means.items() if name != NOTHING}
        row[f"{what}_us_per_step_beyond_no_connector"] = {name: round(time * 1e6) for name, time in beyond.items()}
        row[f"{what}_over_vllm"] = {
            name: round(beyond[name] / beyond[theirs], 2)
            for name, theirs in (
                (IDLE, THEIRS),
                (OURS, THEIRS),
                (OURS_WITH_DISK, THEIRS),
                (OURS_PROMPTS, THEIRS_PROMPTS),
            )
        }
    return row


class Engine:
    """vLLM's scheduler, with a fake model and workers that answer at once.

    Args:
        name: the contender.
        workload: the requests to come.

    Attributes:
        scheduler: vLLM's scheduler.
    """

    def __init__(self, name: str, workload: Workload) -> None:
        self._name = name
        self._workload = workload
        self._requests = _Requests()
        self._in_flight: list[int] = []
        self._told: dict[int, bytes] = {}
        self.scheduler = _scheduler(name, workload)

    def fill(self) -> None:
        """Serve prompts, one token each, until the tier is full."""
        per_prompt = STEP_TOKENS // BLOCK_TOKENS
        for at in range(-(-self._workload.tier_chunks // per_prompt)):
            self.add(f"other {at}", STEP_TOKENS, 1)
            while self.scheduler.has_requests():
                self.step()

    def add(self, request_id: str, num_tokens: int, max_tokens: int) -> None:
        """Add a request of random tokens."""
        self.scheduler.add_request(self._requests.make(request_id, num_tokens, max_tokens))

    def add_prompts(self) -> None:
        """Add the requests that will generate at the same time."""
        for at in range(self._workload.requests):
            # Different lengths, so that blocks fill up in different steps, as for requests that came at different times.
            num_tokens = self._workload.prompt_tokens + at % BLOCK_TOKENS
            self.add(f"{at}", num_tokens, 4 * self._workload.steps + 1_000)

    @property
    def is_computing_prompts(self) -> bool:
        """Whether a request has no token yet."""
        return any(request.num_output_tokens == 0 for request in self.scheduler.requests.values())

    def step(self) -> float:
        """Make one step. Returns the seconds that the scheduler took."""
        start = time.thread_time()
        output = self.scheduler.schedule()
        scheduled = time.thread_time()
        answer = self._answer(output)
        answered = time.thread_time()
        outputs = self.scheduler.update_from_output(output, answer)
        taken = time.thread_time() - answered + scheduled - start
        if any(map(_says_that_a_connector_is_off, outputs.values())):
            raise RuntimeError(f"{self._name} was turned off, so there is nothing to measure; the log says why")
        return taken

    def _answer(self, output: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: PLC0415  # where it is installed

        ids = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[request_id] for request_id in ids]
        message = self._message(output.kv_connector_metadata)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: at for at, request_id in enumerate(ids)},
            sampled_token_ids=[
                [7] if request.num_computed_tokens >= request.num_tokens else [] for request in requests
            ],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=None if self._name == NOTHING else KVConnectorOutput(kv_connector_worker_meta=message),
        )

    def _message(self, metadata: Any) -> Any:
        """The worker's report: the copies of the last step have ended."""
        ended = self._in_flight
        if self._name in (OURS, OURS_WITH_DISK, OURS_PROMPTS, OURS_TRACED):
            told = self._told
            jobs = (*getattr(metadata.inner, "stores", ()), *getattr(metadata.inner, "saves", ()))
            self._in_flight = [job.job_id for job in jobs]
            self._told = dict(map(_answer_of_disk, getattr(metadata.inner, "worker_message", ())))
            return _our_message(ended, told, metadata.look)
        if self._name in (THEIRS, THEIRS_PROMPTS):
            self._in_flight = list(metadata.store_jobs)
            return _their_message(ended) if ended else None
        return None


def _says_that_a_connector_is_off(output: Any) -> bool:
    """Whether vLLM's scheduler tells its client that a connector of ours was turned off in this step."""
    from cargohold.integrations.vllm.metrics import TransferStats  # noqa: PLC0415  # where vLLM is installed

    stats = output.scheduler_stats and output.scheduler_stats.kv_connector_stats
    return bool(stats and TransferStats(data=stats).values[metrics.FAILURES.of("connector_off")])


def _answer_of_disk(command: Any) -> tuple[int, bytes]:
    """A job's id, and the disk's answers to it: no chunk that is asked for is there, and every store succeeds."""
    from cargohold.tiers.port import JobKind  # noqa: PLC0415  # beside the others

    return command.job_id, bytes([command.kind is JobKind.STORE]) * len(command.keys)


def _our_message(ended: list[int], told: dict[int, bytes], look: int) -> Any:
    """Our worker's report on copies into host memory that have ended, with answers of the disk, and on unchanged weights."""
    from cargohold.integrations.vllm.worker import RankReport, WorkerMessage  # noqa: PLC0415  # where vLLM is installed
    from cargohold.protocol import KVConnectorOutput, TransferOutcome  # noqa: PLC0415  # beside it
    from cargohold.tiers.messages import TierReport  # noqa: PLC0415  # beside the others

    jobs = dict.fromkeys([*ended, *told], TransferOutcome.DONE)
    report = TierReport({job_id: (answers, 1) for job_id, answers in told.items()})
    output = KVConnectorOutput(jobs=jobs, kv_connector_worker_meta=report)
    return WorkerMessage({0: RankReport(output, weights=dict.fromkeys((0, look), "as at the start"))})


def _their_message(ended: list[int]) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (  # noqa: PLC0415  # where it is installed
        OffloadingWorkerMetadata,
    )

    return OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(ended, 1))


class _Requests:
    """Makes vLLM's requests, the same for every contender."""

    def __init__(self) -> None:
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher  # noqa: PLC0415  # where it is installed

        from cargohold.lab.vllm.requests import hash_function  # noqa: PLC0415  # as above

        self._hasher = get_request_block_hasher(BLOCK_TOKENS, hash_function())
        self._random = random.Random(0)

    def make(self, request_id: str, num_tokens: int, max_tokens: int) -> Any:
        """A request of random tokens."""
        from vllm import SamplingParams  # noqa: PLC0415  # where it is installed
        from vllm.v1.request import Request  # noqa: PLC0415  # where it is installed

        return Request(
            request_id=request_id,
            prompt_token_ids=[self._random.randrange(1_000) for _ in range(num_tokens)],
            sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            pooling_params=None,
            arrival_time=0.0,
            block_hasher=self._hasher,
        )


def _scheduler(name: str, workload: Workload) -> Any:
    """vLLM's scheduler for a model of one layer of full attention."""
    import torch  # noqa: PLC0415  # where it is installed
    from vllm.config import (  # noqa: PLC0415  # where it is installed
        CacheConfig,
        KVTransferConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415  # where it is installed
    from vllm.v1.kv_cache_interface import (  # noqa: PLC0415  # where it is installed
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )
    from vllm.v1.structured_output import StructuredOutputManager  # noqa: PLC0415  # where it is installed

    from cargohold.lab.vllm.configuration import model_config  # noqa: PLC0415  # as above

    model = model_config()
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
    num_blocks = 2 + workload.requests * (
        -(-workload.prompt_tokens // BLOCK_TOKENS) + workload.steps // BLOCK_TOKENS + 8
    )
    num_blocks = max(num_blocks, 2 * STEP_TOKENS // BLOCK_TOKENS)
    size = num_blocks * spec.page_size_bytes
    options = dict(_connector(name, workload.tier_chunks * spec.page_size_bytes))
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=workload.requests,
            max_num_batched_tokens=STEP_TOKENS,
            max_model_len=model.max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
        kv_transfer_config=KVTransferConfig(kv_role="kv_both", **options) if options else None,
    )
    config.cache_config.num_gpu_blocks = num_blocks
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[
                KVCacheTensor(size=size, layers=["layer.0"], layer_stride=size, block_stride=spec.page_size_bytes)
            ],
            kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
        log_stats=True,
    )


def _connector(name: str, host_bytes: int) -> Iterator[tuple[str, Any]]:
    """Fields of vLLM's ``KVTransferConfig`` for a contender; none without a connector."""
    if name in (OURS, OURS_WITH_DISK, OURS_PROMPTS, OURS_TRACED):
        yield "kv_connector", "CargoholdConnector"
        yield "kv_connector_module_path", "cargohold.integrations.vllm.connector"
        # The directory is never opened: only workers do that, and there are none.
        disk = {"kind": "disk", "directory": "/nowhere", "max_bytes": "1GiB"}
        yield (
            "kv_connector_extra_config",
            {
                "host_bytes": host_bytes,
                "store_generated": name != OURS_PROMPTS,
                "traces": name == OURS_TRACED,
                "tiers": [disk] if name == OURS_WITH_DISK else [],
            },
        )
    elif name == IDLE:
        yield "kv_connector", "IdleConnector"
        yield "kv_connector_module_path", "benchmarks.idle_connector"
    elif name in (THEIRS, THEIRS_PROMPTS):
        yield "kv_connector", "OffloadingConnector"
        yield (
            "kv_connector_extra_config",
            {"cpu_bytes_to_use": host_bytes, "offload_prompt_only": name == THEIRS_PROMPTS},
        )
