"""Entry point of the group ``sglang.srt.plugins``: notes when weights are changed in place.

SGLang's keys stand for tokens, so what was stored before would be found afterwards. SGLang empties its own caches then, but
tells no storage of it. Its plugins run at the start of every process, before the model is loaded.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any, Final

logger = logging.getLogger(__name__)

_SCHEDULER: Final = "sglang.srt.managers.scheduler"
_UPDATER: Final = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATES: Final = tuple(f"update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc"))


class WeightsWatch:
    """What is known of this process's weights.

    Attributes:
        began_s: time at which it was begun to watch them, in seconds since 1970; ``None`` if they are not watched.
        change: the update that changed them in place, or that tried to; empty if there was none.
    """

    def __init__(self) -> None:
        self.began_s: float | None = None
        self.change = ""

    def note(self, update: str) -> None:
        """Note that weights are about to change."""
        if not self.change:
            logger.warning("%s: KV is neither stored nor found from now on, until the server is restarted", update)
        self.change = update


watch: Final = WeightsWatch()
"""Of this process: it has one model and one scheduler."""


def register() -> None:
    """Watch the weights, where there is a scheduler. SGLang calls this in each of its processes; it must not raise."""
    if _SCHEDULER not in sys.modules or watch.began_s is not None:
        return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415  # SGLang is there now

        for update in _UPDATES:
            HookRegistry.register(f"{_UPDATER}.{update}", _noting(update), HookType.BEFORE)
    except (ImportError, AttributeError, TypeError) as error:
        logger.error("this SGLang does not report changes of weights: %s", error)  # noqa: TRY400  # one line
    else:
        watch.began_s = time.time()


def _noting(update: str) -> Callable[..., None]:
    def note(*args: Any, **kwargs: Any) -> None:
        del args, kwargs
        watch.note(update)

    return note
