"""Two engines, one store: the second engine finds what the first one computed.

python run.py [MODEL]
"""

import sys
import tempfile

from cargohold import LLM, OffloadConfig, RequestOutput, SamplingParams, SharedTierConfig

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
HANDBOOK = "".join(f"Antwerp, berth {n}: ships of up to {40 + n} metres.\n" for n in range(70))


def start_engine(url: str) -> LLM:
    """An engine with host memory of its own, and the common store below it."""
    store = SharedTierConfig(url=url)
    return LLM(MODEL, dtype="float32", num_device_blocks=150, offload=OffloadConfig(host_bytes="512MiB", tiers=[store]))


def ask(llm: LLM, question: str) -> RequestOutput:
    (out,) = llm.generate(f"{HANDBOOK}\n{question}\nAnswer:", SamplingParams(max_tokens=12))
    llm.settle()  # wait until the KV is in the store; a server need not, it writes in the background
    return out


def tell(what: str, out: RequestOutput) -> None:
    """Print where the prompt's KV came from, and how soon the answer began."""
    metrics = out.metrics
    shared = metrics.restored_tokens.get("shared", 0)
    print(
        f"{what}: {metrics.prompt_tokens:,} tokens, {shared:,} from the store, first token after {metrics.ttft_s:.2f} s"
    )


def main() -> None:
    # A directory, as on NFS. An object store or Redis works alike: s3://bucket/prefix, redis://host:6379/0.
    with tempfile.TemporaryDirectory() as directory:
        url = f"file://{directory}"
        with start_engine(url) as one, start_engine(url) as two:
            first = ask(one, "How long may a ship at berth 7 be?")
            tell("engine one", first)
            second = ask(two, "How long may a ship at berth 9 be?")
            tell("engine two", second)
            print(*second.cache_notes, sep="\n")

    assert second.metrics.restored_tokens["shared"] > 0.9 * second.metrics.prompt_tokens
    print("Engine two computed nothing of the handbook.")


if __name__ == "__main__":
    main()
