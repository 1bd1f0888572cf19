"""Copies KV down as it is computed, and loads it back on a prefix hit."""

from cargohold.connector.config import HintConfig, OffloadConfig, TenantQuota
from cargohold.connector.offloading.factory import OffloadingFactory
from cargohold.connector.offloading.scheduler import OffloadingScheduler
from cargohold.connector.offloading.worker import OffloadingWorker

__all__ = ["HintConfig", "OffloadConfig", "OffloadingFactory", "OffloadingScheduler", "OffloadingWorker", "TenantQuota"]
