"""A manager of your own, in an engine: what decides which chunks host memory holds, and in which slots.

python run.py [MODEL]
"""

import sys

from cargohold import LLM, OffloadConfig, SamplingParams
from cargohold.protocol import metrics

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"


def main() -> None:
    # Options name it as MODULE:FACTORY, also inside vLLM; the module must be importable where the engine runs.
    offload = OffloadConfig(host_bytes="256MiB", manager="least_recent:LeastRecent", restore="always")
    with LLM(MODEL, num_device_blocks=24, block_tokens=16, dtype="float32", offload=offload) as llm:
        for number in (1, 2, 1):  # the second takes the first one's place on the device
            prompt = [3 + (37 * number + 11 * at) % 200 for at in range(250)]
            (out,) = llm.generate([prompt], SamplingParams(max_tokens=1))
            llm.settle()
        stored = llm.stats()[metrics.STORED.of("host")]
    print(f"{stored} chunks stored, {out.metrics.restored_tokens['host']} tokens restored")
    assert out.metrics.restored_tokens["host"] > 0


if __name__ == "__main__":
    main()
