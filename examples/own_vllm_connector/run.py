"""A connector that was written for vLLM, in Cargohold's own engine.

python run.py [MODEL]
"""

import sys

from documents import document
from vllm_shelf import ShelfConnector

from cargohold import LLM, SamplingParams
from cargohold.lab.vllm.bridge import Bridge

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"


def main() -> None:
    bridge = Bridge("vllm_shelf:ShelfConnector", {"num_places": 400})
    sampling = SamplingParams(max_tokens=12)
    with LLM(MODEL, num_device_blocks=64, dtype="float32", offload=bridge) as llm:
        (first,) = llm.generate(document(0), sampling)
        print(
            f"first visit:  {first.metrics.prompt_tokens:,} tokens, {ShelfConnector.num_loaded} blocks from the shelf"
        )
        for number in range(1, 4):  # others take its place on the device
            llm.generate(document(number), sampling)
        (again,) = llm.generate(document(0), sampling)
        print(
            f"second visit: {again.metrics.prompt_tokens:,} tokens, {ShelfConnector.num_loaded} blocks from the shelf"
        )

    assert again.token_ids == first.token_ids, "a connector must never change an answer"
    assert ShelfConnector.num_loaded > 0
    print("The answers are the same.")


if __name__ == "__main__":
    main()
