"""Several connectors as one."""

from cargohold.connector.multi.scheduler import MultiConnectorFactory, MultiConnectorScheduler
from cargohold.connector.multi.worker import MultiConnectorWorker

__all__ = ["MultiConnectorFactory", "MultiConnectorScheduler", "MultiConnectorWorker"]
