"""A transfer worker with faults that a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from cargohold.protocol import Clock, TransferOutcome
from cargohold.tiers import HostMemory
from cargohold.transfer import CopyJob, CopyResult, Direction, ForwardingTransfers, TransferWorker
from cargohold.transfer.cpu import make_transfer_worker
from cargohold.transfer.parts import span_of


@dataclass
class Faults:
    """What goes wrong, and how often something did.

    Attributes:
        outcome: decides the outcome of a job that has been carried out.
        scramble_loads: whether loads deliver other bytes than were stored, and report success.
        spared_regions: number of leading regions whose bytes are delivered as they were stored all the same.
        hold_polls: number of polls for which ended jobs are held back; 0 also ends those that are held back already.
        waits: the direction whose jobs do not begin; ``None`` also begins those that have waited.
        counts: jobs that ended, by direction and outcome.
    """

    outcome: Callable[[CopyJob], TransferOutcome] = lambda _job: TransferOutcome.DONE
    scramble_loads: bool = False
    spared_regions: int = 0
    hold_polls: int = 0
    waits: Direction | None = None
    counts: dict[tuple[Direction, TransferOutcome], int] = field(default_factory=dict)

    def make_transfers(
        self,
        regions: Sequence[torch.Tensor],
        memory: HostMemory,
        clock: Clock,
        further: Sequence[Sequence[torch.Tensor]] = (),
    ) -> TransferWorker:
        """Make a faulty transfer worker; takes the place of ``make_transfer_worker``."""
        return FaultyTransfers(make_transfer_worker(regions, memory, clock, further), [regions, *further], self)


class FaultyTransfers(ForwardingTransfers):
    """Carries out copies, and then changes their outcome, spoils loaded bytes, or reports late."""

    def __init__(self, inner: TransferWorker, views: Sequence[Sequence[torch.Tensor]], faults: Faults) -> None:
        super().__init__(inner)
        self._views = views
        self._faults = faults
        self._held: list[tuple[int, CopyResult]] = []
        self._waiting: list[CopyJob] = []

    def submit(self, job: CopyJob) -> None:
        if job.direction is self._faults.waits:
            self._waiting.append(job)
        else:
            self.inner.submit(job)

    def poll(self) -> list[CopyResult]:
        if self._faults.waits is None:
            for job in self._waiting:
                self.inner.submit(job)
            self._waiting.clear()
        held = [(min(polls - 1, self._faults.hold_polls), result) for polls, result in self._held]
        held += [(self._faults.hold_polls, self._spoil(result)) for result in self.inner.poll()]
        self._held = [entry for entry in held if entry[0] > 0]
        return [result for polls, result in held if polls <= 0]

    def shutdown(self) -> None:
        super().shutdown()
        self._held = [(0, result) for _, result in self._held]

    def _spoil(self, result: CopyResult) -> CopyResult:
        job = result.job
        outcome = max(result.outcome, self._faults.outcome(job))
        if job.direction is Direction.LOAD and (self._faults.scramble_loads or outcome is not TransferOutcome.DONE):
            for number in job.block_ids:
                view, block_id = divmod(number, span_of(self._views[0]))
                for region in self._views[view][self._faults.spared_regions :]:
                    # Changes mantissa bits of every number, so that these stay valid numbers.
                    region[block_id] ^= 0x15
        key = (job.direction, outcome)
        self._faults.counts[key] = self._faults.counts.get(key, 0) + 1
        return replace(result, outcome=outcome)
