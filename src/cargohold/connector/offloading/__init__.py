"""Copies KV down as it is computed, and loads it back on a prefix hit."""

from cargohold.connector.config import HintConfig, OffloadConfig, TenantQuota
from cargohold.connector.kernel.worker import OffloadingWorker
from cargohold.connector.offloading.factory import OffloadingFactory
from cargohold.connector.offloading.scheduler import OffloadingScheduler

__all__ = ["HintConfig", "OffloadConfig", "OffloadingFactory", "OffloadingScheduler", "OffloadingWorker", "TenantQuota"]
