"""Agents whose tools take seconds: their second turns without and with a hint, in Cargohold's own engine.

python run.py [MODEL]
"""

import asyncio
import sys

from agents import ANSWER_TOKENS, DEVICE_TOKENS, HOST_TOKENS, PIN_FRACTION, Turn, compare, kv_bytes

from cargohold import AsyncLLM, Hint, HintConfig, OffloadConfig, SamplingParams
from cargohold.engine.model.info import locate_model

MODEL = locate_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
BLOCK_TOKENS = 16


class CargoholdEngine:
    """Cargohold's engine, as the agents see it."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def ask(self, prompt: list[int], hint: Hint | None = None) -> Turn:
        """See ``agents.Engine``."""
        sampling = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
        (out,) = await self._llm.generate([prompt], sampling, hints=[] if hint is None else [hint])
        found = out.metrics.device_tokens + sum(out.metrics.restored_tokens.values())
        answers = [str(outcome.status) for outcome in out.hint_outcomes]
        return Turn(list(out.token_ids), out.metrics.prompt_tokens, found, out.metrics.ttft_s or 0.0, answers)

    async def forget(self) -> None:
        """See ``agents.Engine``."""
        assert await self._llm.reset_cache()


async def main() -> None:
    offload = OffloadConfig(
        host_bytes=kv_bytes(MODEL, HOST_TOKENS),
        policy="lru",
        hints=HintConfig(pin_fraction=PIN_FRACTION),
        restore="always",
    )
    options = {"num_device_blocks": DEVICE_TOKENS // BLOCK_TOKENS, "block_tokens": BLOCK_TOKENS, "dtype": "float32"}
    async with AsyncLLM(MODEL, offload=offload, **options) as llm:
        await compare(CargoholdEngine(llm))


if __name__ == "__main__":
    asyncio.run(main())
