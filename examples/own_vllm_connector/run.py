"""A connector that was written for vLLM, in Cargohold's own engine.

python run.py [MODEL]
"""

import sys

from documents import document

from cargohold import LLM, SamplingParams
from cargohold.lab.vllm.bridge import Bridge

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"


def main() -> None:
    bridge = Bridge("vllm_shelf:ShelfConnector", {"num_places": 400})
    sampling = SamplingParams(max_tokens=12)
    with LLM(MODEL, num_device_blocks=64, dtype="float32", offload=bridge) as llm:
        first, *_, again = [llm.generate(document(number), sampling)[0] for number in (0, 1, 2, 3, 0)]
    for visit, output in (("first visit: ", first), ("second visit:", again)):
        loaded = output.metrics.restored_tokens.get("ShelfConnector", 0)
        print(visit, f"{output.metrics.prompt_tokens} tokens, {loaded} of them from the shelf")

    assert again.token_ids == first.token_ids, "a connector must never change an answer"
    assert again.metrics.restored_tokens["ShelfConnector"] > 0
    print("The answers are the same.")


if __name__ == "__main__":
    main()
