"""An engine of your own that runs Cargohold's offloading connector through the contract.

python run.py
"""

import random

from cargohold import OffloadConfig, protocol
from cargohold.connector.offloading import OffloadingFactory
from engine import VOCABULARY, Engine


def prompts() -> list[list[int]]:
    dice = random.Random(3)
    return [[dice.randrange(VOCABULARY) for _ in range(400)] for _ in range(4)]


def serve(factory: protocol.KVConnectorFactory) -> tuple[list[list[int]], int]:
    """Ask four prompts, each twice; returns the answers, and how many tokens were computed."""
    engine = Engine(factory)
    answers = [engine.generate(f"{visit}-{at}", prompt, 20) for visit in "ab" for at, prompt in enumerate(prompts())]
    engine.close()
    return answers, engine.num_computed_tokens


def main() -> None:
    without, num_without = serve(protocol.NULL_CONNECTOR)
    print(f"without a connector: {num_without:,} tokens computed")
    with_offloading, num_with = serve(OffloadingFactory(OffloadConfig(host_bytes="16MiB", restore="always")))
    print(f"with offloading:     {num_with:,} tokens computed")

    assert with_offloading == without, "a connector must never change an answer"
    assert num_with < 0.7 * num_without
    print("The answers are the same.")


if __name__ == "__main__":
    main()
