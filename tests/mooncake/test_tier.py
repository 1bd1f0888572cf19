"""The conformance suite over a real Mooncake Store, and what is this store's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path

import pytest

from cargohold.cache.manager import OffloadKey
from cargohold.errors import TierError
from cargohold.lab.conformance.tier import TierConformance
from cargohold.tiers import LoadOutcome, Opening, SharedTierConfig, StoreOutcome, Tier
from cargohold.tiers.stores.mooncake import ClientProcess
from tests.mooncake.cluster import Cluster, cluster, until
from tests.servers import free_port
from tests.tiers.common import codec, key, load, payload
from tests.tiers.shared import raising

SECONDS = 2.0
"""Of a request: where the master is gone, Mooncake's client tries for four."""


def open_tier(
    store: Cluster,
    weights: str = "w",
    secret: bytes | None = None,
    size: int = 10_000,
    options: SharedTierConfig | None = None,
) -> Tier:
    opening = Opening(codec=codec(secret, weights=weights), chunk_sizes=[size], request_s=SECONDS)
    return (options or SharedTierConfig(url=store.url, num_threads=3)).open(opening)


class TestMooncake(TierConformance):
    is_shared = True
    secret: bytes | None = None
    store: Cluster

    @pytest.fixture
    def place(self, store: Cluster, tmp_path: Path) -> Iterator[Path]:
        type(self).store = store
        yield tmp_path
        if not store.is_up():
            store.master.start()
            store.await_segments(1)

    def open(self, place: Path) -> Tier:
        return open_tier(self.store, str(place), self.secret, self.chunk_bytes)

    def damage(self, place: Path, chunk: OffloadKey) -> None:
        name = f"cargohold:{codec(self.secret, weights=str(place)).namespace.id}:{chunk.hex()}"
        with closing(ClientProcess(self.store.url, {}, num_bytes=2 * self.chunk_bytes)) as client:
            size = client.call("get", name, 0, 2 * self.chunk_bytes)
            client.memory[size // 2] ^= 1
            assert client.call("remove", [name]) == [0]
            assert client.call("put", name, 0, size, False) == [0, 1]

    def break_medium(self, place: Path) -> None:
        self.store.master.stop()


class TestEncrypted(TestMooncake):
    secret = bytes(range(32))


def test_chunks_in_its_staging_memory_are_not_copied(store: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(open_tier(store, "staged")) as tier:
        staged = tier.staging()
        staged[:] = payload(1)
        numbers = count(2)

        def stores() -> bool:
            with suppress(TierError):
                return tier.store(key(next(numbers)), staged) is StoreOutcome.STORED
            return False

        until(stores, "it stores nothing")  # and the namespace's description, which is copied
        for module in ("base", "mooncake"):
            monkeypatch.setattr(f"cargohold.tiers.stores.{module}.copy_bytes", raising(AssertionError("copied")))
        assert tier.store(key(1), staged) is StoreOutcome.STORED
        staged[:] = bytes(len(staged))
        assert tier.load(key(1), staged) is LoadOutcome.LOADED and staged == payload(1)


def test_metadata_may_come_from_the_masters_own_server(usable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    server = ["--enable_http_metadata_server=true", f"--http_metadata_server_port={port}"]
    metadata = f"http://127.0.0.1:{port}/metadata"
    monkeypatch.setenv("MOONCAKE_TE_META_DATA_SERVER", metadata)
    with cluster(*server, metadata=metadata) as own, closing(open_tier(own)) as tier:
        assert tier.store(key(1), memoryview(payload(1))) is StoreOutcome.STORED
        assert load(tier, 1) == payload(1)
