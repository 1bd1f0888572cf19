"""Lets vLLM's scheduler tell a connector of blocks long after it has asked, or never, and take nothing of what was found.

vLLM 0.33 does the first where loads must not begin before a step in flight has ended (HiSparse), and the last where it cannot
use a hit (the experts of routed tokens that it has not kept). Here it happens with any model.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Final

LATE_BLOCKS: Final = "late_blocks"
"""Key in a shape's scheduler options: the probability that blocks come late; half of it, that nothing of a hit is taken."""
MAX_STEPS: Final = 12
"""Most steps by which blocks come late."""


@dataclass(slots=True)
class _Late:
    """Blocks that the connector learns of later.

    Attributes:
        request: vLLM's request.
        num_tokens: tokens to be loaded into them.
        num_steps: steps until then.
    """

    request: Any
    num_tokens: int
    num_steps: int


class LateBlocks:
    """Stands between vLLM's scheduler and its connector, two of whose hooks it replaces.

    Args:
        vllm: the scheduler.
        rate: see ``LATE_BLOCKS``.
        random: decides how late.
    """

    def __init__(self, vllm: Any, rate: float, random: Random) -> None:
        self._vllm = vllm
        self._rate = rate
        self._random = random
        self._late: dict[str, _Late] = {}
        connector = vllm.connector
        self._ask, self._tell = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
        connector.get_num_new_matched_tokens = self._ask_and_take
        connector.update_state_after_alloc = self._tell_later

    def step(self) -> None:
        """Tell the connector of the blocks whose time has come."""
        for request_id, late in list(self._late.items()):
            late.num_steps -= 1
            if late.num_steps <= 0:
                del self._late[request_id]
                blocks = self._vllm.kv_cache_manager.get_blocks(request_id)
                self._tell(late.request, blocks, late.num_tokens)

    def forget(self, request_id: str) -> None:
        """Tell the connector never: the request ends. Its load has not begun, so vLLM is not to wait for it."""
        if self._late.pop(request_id, None) is not None:
            self._vllm.finished_recving_kv_req_ids.add(request_id)

    def _ask_and_take(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens, is_async = self._ask(request, num_computed_tokens)
        if num_tokens and self._random.random() < self._rate / 2:
            return 0, False
        return num_tokens, is_async

    def _tell_later(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens and self._random.random() < self._rate:
            num_steps = self._random.randint(1, MAX_STEPS)
            self._late[request.request_id] = _Late(request, num_external_tokens, num_steps)
        else:
            self._tell(request, blocks, num_external_tokens)
