"""A Mooncake Store for tests, where the package is there: ``make test-mooncake`` installs it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.mooncake.cluster import Cluster

if find_spec("mooncake") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def usable() -> None:
    """Skips where a library of the system is missing that only its administrator can install."""
    from tests.mooncake.cluster import why_not  # noqa: PLC0415  # this file is read where there is no Mooncake too

    reason = why_not()
    if reason:
        pytest.skip(f"Mooncake cannot be imported: {reason} (apt-get install libibverbs1)")


@pytest.fixture(scope="module")
def store(usable: None) -> Iterator[Cluster]:
    """A store for all tests of a file, none of which harms it."""
    from tests.mooncake.cluster import cluster  # noqa: PLC0415  # the same

    with cluster() as running:
        yield running
