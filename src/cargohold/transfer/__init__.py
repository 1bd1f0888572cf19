"""Workers' copies between paged KV and a tier.

``cpu.make_transfer_worker`` picks the implementation for a device. It is not imported here, because it imports torch.
"""

from cargohold.transfer.port import (
    CopyJob,
    CopyResult,
    Direction,
    ForwardingTransfers,
    TransferWorker,
    UnmappedTransfers,
)

__all__ = ["CopyJob", "CopyResult", "Direction", "ForwardingTransfers", "TransferWorker", "UnmappedTransfers"]
