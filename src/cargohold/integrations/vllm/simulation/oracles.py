"""The oracle for vLLM and the adapter, besides those for every engine."""

from __future__ import annotations

from collections.abc import Mapping, Sized

from cargohold.integrations.vllm.simulation.engine import VllmEngine
from cargohold.simulation.oracles import Oracle


class BridgeOracle(Oracle):
    """At the end, neither vLLM nor either side of the adapter remembers requests and transfers that are over.

    Args:
        engine: the replica.
    """

    name = "bridge"

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def at_end(self) -> None:
        """Check that nothing is remembered any more."""
        for what, left in self._remembered().items():
            self.require(not left, f"{what}: {left}")

    def _remembered(self) -> Mapping[str, Sized]:
        vllm, side, aggregator = self._engine.vllm, self._engine.side, self._engine.aggregator
        remembered: dict[str, Sized] = {
            "vLLM waits for loads that have ended": vllm.finished_recving_kv_req_ids,
            "vLLM remembers failed loads": vllm.failed_recving_kv_req_ids,
            "vLLM has not freed blocks": vllm.deferred_frees,
            "vLLM remembers prefills": vllm._inflight_prefills,
            "vLLM waits for more ranks to end loads": aggregator._recv_remaining_count,
            "vLLM waits for more ranks to end sending": aggregator._send_remaining_count,
            "vLLM waits for more ranks whose loads failed": aggregator._failed_recving_pending,
            "the adapter knows requests": side._requests,
            "the adapter waits for loads": side._loading,
            "the adapter waits for look-ups": side._deferrals,
            "the adapter remembers failed loads": side._failed,
            "the adapter remembers loads": side._parked,
            "the adapter remembers hits": side._num_computed,
            "the adapter remembers admissions": side._admitted,
        }
        for rank, worker in enumerate(self._engine.workers):
            own = worker.connector._worker
            remembered[f"the adapter on rank {rank} waits for loads"] = own._loading
            remembered[f"the adapter on rank {rank} waits for sending"] = own._sending
            remembered[f"the adapter on rank {rank} remembers failed loads"] = own._failed
        return remembered
