"""A transfer worker of your own in an engine: how many bytes it has copied each way.

python run.py [MODEL]
"""

import sys

from cargohold import LLM, OffloadConfig, SamplingParams
from counting import copied_bytes

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"


def main() -> None:
    # Options name it as MODULE:FACTORY, also inside vLLM; the module must be importable where the workers run.
    offload = OffloadConfig(host_bytes="256MiB", transfer="counting:make", restore="always")
    with LLM(MODEL, num_device_blocks=24, block_tokens=16, dtype="float32", offload=offload) as llm:
        for number in (1, 2, 1):  # the second takes the first one's place on the device
            prompt = [3 + (37 * number + 11 * at) % 200 for at in range(250)]
            (out,) = llm.generate([prompt], SamplingParams(max_tokens=1))
            llm.settle()
    print(f"{copied_bytes['store']:,} bytes to host memory, {copied_bytes['load']:,} bytes back")
    print(f"{out.metrics.restored_tokens['host']} tokens restored")
    assert copied_bytes["store"] > copied_bytes["load"] > 0


if __name__ == "__main__":
    main()
