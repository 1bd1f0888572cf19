"""A restart forgets nothing: the second engine finds on disk what the first one computed.

python run.py [MODEL]
"""

import sys
import tempfile

from cargohold import LLM, DiskTierConfig, OffloadConfig, RequestOutput, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
HANDBOOK = "".join(f"Antwerp, berth {n}: ships of up to {40 + n} metres.\n" for n in range(70))
PROMPT = HANDBOOK + "\nHow long may a ship at berth 7 be?\nAnswer:"


def serve_once(directory: str) -> RequestOutput:
    """Start an engine, ask it one question, and stop it."""
    disk = DiskTierConfig(directory=directory, max_bytes="4GiB")
    offload = OffloadConfig(host_bytes="512MiB", tiers=[disk])
    with LLM(MODEL, dtype="float32", offload=offload) as llm:
        (out,) = llm.generate(PROMPT, SamplingParams(max_tokens=12))
        llm.settle()  # wait until the KV is on disk; a server need not, it writes in the background
    return out


def tell(what: str, out: RequestOutput) -> None:
    """Print where the prompt's KV came from, and how soon the answer began."""
    metrics = out.metrics
    from_disk = metrics.restored_tokens.get("disk", 0)
    print(
        f"{what}: {metrics.prompt_tokens:,} tokens, {from_disk:,} from disk, first token after {metrics.ttft_s:.2f} s"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        before = serve_once(directory)
        tell("before the restart", before)
        after = serve_once(directory)
        tell("after the restart ", after)

    assert after.token_ids == before.token_ids, "a restored context must give the same answer"
    assert after.metrics.restored_tokens["disk"] > 0.9 * after.metrics.prompt_tokens
    print("The answers are the same.")


if __name__ == "__main__":
    main()
