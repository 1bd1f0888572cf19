"""vLLM with Cargohold: contexts that vLLM's own pool has lost come back from host memory.

python run.py [MODEL]
"""

import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; read by vLLM's CPU build only

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from cargohold.engine.model.files import locate_model

MODEL = locate_model(sys.argv[1]) if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M"
NUM_DOCUMENTS, DOCUMENT_TOKENS = 6, 400


def document(number: int) -> dict[str, list[int]]:
    """A long prompt as token ids, so that the example needs no tokenizer."""
    return {"prompt_token_ids": [10 + (number * 31 + at * 7) % 90 for at in range(DOCUMENT_TOKENS)]}


def main() -> None:
    llm = LLM(
        MODEL,
        dtype="float32",
        max_model_len=512,
        block_size=32,
        num_gpu_blocks_override=40,  # room for three such documents: the others are evicted
        skip_tokenizer_init=True,
        enforce_eager=True,  # starts sooner; leave it out in production
        kv_transfer_config=KVTransferConfig(
            kv_connector="CargoholdConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"host_bytes": "256MiB", "restore": "always"},
        ),
    )
    explain = {"kv_transfer_params": {"cargohold_explain": True}}
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, extra_args=explain)

    first = [llm.generate(document(number), sampling)[0] for number in range(NUM_DOCUMENTS)]
    again = [llm.generate(document(number), sampling)[0] for number in range(NUM_DOCUMENTS)]
    for number, output in enumerate(again):
        print(f"document {number}: {output.num_cached_tokens} of {DOCUMENT_TOKENS} tokens were not computed again")
    explained = (again[0].kv_transfer_params or {})["cargohold_explain"]
    print("why:", *explained["notes"])

    assert [out.outputs[0].token_ids for out in again] == [out.outputs[0].token_ids for out in first]
    assert all(output.num_cached_tokens >= 0.9 * DOCUMENT_TOKENS for output in again)
    print("The answers are the same.")


if __name__ == "__main__":
    main()
