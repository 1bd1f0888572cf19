"""What must hold in vLLM with any connector: nothing remembers what is over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from cargohold.lab.simulation.oracles import Oracle
from cargohold.lab.vllm.engine import VllmEngine

_CONNECTORS: Final = (
    "vllm.distributed.kv_transfer",
    "vllm.v1.kv_offload",
    "vllm.v1.simple",
    "cargohold.integrations.vllm",
)
"""Beginnings of the names of modules with parts of connectors."""


class LeftoverOracle(Oracle):
    """At the end, vLLM waits for nothing, and no part of a connector still knows a request.

    Args:
        engine: the replica.
    """

    name = "leftovers"

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def at_end(self) -> None:
        """Look at all that is remembered."""
        vllm, aggregator = self._engine.vllm, self._engine.aggregator
        for what, left in {
            "vLLM waits for loads that have ended": vllm.finished_recving_kv_req_ids,
            "vLLM remembers failed loads": vllm.failed_recving_kv_req_ids,
            "vLLM has not freed blocks": vllm.deferred_frees,
            "vLLM remembers prefills": vllm._inflight_prefills,
            "vLLM waits for more ranks to end loads": aggregator._recv_remaining_count,
            "vLLM waits for more ranks to end sending": aggregator._send_remaining_count,
            "vLLM waits for more ranks whose loads failed": aggregator._failed_recving_pending,
        }.items():
            self.require(not left, f"{what}: {left}")
        names = set(self._engine.requests)
        for side in (vllm.connector, *(worker.connector for worker in self._engine.workers)):
            for path, known in _remembered(side, names, type(side).__name__):
                self.fail(f"{path} still knows {', '.join(known)}, which have ended")


def _remembered(part: Any, names: set[str], path: str, depth: int = 4) -> Iterator[tuple[str, list[str]]]:
    """Attributes that are sets or dictionaries with ids of requests in them, in ``part`` and what it is made of."""
    for name, value in list(getattr(part, "__dict__", {}).items()):
        where = f"{path}.{name}"
        if isinstance(value, dict | set | frozenset):
            left = sorted(str(key) for key in value if isinstance(key, str) and key in names)
            if left:
                yield where, left
        elif isinstance(value, list):
            for at, item in enumerate(value):
                yield from _remembered(item, names, f"{where}[{at}]", depth - 1)
        elif depth and type(value).__module__.startswith(_CONNECTORS):
            yield from _remembered(value, names, where, depth - 1)
