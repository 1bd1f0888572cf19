"""A connector of your own, in an engine that knows nothing of it.

python run.py [MODEL]
"""

import sys

import shelf

from cargohold import LLM, SamplingParams, protocol

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
HANDBOOK = "".join(f"Antwerp, berth {n}: ships of up to {40 + n} metres.\n" for n in range(30))


class Shelf(shelf.ShelfScheduler):
    """With room for all prompts of this example, and a count of what was loaded."""

    num_places = 400
    num_loaded = 0

    def build_connector_meta(self, step: protocol.StepView) -> shelf.Orders:
        orders = super().build_connector_meta(step)
        Shelf.num_loaded += len(orders.loads)
        return orders


def main() -> None:
    factory = protocol.ClassFactory(Shelf, shelf.ShelfWorker)
    sampling = SamplingParams(max_tokens=12)
    with LLM(MODEL, num_device_blocks=64, dtype="float32", offload=factory) as llm:
        (first,) = llm.generate(HANDBOOK, sampling)
        print(f"first visit:  {first.metrics.prompt_tokens:,} tokens, {Shelf.num_loaded} blocks from the shelf")
        for number in range(2):  # others take its place on the device
            llm.generate(f"Bergen {number}. {HANDBOOK}", sampling)
        (again,) = llm.generate(HANDBOOK, sampling)
        print(f"second visit: {again.metrics.prompt_tokens:,} tokens, {Shelf.num_loaded} blocks from the shelf")

    assert again.token_ids == first.token_ids, "a connector must never change an answer"
    assert Shelf.num_loaded > 0
    print("The answers are the same.")


if __name__ == "__main__":
    main()
