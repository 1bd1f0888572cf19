"""vLLM in this process, small enough to be started in a second."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from cargohold.integrations.vllm.connector import CargoholdConnector
from cargohold.integrations.vllm.scheduler import SchedulerSide
from cargohold.protocol import EXPLAIN

BLOCK_TOKENS = 32
MAX_MODEL_LEN = 1024
SETTLE_TIMEOUT_S = 60.0
"""Empty steps take no time: thousands of them pass while a busy machine writes a block to its disk."""


@dataclass(frozen=True, slots=True)
class Answer:
    """vLLM's answer to a request.

    Attributes:
        tokens: the generated tokens.
        restored: prompt tokens that came from tiers.
        device: prompt tokens that vLLM found in its own cache, or that were restored.
        notes: why the request hit or missed the cache.
        finish_reason: vLLM's finish reason.
        others: tokens of further answers, for a request that asked for several.
        prompt_logprobs: of the prompt's tokens except the first; empty if they were not asked for.
        params: the response's ``kv_transfer_params``, from all connectors.
    """

    tokens: tuple[int, ...]
    restored: int
    device: int
    notes: tuple[str, ...]
    finish_reason: str | None
    others: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: tuple[float, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)


class Engine:
    """vLLM with a tiny model.

    Args:
        model: the model's path.
        extra: ``kv_connector_extra_config``; ``None`` for no connector.
        num_blocks: blocks of the device pool.
        transfer: further fields of vLLM's KVTransferConfig.
        options: options for vLLM, and ``caches_latents``, which caches prefixes of latent attention as vLLM does only on GPUs.
    """

    def __init__(
        self,
        model: str,
        extra: Mapping[str, Any] | None = None,
        *,
        num_blocks: int = 40,
        transfer: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from vllm import LLM  # noqa: PLC0415  # after the environment has been set

        # vLLM collects garbage many times while it starts and stops; imported objects never become garbage.
        gc.freeze()
        _look_at_models_here()
        if extra is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "CargoholdConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": dict(extra),
                **(transfer or {}),
            }
        defaults = {
            "dtype": "float32",
            "block_size": BLOCK_TOKENS,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 8,
            "async_scheduling": False,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
        }
        options = defaults | options
        with _as_on_gpus(bool(options["async_scheduling"]), bool(options.pop("caches_latents", False))):
            self.llm = LLM(
                model,
                **options,
                num_gpu_blocks_override=num_blocks,
                enforce_eager=True,
            )
        assert self.scheduler.scheduler_config.async_scheduling == options["async_scheduling"]

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self._core.scheduler

    @property
    def _core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        """The adapter on the scheduler's side, also inside vLLM's ``MultiConnector``; ``None`` if there is none."""
        own = self.scheduler.connector
        return next((one for one in getattr(own, "_connectors", [own]) if isinstance(one, CargoholdConnector)), None)

    @property
    def side(self) -> SchedulerSide:
        """The adapter's scheduler side."""
        side: SchedulerSide = self.connector._scheduler
        return side

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 8,
        *,
        salt: str | None = None,
        wishes: Mapping[str, Any] | None = None,
    ) -> list[Answer]:
        """Serve prompts all at once."""
        inputs: list[dict[str, Any]] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        for prompt in inputs:
            if salt is not None:
                prompt["cache_salt"] = salt
        return self.ask_for(inputs, max_tokens, wishes=wishes)

    def ask_for(
        self,
        inputs: Sequence[Mapping[str, Any]],
        max_tokens: int = 8,
        *,
        adapter: Any = None,
        wishes: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> list[Answer]:
        """Serve prompts in any form that vLLM takes; ``sampling`` are further fields of vLLM's SamplingParams."""
        params = _sampling(max_tokens, {EXPLAIN: True, **(wishes or {})}, **sampling)
        outputs = self.llm.generate([dict(one) for one in inputs], params, use_tqdm=False, lora_request=adapter)
        return [_answer(output) for output in outputs]

    def metric(self, name: str) -> int:
        """One of vLLM's counters, since the start."""
        return sum(int(metric.value) for metric in self.llm.get_metrics() if metric.name == f"vllm:{name}")

    def add(
        self, request_id: str, prompt: Sequence[int], max_tokens: int, *, priority: int = 0, **sampling: Any
    ) -> None:
        """Let a request arrive; ``step`` serves it. ``sampling`` are further fields of vLLM's SamplingParams."""
        params = _sampling(max_tokens, {EXPLAIN: True}, **sampling)
        self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, params, priority=priority)

    def abort(self, request_id: str) -> None:
        """Abort a request, as if its client had gone."""
        self.llm.llm_engine.abort_request([request_id])

    def step(self) -> dict[str, Answer]:
        """Make one step. Returns the answers to requests that ended in it."""
        return {output.request_id: _answer(output) for output in self.llm.llm_engine.step() if output.finished}

    @property
    def is_busy(self) -> bool:
        """Whether requests are unfinished."""
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def settle(self) -> None:
        """Step until nothing is in flight any more: in one process, vLLM stops when the last answer is there."""
        end = time.monotonic() + SETTLE_TIMEOUT_S
        while self.scheduler.has_requests() or self._core.batch_queue:
            assert time.monotonic() < end, "vLLM does not come to rest"
            self.llm.llm_engine.step()

    def check_settled(self) -> None:
        """Assert that no request and no job is left, and that every block is free."""
        self.settle()
        pool = self.scheduler.kv_cache_manager.block_pool
        held = [block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null]
        assert not held, f"blocks {held} are held by nobody"
        assert pool.get_num_free_blocks() == len(pool.blocks) - 1
        if self.connector is not None and self.connector._scheduler is not None:
            assert not self.side.has_pending_work()

    def close(self) -> None:
        """Give everything back, so that another engine can live in this process."""
        with _kept_frozen():
            self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        self.clean_up()

    @staticmethod
    def clean_up() -> None:
        """Forget what vLLM keeps in this process."""
        from vllm.distributed import cleanup_dist_env_and_memory  # noqa: PLC0415  # after the environment has been set
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown  # noqa: PLC0415

        with _kept_frozen():
            ensure_kv_transfer_shutdown()
            cleanup_dist_env_and_memory()


def _look_at_models_here() -> None:
    """Let vLLM look at a model's class in this process: one of its own, which is for GPUs, imports vLLM once more, for 12 s."""
    from vllm.model_executor.models import registry  # noqa: PLC0415  # after the environment has been set

    registry._run_in_subprocess = lambda look: look()


@contextmanager
def _as_on_gpus(schedules_ahead: bool, caches_latents: bool) -> Iterator[None]:
    """Within the ``with`` block, set options that vLLM turns off on CPUs, although they work there."""
    from vllm.platforms import current_platform  # noqa: PLC0415  # after the environment has been set

    platform = type(current_platform)
    check_and_update_config = platform.check_and_update_config

    def change(config: Any) -> None:
        check_and_update_config(config)
        config.scheduler_config.async_scheduling = schedules_ahead
        if caches_latents:
            config.scheduler_config.enable_chunked_prefill = config.cache_config.enable_prefix_caching = True

    with patch.object(platform, "check_and_update_config", staticmethod(change)):
        yield


def _kept_frozen() -> AbstractContextManager[object]:
    """Keep vLLM from unfreezing imported objects: collecting garbage among them takes longer than an engine's start."""
    return patch.object(gc, "unfreeze")


def _sampling(max_tokens: int, kv_transfer_params: Mapping[str, Any], **options: Any) -> Any:
    from vllm import SamplingParams  # noqa: PLC0415  # after the environment has been set
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415  # after the environment has been set

    return SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"kv_transfer_params": dict(kv_transfer_params)},
        **{"temperature": 0, **options},
    )


def _answer(output: Any) -> Answer:
    completion = output.outputs[0]
    params = output.kv_transfer_params or {}
    explanation = params.get(EXPLAIN, {})
    return Answer(
        tokens=tuple(completion.token_ids),
        restored=sum(explanation.get("restored_tokens", {}).values()),
        device=output.num_cached_tokens or 0,
        notes=tuple(explanation.get("notes", ())),
        finish_reason=completion.finish_reason,
        others=tuple(tuple(other.token_ids) for other in output.outputs[1:]),
        prompt_logprobs=tuple(
            next(iter(choices.values())).logprob for choices in output.prompt_logprobs or () if choices
        ),
        params=params,
    )
