"""A trainer changes vLLM's weights in place, and changes them back: KV is kept while it is true, and never used when it is not.

python run.py [MODEL]
"""

import os
import sys
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; read by vLLM's CPU build only
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that a function can be sent to the worker

import torch
from vllm import LLM, SamplingParams, _custom_ops
from vllm.config import KVTransferConfig

# vLLM's CPU build moves matrices to where nobody can read them again, and a reset then drops what is kept. Not on GPUs.
_custom_ops._supports_onednn = False  # noqa: SLF001  # there is no option for it

MODEL = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M"
PROMPT_TOKENS = 400
PROMPTS: list[Any] = [
    {"prompt_token_ids": [10 + (number * 31 + at * 7) % 90 for at in range(PROMPT_TOKENS)]} for number in range(3)
]
Tokens = list[list[int]]


def start(transfer: KVTransferConfig | None = None) -> LLM:
    return LLM(
        MODEL,
        dtype="float32",
        max_model_len=512,
        block_size=32,
        num_gpu_blocks_override=60,
        skip_tokenizer_init=True,
        enforce_eager=True,  # starts sooner; leave it out in production
        kv_transfer_config=transfer,
    )


def train(worker: Any) -> None:
    """Change all weights a little; keep the old ones."""
    noise = torch.Generator().manual_seed(0)
    worker.checkpoint = [parameter.data.clone() for parameter in worker.get_model().parameters()]
    for parameter in worker.get_model().parameters():
        parameter.data += 0.3 * parameter.data.std() * torch.randn(parameter.shape, generator=noise)


def go_back(worker: Any) -> None:
    """Put the old weights back."""
    for parameter, old in zip(worker.get_model().parameters(), worker.checkpoint, strict=True):
        parameter.data.copy_(old)


def ask(llm: LLM) -> tuple[Tokens, int]:
    """Return the answers, and how many tokens of the prompts were not computed."""
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    outputs = [llm.generate(prompt, sampling, use_tqdm=False)[0] for prompt in PROMPTS]
    return [list(output.outputs[0].token_ids) for output in outputs], sum(out.num_cached_tokens or 0 for out in outputs)


def update(llm: LLM, change: Any) -> None:
    """What a trainer does between two rounds: new weights, and a reset of vLLM's own prefix cache."""
    for _ in range(100):
        llm.llm_engine.step()  # in one process, vLLM makes no steps by itself in which copies could end
    llm.collective_rpc(change)
    assert llm.reset_prefix_cache()


def main() -> None:
    fresh = start()
    expected = {"old": ask(fresh)[0]}
    fresh.collective_rpc(train)
    fresh.reset_prefix_cache()
    expected["new"], _ = ask(fresh)
    assert expected["old"] != expected["new"]
    fresh.llm_engine.engine_core.shutdown()

    llm = start(
        KVTransferConfig(
            kv_connector="CargoholdConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"host_bytes": "256MiB", "restore": "always"},
        )
    )
    rounds = (("old", None), ("new", train), ("old", go_back))
    restored = []
    for weights, change in rounds:
        if change is not None:
            update(llm, change)
        tokens, num_restored = ask(llm)
        print(f"{weights} weights: {num_restored} of {len(PROMPTS) * PROMPT_TOKENS} tokens were not computed again")
        assert tokens == expected[weights]
        restored.append(num_restored)
    llm.llm_engine.engine_core.shutdown()
    assert restored[1] == 0 and restored[2] >= 0.6 * len(PROMPTS) * PROMPT_TOKENS
    print("The answers are those of an engine without any cache of other weights.")


if __name__ == "__main__":
    main()
