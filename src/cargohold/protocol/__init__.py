"""The contract between engine and connector. Standard library only: no torch, no engine."""

from cargohold.protocol.aggregation import OutputAggregator
from cargohold.protocol.connector import KVConnectorScheduler, KVConnectorWorker
from cargohold.protocol.context import BlockPoolView, KVCacheBlockView, SchedulerContext
from cargohold.protocol.events import (
    MEDIUM_DEVICE,
    MEDIUM_HOST,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    Locality,
)
from cargohold.protocol.factory import (
    ClassFactory,
    Clock,
    KVConnectorFactory,
    SchedulerEnvironment,
    WorkerEnvironment,
)
from cargohold.protocol.forwarding import ForwardingScheduler
from cargohold.protocol.guard import ConnectorGuard
from cargohold.protocol.kv_cache import (
    NULL_BLOCK_ID,
    AttentionKind,
    BlockIds,
    KVCacheGroup,
    KVCacheLayout,
    ServedModel,
)
from cargohold.protocol.messages import (
    NOTHING_ENDED,
    NOTHING_TO_REPORT,
    CacheReport,
    ConnectorMetadata,
    EmptyMetadata,
    FinishedTransfers,
    KVConnectorOutput,
    KVConnectorSchedulerOutput,
    Stats,
    TransferOutcome,
    UndeliveredMetadata,
    WorkerMetadata,
    add_stats,
    is_level,
    last_name,
)
from cargohold.protocol.null import NULL_CONNECTOR, NullConnectorScheduler, NullConnectorWorker
from cargohold.protocol.patience import Patience
from cargohold.protocol.request import Adapter, ExtraKey, RequestView, ScheduledRequest, StepView
from cargohold.protocol.worker_guard import WorkerConnectorGuard

__all__ = [
    "MEDIUM_DEVICE",
    "MEDIUM_HOST",
    "MEDIUM_STORAGE",
    "NOTHING_ENDED",
    "NOTHING_TO_REPORT",
    "NULL_BLOCK_ID",
    "NULL_CONNECTOR",
    "Adapter",
    "AllBlocksCleared",
    "AttentionKind",
    "BlockIds",
    "BlockPoolView",
    "BlockRemoved",
    "BlockStored",
    "CacheReport",
    "ClassFactory",
    "Clock",
    "ConnectorGuard",
    "ConnectorMetadata",
    "EmptyMetadata",
    "ExtraKey",
    "FinishedTransfers",
    "ForwardingScheduler",
    "KVCacheBlockView",
    "KVCacheGroup",
    "KVCacheLayout",
    "KVConnectorFactory",
    "KVConnectorOutput",
    "KVConnectorScheduler",
    "KVConnectorSchedulerOutput",
    "KVConnectorWorker",
    "KVEvent",
    "Locality",
    "NullConnectorScheduler",
    "NullConnectorWorker",
    "OutputAggregator",
    "Patience",
    "RequestView",
    "ScheduledRequest",
    "SchedulerContext",
    "SchedulerEnvironment",
    "ServedModel",
    "Stats",
    "StepView",
    "TransferOutcome",
    "UndeliveredMetadata",
    "WorkerConnectorGuard",
    "WorkerEnvironment",
    "WorkerMetadata",
    "add_stats",
    "is_level",
    "last_name",
]
