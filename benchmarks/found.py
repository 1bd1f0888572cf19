"""What is found again after the device forgot it, beside what vLLM finds on a device that forgets nothing.

Counts of tokens, inside vLLM with tiny models of every kind that its CPU build runs: they are the same on any machine.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from benchmarks.environment import NotInstalledError
from benchmarks.vllm_contenders import vllm_options

if TYPE_CHECKING:
    from tests.vllm.engine import Answer, Engine

# What vLLM's CPU build computes of LFM2 depends on where steps end: verification finds that, and turns offloading off.
EAGER: Final[Mapping[str, Any]] = {"host_bytes": "512MiB", "restore": "always", "verify": "off"}
LAZY: Final[Mapping[str, Any]] = {"mode": "lazy", **EAGER}
ALONE: Final = "nothing forgotten"
THEIRS: Final = "OffloadingConnector"
CONNECTORS: Final[Mapping[str, Mapping[str, Any] | None]] = {
    ALONE: None,
    THEIRS: vllm_options(512 << 20),
    "Cargohold": EAGER,
    "Cargohold, lazy": LAZY,
}
MAX_TOKENS: Final = 2
_FRESH: Final = count(1000)
"""Seeds of prompts that nobody has asked before: others might be restored."""


@dataclass(frozen=True, slots=True)
class Model:
    """A tiny model of ``tests.vllm.models``.

    Attributes:
        kind: its name there.
        num_blocks: blocks of a device pool that soon forgets.
        options: options for vLLM.
    """

    kind: str
    num_blocks: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        unit = self.options.get("prefix_match_unit")
        return self.kind if unit is None else f"{self.kind}, hashed by {unit} tokens"


_STATES: Final = {"mamba_cache_mode": "align"}
_UNIT: Final = {"prefix_match_unit": 16}
MODELS: Final = (
    Model("llama", 60),
    Model("mistral-window", 90),
    Model("gemma3", 230),
    Model("gpt-oss", 90),
    Model("gemma4", 200),
    Model("deepseek", 130, {"caches_latents": True, "attention_backend": "CPU_MLA"}),
    Model("lfm2", 60, _STATES),
    Model("qwen3-next-many-heads", 60, {**_STATES, "dtype": "bfloat16"}),
    Model("lfm2", 60, _STATES | _UNIT),
    Model("qwen3-next-many-heads", 60, {**_STATES, **_UNIT, "dtype": "bfloat16"}),
)


class Ask(NamedTuple):
    """A request of a traffic.

    Attributes:
        after: number of the request whose prompt and answer its prompt begins with; ``None`` if it begins anew.
        kept: how many of those tokens; ``None`` for all.
        new: number of tokens behind them that nobody has sent before.
    """

    after: int | None
    kept: int | None
    new: int


TRAFFIC: Final[Mapping[str, Sequence[Ask]]] = {
    "same prompt": [Ask(None, 0, 560), Ask(0, 560, 0), Ask(0, 560, 0), Ask(0, 560, 0)],
    # One system prompt, and questions longer than a block.
    "shared beginnings": [Ask(None, 0, 620), *(Ask(0, 500, length) for length in (250, 170, 140, 233))],
    "turns": [Ask(None, 0, 330), Ask(0, None, 110), Ask(1, None, 130), Ask(2, None, 140), Ask(3, None, 90)],
    # An agent that goes on from where it was before: twice from the same place, then from one that lies behind it.
    "forks": [
        Ask(None, 0, 400),
        Ask(0, 400, 150),
        Ask(0, 400, 200),
        Ask(1, 500, 130),
        Ask(1, 500, 170),
        Ask(4, 620, 90),
        Ask(4, 620, 110),
    ],
    # The same prompt, and turns shorter than a block.
    "inside a block": [
        Ask(None, 0, 570),
        Ask(0, 570, 0),
        Ask(0, 570, 0),
        Ask(2, None, 43),
        Ask(3, None, 51),
        Ask(4, None, 37),
    ],
}


def _tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 512) for _ in range(length)]


def found(engine: Engine, name: str, forget: Callable[[Engine], None] | None) -> list[Answer]:
    """Serve a traffic, one request after the other; return the answers.

    Args:
        engine: serves it.
        name: the traffic.
        forget: makes the device forget, between two requests.
    """
    rng, told, answers = random.Random(name), list[list[int]](), list["Answer"]()
    for ask in TRAFFIC[name]:
        prompt = [*([] if ask.after is None else told[ask.after][: ask.kept]), *_tokens(rng, ask.new)]
        answers += engine.ask([prompt], MAX_TOKENS)
        engine.settle()
        told.append([*prompt, *answers[-1].tokens])
        if forget is not None:
            forget(engine)
    return answers


def flood(engine: Engine) -> None:
    """Ask other things until nothing that was cached on the device is left there.

    Ends at the latest when these have filled it three times over: with lazy offloading, blocks that are saved already stay.
    """
    pool = engine.scheduler.kv_cache_manager.block_pool
    before = {block.block_hash for block in pool.blocks} - {None}
    # Each prompt takes five blocks of its own at least.
    for seed in islice(_FRESH, 3 * len(pool.blocks) // 20):
        rng = random.Random(seed)
        engine.ask([_tokens(rng, 150) for _ in range(4)], 1)
        engine.settle()
        if before.isdisjoint(block.block_hash for block in pool.blocks):
            return


def lacks(counts: Sequence[int], alone: Sequence[int]) -> bool:
    """Whether a request finds less than on a device that forgets nothing. The first two only show what is shared."""
    return any(count < expected for count, expected in zip(counts[2:], alone[2:], strict=True))


def run(*, quick: bool) -> dict[str, Any]:
    """Serve each traffic with each model and connector."""
    if find_spec("vllm") is None:
        raise NotInstalledError("vLLM is not installed; run this in an environment that has it")
    from tests.vllm import conftest  # noqa: F401, PLC0415  # sets vLLM's environment variables
    from tests.vllm.models import save_model  # noqa: PLC0415  # after the environment has been set

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for model in [model for model in MODELS if model.name == "lfm2"] if quick else MODELS:
            path = save_model(model.kind, Path(directory))
            traffics = list(TRAFFIC)[1:2] if quick else list(TRAFFIC)
            played = [connector for connector in CONNECTORS if not (quick and connector == THEIRS)]
            counts = {connector: _counts(path, model, connector, traffics) for connector in played}
            for name in traffics:
                by_connector = {connector: of[name] for connector, of in counts.items()}
                alone = by_connector[ALONE]
                lacking = [connector for connector, of in by_connector.items() if lacks(of, alone)]
                rows.append({"model": model.name, "traffic": name, "found_tokens": by_connector, "lacking": lacking})
            print(f"{model.name}: {sum(bool(row['lacking']) for row in rows)} rows lack something so far", flush=True)
    return {
        "workload": {"traffic": {name: list(asks) for name, asks in TRAFFIC.items()}, "max_tokens": MAX_TOKENS},
        "rows": rows,
        "num_lacking": sum(len(row["lacking"]) for row in rows),
    }


def _counts(path: str, model: Model, connector: str, traffics: Sequence[str]) -> dict[str, list[int]]:
    """Tokens that each request of each traffic finds."""
    from tests.vllm.engine import Engine  # noqa: PLC0415  # after the environment has been set

    is_alone = connector == ALONE
    engine = Engine(
        path,
        CONNECTORS[connector],
        num_blocks=1500 if is_alone else model.num_blocks,
        transfer={"kv_connector": THEIRS} if connector == THEIRS else None,
        **model.options,
    )
    forget = None if is_alone else flood
    counts = {name: [answer.device for answer in found(engine, name, forget)] for name in traffics}
    engine.close()
    return counts
