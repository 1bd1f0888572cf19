"""The arithmetic of ARC, separate from its lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Balance:
    """The paper's variables, and how chunks that come in change them.

    Attributes:
        capacity: number of slots, ``c``.
        target: number of slots that the first list should have, ``p``.
        sizes: sizes of the lists of chunks used once, ``T1``, and used more often, ``T2``.
        ghosts: sizes of the lists of keys evicted from either: ``B1``, ``B2``.
        num_free: number of free slots.
    """

    capacity: int
    target: float
    sizes: list[int]
    ghosts: list[int]
    num_free: int

    def admit(self, ghosts: Sequence[int | None]) -> list[int]:
        """Let chunks in, the last one first; return how many chunks each list must give up. Mutates everything.

        Args:
            ghosts: for each chunk, the ghost list that it is in, 0 or 1, or ``None``.
        """
        wanted = [0, 0]
        if ghosts.count(None) == len(ghosts):
            self._admit_strangers(len(ghosts), wanted)
            return wanted
        for ghost in reversed(ghosts):
            self._adapt(ghost)
            self._admit_one(ghost, wanted)
        return wanted

    def _adapt(self, ghost: int | None) -> None:
        """Adapt the target to a chunk that comes back, if it is a ghost: its list should have been larger."""
        if ghost is None:
            return
        hit, other = self.ghosts[ghost], self.ghosts[1 - ghost]
        step = max(1.0, other / hit) if hit else 1.0
        self.target = min(self.target + step, self.capacity) if ghost == 0 else max(self.target - step, 0)
        self.ghosts[ghost] -= hit > 0

    def _admit_one(self, ghost: int | None, wanted: list[int]) -> None:
        if self.num_free:
            self.num_free -= 1
        else:
            is_over = self.sizes[0] > self.target or (ghost == 1 and self.sizes[0] == self.target)
            victim = 0 if self.sizes[0] and (is_over or not self.sizes[1]) else 1
            self.sizes[victim] -= 1
            self.ghosts[victim] += 1
            wanted[victim] += 1
        self.sizes[ghost is not None] += 1

    def _admit_strangers(self, num_chunks: int, wanted: list[int]) -> None:
        """Do ``_admit_one`` for chunks in no ghost list at once: the second list gives until the first is above its target."""
        num_free = min(self.num_free, num_chunks)
        num_victims = num_chunks - num_free
        wanted[1] = min(num_victims, self.sizes[1], max(0, int(self.target) + 1 - self.sizes[0] - num_free))
        wanted[0] = num_victims - wanted[1]
        self.num_free -= num_free
        self.sizes = [self.sizes[0] + num_chunks - wanted[0], self.sizes[1] - wanted[1]]
        self.ghosts = [self.ghosts[0] + wanted[0], self.ghosts[1] + wanted[1]]
