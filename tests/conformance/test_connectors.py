"""Our own connectors pass the suite that others inherit; broken ones do not."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from cargohold.cache.policies import POLICIES
from cargohold.connector.multi import MultiConnectorFactory
from cargohold.connector.offloading import OffloadConfig, OffloadingFactory
from cargohold.lab.conformance import ConnectorConformance
from cargohold.protocol import NULL_CONNECTOR, KVConnectorFactory
from examples.own_connector import shelf


class Quick(ConnectorConformance):
    """One scenario per test; in the long tests, as many as authors of connectors play by default, and more of our own."""

    num_seeds: ClassVar[int] = 1


class TestShelf(ConnectorConformance):
    def factory(self) -> KVConnectorFactory:
        return shelf.FACTORY


class TestOffloading(Quick):
    takes_real_time: ClassVar[bool] = True
    config: ClassVar[dict[str, Any]] = {"host_bytes": 64 * 128}

    def factory(self) -> KVConnectorFactory:
        return OffloadingFactory(OffloadConfig(**self.config))


class TestLazyOffloading(Quick):
    takes_real_time: ClassVar[bool] = True
    needs_context: ClassVar[bool] = True
    needs_prefix_caching: ClassVar[bool] = True

    def factory(self) -> KVConnectorFactory:
        return OffloadingFactory(OffloadConfig(mode="lazy", host_bytes=64 * 128, lookahead_blocks=8))


class TestNothing(Quick):
    may_forget: ClassVar[bool] = True

    def factory(self) -> KVConnectorFactory:
        return NULL_CONNECTOR


@pytest.mark.long
class TestOffloadingLonger(TestOffloading):
    num_seeds: ClassVar[int] = 5


@pytest.mark.long
class TestOffloadingInChunks(TestOffloading):
    num_seeds: ClassVar[int] = 5
    config: ClassVar[dict[str, Any]] = {"host_bytes": 20 * 256, "blocks_per_chunk": 2, "policy": "arc"}


@pytest.mark.long
class TestLazyOffloadingLonger(TestLazyOffloading):
    num_seeds: ClassVar[int] = 5


@pytest.mark.long
class TestComposed(Quick):
    num_seeds: ClassVar[int] = 5
    takes_real_time: ClassVar[bool] = True

    def factory(self) -> KVConnectorFactory:
        eager = [OffloadingFactory(OffloadConfig(host_bytes=64 * 64, policy=policy)) for policy in sorted(POLICIES)]
        return MultiConnectorFactory(tuple(eager[:2]))


@pytest.mark.parametrize("suite", [TestOffloadingInChunks, TestComposed])
def test_larger_chunks_and_composed_connectors_pass_its_first_test(
    suite: type[ConnectorConformance], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One workload in the quick tests, all of them in the long ones."""
    monkeypatch.setattr(suite, "num_seeds", 1)
    suite().test_tokens_blocks_and_endings_are_right("shared-prefix")
