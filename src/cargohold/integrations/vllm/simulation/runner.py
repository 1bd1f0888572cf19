"""The fingerprint model in vLLM's order of things."""

from __future__ import annotations

from collections.abc import Mapping

from cargohold.engine.core.step import SchedulerStep
from cargohold.engine.executor.runner import LayerHooks
from cargohold.simulation.fingerprints import FingerprintRunner


class WriteFirstRunner(FingerprintRunner):
    """Writes the KV of a whole batch before any of it is read, layer by layer, as vLLM's model runner does.

    So a request may hit blocks that another one fills in the same step; vLLM's prefix cache counts on it.
    """

    def execute(self, step: SchedulerStep, hooks: LayerHooks | None) -> Mapping[str, int]:
        """Write the step's fingerprints, and check all that it reads."""
        self.wrong.clear()
        self.before_forward()
        pairs = [(share, group) for share in step.scheduled for group in self._groups]
        for share, group in pairs:
            self._write(share, group)
        for share, group in pairs:
            self._read(share, group)
        for share, group in pairs:
            self._compare(share, group, share.write_from, share.num_computed_tokens + share.num_scheduled_tokens)
        return {share.request_id: self._next_token(share) for share in step.scheduled if share.sample is not None}
