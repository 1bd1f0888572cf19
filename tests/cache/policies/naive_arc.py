"""ARC as in figure 4 of the paper, one key at a time, in four lists."""

from __future__ import annotations


class PaperARC:
    """ARC of Megiddo and Modha, FAST 2003. Each list has its least recently used key first."""

    def __init__(self, capacity: int) -> None:
        self.c = capacity
        self.p = 0.0
        self.t1: list[bytes] = []
        self.t2: list[bytes] = []
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []

    def request(self, x: bytes) -> bool:
        """Put a key into the cache. Returns whether it was there before."""
        if x in self.t1 or x in self.t2:
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
            return True
        if x in self.b1:
            self.p = min(self.p + max(1.0, len(self.b2) / len(self.b1)), self.c)
            self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:
            self.p = max(self.p - max(1.0, len(self.b1) / len(self.b2)), 0)
            self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
        else:
            self.make_place_for_stranger(x)
            self.t1.append(x)
        return False

    def make_place_for_stranger(self, x: bytes) -> None:
        if len(self.t1) + len(self.b1) == self.c:
            if len(self.t1) < self.c:
                del self.b1[0]
                self.replace(x)
            else:
                del self.t1[0]
            return
        total = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
        if total >= self.c:
            if total == 2 * self.c:
                del self.b2[0]
            self.replace(x)

    def replace(self, x: bytes) -> None:
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))
