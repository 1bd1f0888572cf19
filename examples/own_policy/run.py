"""A replacement policy of your own: what it finds on a trace, and the same policy in an engine.

python run.py [MODEL]
"""

import random
import sys

from oldest_ends import OldestEnds

from cargohold import LLM, OffloadConfig, SamplingParams
from cargohold.cache.policies import POLICIES, ReplacementPolicy
from cargohold.cache.tier_manager import TierManager
from cargohold.protocol import metrics

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"


def hits(policy: type[ReplacementPolicy]) -> float:
    """Share of the chunks looked up that a tier of 200 chunks finds: 500 visits to 60 documents, some of them popular."""
    manager, dice = TierManager(200, policy), random.Random(1)
    found = asked = 0
    for _ in range(500):
        document = int(dice.paretovariate(0.9)) % 60
        keys = [b"%d %d" % (document, at) for at in range(20)]
        found += manager.touch(keys)
        asked += len(keys)
        manager.prepare_store(keys).commit()
    return found / asked


def main() -> None:
    for policy in (OldestEnds, POLICIES["fifo"], POLICIES["lru"]):
        print(f"{policy.name}: {hits(policy):.1%} of the chunks found")

    # Options name it as MODULE:CLASS, also inside vLLM; the module must be importable where the engine runs.
    offload = OffloadConfig(host_bytes="64MiB", policy="oldest_ends:OldestEnds")
    with LLM(MODEL, num_device_blocks=64, dtype="float32", offload=offload) as llm:
        (out,) = llm.generate("Once upon a time", SamplingParams(max_tokens=40, ignore_eos=True))
        llm.settle()
        stored = llm.stats()[metrics.STORED.of("host")]
    print(f"In an engine: {len(out.token_ids)} tokens generated, {stored} chunks stored.")

    assert hits(OldestEnds) > hits(POLICIES["fifo"])
    assert stored > 0


if __name__ == "__main__":
    main()
