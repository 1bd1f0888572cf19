"""Several connectors as one."""

from cargohold.connector.multi.factory import MultiConnectorFactory
from cargohold.connector.multi.scheduler import MultiConnectorScheduler
from cargohold.connector.multi.worker import MultiConnectorWorker

__all__ = ["MultiConnectorFactory", "MultiConnectorScheduler", "MultiConnectorWorker"]
