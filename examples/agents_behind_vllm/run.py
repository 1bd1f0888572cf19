"""Agents whose tools pause, behind vLLM: the connector alone, with the front, and with pins of their own.

python run.py [MODEL]
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import vllm
from clients import MODEL, Turn, anthropic_agent, openai_agent, others
from scripted import save_scripted, sizes

sys.path.append(str(Path(__file__).parents[1]))  # vllm_server is beside this directory

from vllm_server import serving

AGENTS: dict[str, Callable[..., list[Turn]]] = {"OpenAI's client": openai_agent, "Anthropic's client": anthropic_agent}
SYSTEM_CHARS, NUM_OTHERS, OTHERS_CHARS = 800, 5, 900
BLOCK_TOKENS, DEVICE_TOKENS, HOST_TOKENS = 32, 1344, 2560
"""Room on the device and in host memory: together less than what others ask for while a tool runs."""
FRONT = {"middleware": "cargohold.serve.front.Front"}


def pin(number: int) -> dict[str, Any]:
    """What a client has to say itself without a front."""
    action = {"action_id": "pin", "action_type": "pin", "payload": {"ttl_s": 300, "lease": f"agent {number}"}}
    return {"kv_transfer_params": {"cargohold_hints": {"protocol_version": "1", "actions": [action]}}}


@contextmanager
def server(model: str, kv_bytes: int, log: Path, **front: str) -> Iterator[str]:
    """vLLM with Cargohold."""
    # LRU, because the default policy learns from such pauses: what it keeps depends on what came before.
    extra = {
        "host_bytes": HOST_TOKENS * kv_bytes,
        "restore": "always",
        "policy": "lru",
        "hints": {"pin_fraction": 0.75},
    }
    connector = {"kv_connector": "CargoholdConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    options = {
        "served-model-name": MODEL,
        "enable-auto-tool-choice": True,
        "tool-call-parser": "hermes",
        "enable-prompt-tokens-details": True,  # the front does without
        "dtype": "float32",
        "block-size": BLOCK_TOKENS,
        "num-gpu-blocks-override": DEVICE_TOKENS // BLOCK_TOKENS,
        "max-model-len": 1280,
        "max-num-batched-tokens": 512,
        "enforce-eager": True,
    }
    with serving(model, log, transfer_config=connector, options=options | front) as url:
        others(url, 0, 1, 100)  # the first request is slow
        yield url


def second_turns(url: str, round_number: int, *, pins: bool = False) -> list[Turn]:
    """Let each agent think, use its tool while others fill the cache, and think again; returns the second turns."""
    found = []
    for number, agent in enumerate(AGENTS.values(), start=10 * round_number):

        def tool(number: int = number) -> str:
            others(url, number, NUM_OTHERS, OTHERS_CHARS)
            return "2.3 m"

        system = f"{number}. {'You know all harbours. ' * SYSTEM_CHARS}"[:SYSTEM_CHARS]
        found.append(agent(url, system, tool, **(pin(number) if pins else {}))[1])
    return found


def main() -> None:
    given = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    size = sizes(given)
    kv_bytes = size["num_hidden_layers"] * 2 * size["num_key_value_heads"] * size["head_dim"] * 4
    print(f"vLLM {vllm.__version__}, a model of {size['num_hidden_layers']} layers of {size['hidden_size']}")
    with tempfile.TemporaryDirectory() as directory:
        model = save_scripted(Path(directory, "model"), given)
        with server(model, kv_bytes, Path(directory, "alone.log")) as url:
            alone, pinned = second_turns(url, 1), second_turns(url, 2, pins=True)
        with server(model, kv_bytes, Path(directory, "front.log"), **FRONT) as url:
            behind = second_turns(url, 3)

    print(f"after the tool {'connector alone':>26} {'with the front':>26} {'with pins':>26}")
    for name, *turns in zip(AGENTS, alone, behind, pinned, strict=True):
        print(f"{name:<18}", *(f"{turn.cached_tokens:>12,} found, {turn.first_s * 1000:>4.0f} ms" for turn in turns))
    assert all(turn.cached_tokens > 0.9 * SYSTEM_CHARS for turn in (*behind, *pinned))
    assert all(turn.cached_tokens < 0.1 * SYSTEM_CHARS for turn in alone)
    print("The clients are the same with the front and without.")


if __name__ == "__main__":
    main()
