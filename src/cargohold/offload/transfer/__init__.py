"""Workers' copies between paged KV and a tier.

``factory`` picks the implementation for a device; it imports torch, so import it where a device is at hand.
"""

from cargohold.offload.transfer.base import CopyJob, CopyResult, Direction, TransferWorker

__all__ = ["CopyJob", "CopyResult", "Direction", "TransferWorker"]
