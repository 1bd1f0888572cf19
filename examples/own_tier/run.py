"""A tier of your own below host memory: a second engine finds in it what the first one computed.

python run.py [MODEL]
"""

import sys
import tempfile
from pathlib import Path

from folder import FolderConfig

from cargohold import LLM, OffloadConfig, RequestOutput, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
HANDBOOK = "".join(f"Antwerp, berth {n}: ships of up to {40 + n} metres.\n" for n in range(30))


def serve_once(path: str) -> RequestOutput:
    offload = OffloadConfig(host_bytes="256MiB", tiers=[FolderConfig(path=path)])
    with LLM(MODEL, dtype="float32", offload=offload) as llm:
        (out,) = llm.generate(HANDBOOK, SamplingParams(max_tokens=12))
        llm.settle()  # wait until all is in the tier
    return out


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        before = serve_once(directory)
        files = [file for file in Path(directory).rglob("*") if file.is_file()]
        print(f"one engine:     {before.metrics.prompt_tokens:,} tokens computed, {len(files)} files written")
        after = serve_once(directory)
        found = after.metrics.restored_tokens.get("folder", 0)
        print(f"another engine: {found:,} tokens from the folder")

    assert after.token_ids == before.token_ids, "a restored context must give the same answer"
    assert found > 0.9 * after.metrics.prompt_tokens
    print("The answers are the same.")


if __name__ == "__main__":
    main()
