"""An inventory of which nothing is deleted, to find out what would be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cargohold.errors import TierError
from cargohold.offload.tier.inventory.base import Finding, Holding, Inventory


class DryRun(Inventory):
    """Another inventory as it is at first, and as it would be after each deletion. Nothing is deleted.

    Args:
        inner: the other inventory; read only.
    """

    def __init__(self, inner: Inventory) -> None:
        self._inner = inner
        self._left: dict[str, Holding] | None = None

    def holdings(self) -> list[Holding]:
        """Return the namespaces that there would be. Those that there are are listed once."""
        return list(self._known().values())

    def verify(self, namespace_id: str, *, delete: bool) -> Iterator[Finding]:
        """Check every chunk; damaged ones stay."""
        del delete
        return self._inner.verify(namespace_id, delete=False)

    def remove(self, namespace_id: str) -> None:
        """Take a namespace for deleted. Only a disk says what is in use."""
        holding = self._known().get(namespace_id)
        if holding is not None and holding.is_in_use:
            raise TierError("disk", f"{namespace_id} is in use")
        self._known().pop(namespace_id, None)

    def trim(self, namespace_id: str, num_bytes: int) -> int:
        """Take chunks of a namespace for deleted."""
        holding = self._known()[namespace_id]
        gone = self._inner.bytes_to_trim(holding, num_bytes)
        self._known()[namespace_id] = replace(holding, num_bytes=holding.num_bytes - gone)
        return gone

    def _known(self) -> dict[str, Holding]:
        if self._left is None:
            self._left = {holding.id: holding for holding in self._inner.holdings()}
        return self._left
