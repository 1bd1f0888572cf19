"""A guest of your own: it hears what the connector does, and says which chunks were kept for nothing.

python run.py [MODEL]
"""

import logging
import sys

from unused import UNUSED

from cargohold import LLM, OffloadConfig, SamplingParams
from cargohold.engine.model.info import describe_model
from cargohold.protocol import metrics

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
BLOCK_TOKENS = 16
BLOCKS_EACH = 12


def prompt(number: int) -> list[int]:
    """A prompt of twelve blocks that begins like no other."""
    return [3 + (37 * number + 11 * at) % 200 for at in range(BLOCKS_EACH * BLOCK_TOKENS)]


def main() -> None:
    logging.basicConfig(format="%(message)s", stream=sys.stdout, force=True)
    logging.getLogger("cargohold.evicted_unused").setLevel(logging.INFO)

    # Room for two prompts. Options name the guest as MODULE:CLASS, also inside vLLM; the module must be importable there.
    chunk_bytes = describe_model(MODEL, "float32").geometry.block_bytes(BLOCK_TOKENS, dtype_bytes=4)
    offload = OffloadConfig(host_bytes=2 * BLOCKS_EACH * chunk_bytes, policy="lru", guests=["unused:EvictedUnused"])
    with LLM(MODEL, num_device_blocks=26, block_tokens=BLOCK_TOKENS, dtype="float32", offload=offload) as llm:
        for number in range(6):
            llm.generate([prompt(number)], SamplingParams(max_tokens=1))
            llm.settle()
        stats = llm.stats()
    stored, evicted = (
        int(stats[series]) for series in (metrics.STORED.of("host"), metrics.REMOVED.of("host", "evicted"))
    )
    print(f"{stored} chunks stored, {evicted} evicted, {int(stats[UNUSED.of()])} of them unused")
    assert evicted > 0


if __name__ == "__main__":
    main()
