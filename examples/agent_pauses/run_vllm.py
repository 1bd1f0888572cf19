"""Agents whose tools take seconds: their second turns without and with a hint, inside vLLM.

python run_vllm.py [MODEL]
"""

import asyncio
import os
import sys
import time
from importlib.util import find_spec
from itertools import count
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; read by vLLM's CPU build only

from agents import ANSWER_TOKENS, DEVICE_TOKENS, HOST_TOKENS, PIN_FRACTION, Turn, compare, kv_bytes
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from cargohold import Hint
from cargohold.engine.model.info import locate_model

MODEL = locate_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
BLOCK_TOKENS = 32
HAS_FIELD = find_spec("vllm.v1.kv_hints") is not None
"""vLLM 0.32 and later carry hints in a field of their own."""


def envelope(hint: Hint) -> dict[str, Any]:
    """A hint as it travels."""
    action = {
        "action_id": hint.action_id,
        "action_type": str(hint.kind),
        "action_version": "1",
        "payload": {"lease": hint.lease, "ttl_s": hint.ttl_s},
    }
    return {"protocol_version": "1", "message_id": hint.action_id, "actions": [action]}


def with_hint(hint: Hint | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The two ways of a hint into vLLM: as ``extra_args`` of the sampling, in all versions, or as option of ``generate``."""
    if hint is None:
        return {}, {}
    if not HAS_FIELD or hint.kind == "release":
        return {"kv_transfer_params": {"cargohold_hints": envelope(hint)}}, {}
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope  # noqa: PLC0415  # not in all versions

    fields = envelope(hint)
    actions = [KvHintAction(**action) for action in fields.pop("actions")]
    return {}, {"kv_hints": KvHintsEnvelope(**fields, actions=actions)}


class VllmEngine:
    """vLLM, as the agents see it."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._numbers = count()

    async def ask(self, prompt: list[int], hint: Hint | None = None) -> Turn:
        """See ``agents.Engine``."""
        extra, options = with_hint(hint)
        sampling = SamplingParams(
            temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False, extra_args=extra
        )
        begun, first_s = time.perf_counter(), 0.0
        async for out in self._llm.generate(
            {"prompt_token_ids": prompt}, sampling, str(next(self._numbers)), **options
        ):
            first_s = first_s or time.perf_counter() - begun
            if out.finished:
                outcomes = (out.kv_transfer_params or {}).get("cargohold_hints", [])
                answers = [str(outcome["status"]) for outcome in outcomes]
                found, tokens = out.num_cached_tokens or 0, list(out.outputs[0].token_ids)
        return Turn(tokens, len(prompt), found, first_s, answers)

    async def forget(self) -> None:
        """See ``agents.Engine``."""
        for _ in range(600):
            if await self._llm.reset_prefix_cache(reset_connector=True):
                return
            await asyncio.sleep(0.1)  # a copy is still in flight
        raise TimeoutError("the cache cannot be emptied")


async def main() -> None:
    transfer = KVTransferConfig(
        kv_connector="CargoholdConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "host_bytes": kv_bytes(MODEL, HOST_TOKENS),
            "policy": "lru",
            "hints": {"pin_fraction": PIN_FRACTION},
            "restore": "always",
        },
    )
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            MODEL,
            dtype="float32",
            max_model_len=512,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=DEVICE_TOKENS // BLOCK_TOKENS,
            skip_tokenizer_init=True,
            enforce_eager=True,  # starts sooner; leave it out in production
            kv_transfer_config=transfer,
        )
    )
    try:
        await compare(VllmEngine(llm))
    finally:
        llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
