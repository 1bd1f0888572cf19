"""A guest in thirty lines: counts the chunks that host memory evicts before any request has used them."""

import logging

from cargohold.blocks import READY
from cargohold.connector.kernel.guest import AdmissionReport, Guest, GuestView
from cargohold.connector.kernel.jobs import Store
from cargohold.connector.kernel.requests import RequestState
from cargohold.protocol import BlockIds, TransferOutcome
from cargohold.protocol.metrics import counter

UNUSED = counter("evicted_unused_chunks", "chunks", "Evicted before any request has used them.", start=[()])
logger = logging.getLogger("cargohold.evicted_unused")  # vLLM shows loggers below "cargohold"


class EvictedUnused(Guest):
    """Follows chunks from their store until a request uses them, and looks which have gone whenever a request ends."""

    name = "evicted-unused"

    def __init__(self, view: GuestView) -> None:
        self._view = view
        self._unused: dict[bytes, None] = {}

    def store_ended(self, store: Store, since: float | None, outcome: TransferOutcome) -> None:
        if outcome is TransferOutcome.DONE and len(self._unused) < 10_000:
            self._unused.update(dict.fromkeys(store.handle.keys))

    def request_admitted(self, state: RequestState, admission: AdmissionReport) -> None:
        for key in self._unused.keys() & {key for keys in state.keys for key in keys.keys}:
            del self._unused[key]

    def request_ended(self, state: RequestState, block_ids: BlockIds) -> None:
        followed = list(self._unused)
        found = self._view.lookup(followed)
        gone = [key for key, there in zip(followed, found, strict=True) if there != READY]
        for key in gone:
            del self._unused[key]
        if gone:
            self._view.count(UNUSED.of(), len(gone))
            logger.info("%d chunks evicted unused", len(gone))

    def reset(self) -> None:
        self._unused.clear()  # dropped, not evicted
