"""A context that left the device comes back from host memory: the same answer, its first token sooner.

python run.py [MODEL]
"""

import sys

from cargohold import LLM, OffloadConfig, RequestOutput, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
QUESTION = "\nHow long may a ship at berth 7 be?\nAnswer:"


def handbook(harbour: str) -> str:
    """A long document: about 1,200 tokens."""
    return "".join(f"{harbour}, berth {n}: ships of up to {40 + n} metres.\n" for n in range(70))


def tell(what: str, out: RequestOutput) -> None:
    """Print where the prompt's KV came from, and how soon the answer began."""
    metrics = out.metrics
    restored = metrics.restored_tokens.get("host", 0)
    print(f"{what}: {metrics.prompt_tokens:,} tokens, {restored:,} restored, first token after {metrics.ttft_s:.2f} s")


def main() -> None:
    # The device pool has room for one such document, but not for two.
    offload = OffloadConfig(host_bytes="512MiB", restore="always")
    with LLM(MODEL, num_device_blocks=140, dtype="float32", offload=offload) as llm:
        sampling = SamplingParams(max_tokens=12)
        (first,) = llm.generate(handbook("Antwerp") + QUESTION, sampling)
        tell("Antwerp, first visit ", first)
        for harbour in ("Bergen ", "Calais "):  # they take Antwerp's place on the device
            (other,) = llm.generate(handbook(harbour) + QUESTION, sampling)
            tell(f"{harbour}, first visit ", other)
        llm.settle()  # copies to host memory run in the background; let them end
        (again,) = llm.generate(handbook("Antwerp") + QUESTION, sampling)
        tell("Antwerp, second visit", again)
        print(*again.cache_notes, sep="\n")

    assert again.token_ids == first.token_ids, "a restored context must give the same answer"
    assert again.metrics.restored_tokens["host"] > 0.9 * again.metrics.prompt_tokens
    print("The answers are the same.")


if __name__ == "__main__":
    main()
