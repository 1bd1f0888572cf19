"""Two replicas behind a router that follows their KV events: each turn of a conversation goes where its KV is.

python run.py [MODEL]
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from statistics import mean

from router import Router

from cargohold import LLM, DiskTierConfig, OffloadConfig, RequestMetrics, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
NUM_CONVERSATIONS, NUM_TURNS = 5, 3
OPTIONS = {"dtype": "float32", "num_device_blocks": 40, "max_model_len": 600}


def question(conversation: int, turn: int) -> str:
    """What the user says: some eighty tokens."""
    return (
        "".join(f"Ship {conversation}{turn}{n} is {40 + n} metres long. " for n in range(8)) + "Which one is longest?\n"
    )


def play(replicas: Sequence[LLM], choose: Callable[[Sequence[int]], int]) -> list[RequestMetrics]:
    """Play all conversations, turn by turn, each prompt on the replica that ``choose`` names."""
    history: list[list[int]] = [[] for _ in range(NUM_CONVERSATIONS)]
    told = []
    for turn in range(NUM_TURNS):
        for conversation in range(NUM_CONVERSATIONS):
            prompt = history[conversation] + replicas[0].tokenize(question(conversation, turn))
            replica = replicas[choose(prompt)]
            (out,) = replica.generate([prompt], SamplingParams(max_tokens=4))
            history[conversation] = [*prompt, *out.token_ids]
            told.append(out.metrics)
    return told


def tell(policy: str, metrics: Sequence[RequestMetrics]) -> float:
    """Print how much was found, where, and how soon answers began; return the part of all prompt tokens that was found."""
    total = sum(each.prompt_tokens for each in metrics)
    found = Counter(device=sum(each.device_tokens for each in metrics))
    for each in metrics:
        found.update(each.restored_tokens)
    places = ", ".join(f"{place} {100 * found[place] / total:.0f} %" for place in ("device", "host", "disk"))
    first = 1000 * mean(each.ttft_s or 0.0 for each in metrics)
    print(f"{policy}: found {100 * found.total() / total:.0f} % ({places}), first token after {first:.0f} ms")
    return found.total() / total


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        endpoints = [f"ipc://{directory}/events{at}" for at in range(2)]
        offloads = [
            OffloadConfig(host_bytes="32MiB", tiers=[DiskTierConfig(directory=f"{directory}/{at}", max_bytes="1GiB")])
            for at in range(2)
        ]
        with (
            LLM(MODEL, offload=offloads[0], kv_events_endpoint=endpoints[0], **OPTIONS) as first,
            LLM(MODEL, offload=offloads[1], kv_events_endpoint=endpoints[1], **OPTIONS) as second,
        ):
            replicas = (first, second)
            for replica in replicas:
                replica.generate("A first prompt takes longer.", SamplingParams(max_tokens=1))
            turns = count()
            in_turn = tell("round robin", play(replicas, lambda _: next(turns) % len(replicas)))
            for replica in replicas:
                assert replica.reset_cache()
            router = Router(endpoints)
            routed = tell("by KV      ", play(replicas, router.choose))
            router.close()
    assert routed > in_turn, "a router that knows where KV is finds more of it"


if __name__ == "__main__":
    main()
