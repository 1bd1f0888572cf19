"""Shared tiers: servers and object stores that come and go, budgets, clusters."""

from __future__ import annotations

from pathlib import Path

import obstore
import pytest

from cargohold.errors import TierError
from cargohold.lab.simulation.faults import VirtualClock
from cargohold.tiers import (
    BreakerConfig,
    BreakerState,
    LoadOutcome,
    QueueConfig,
    SharedTierConfig,
    StoreOutcome,
    TierQueue,
)
from cargohold.tiers.kinds import open_inventory
from cargohold.tiers.opening import open_tier
from cargohold.tiers.port import JobKind, JobStatus, TierJob
from cargohold.tiers.stores.directory import list_ours
from cargohold.tiers.stores.objects import open_store
from tests.servers import Server, key_value_server
from tests.tiers.clouds import CLOUDS
from tests.tiers.common import CHUNK, NAMESPACE, key, load, payload
from tests.tiers.shared import WAIT_S, shared, store


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_a_server_that_goes_and_comes_back(kind: str) -> None:
    with key_value_server(kind) as server:
        tier = shared(f"{kind}://127.0.0.1:{server.port}", 2.0)
        assert store(tier, 1) is StoreOutcome.STORED
        server.stop()
        for call in (lambda: tier.probe([key(1)]), lambda: store(tier, 2), lambda: load(tier, 1)):
            with pytest.raises(TierError):
                call()
        server.start()
        assert load(tier, 1) is LoadOutcome.ABSENT, "it kept nothing"
        assert store(tier, 1) is StoreOutcome.STORED and load(tier, 1) == payload(1)
        tier.close()


@pytest.mark.parametrize("kind", CLOUDS)
def test_an_object_store_that_goes_and_comes_back(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cloud = CLOUDS[kind]
    with cloud.serve() as server:
        cloud.sign_in(monkeypatch, server.port, tmp_path)
        tier = shared(cloud.url("prefix"), 2.0)
        assert store(tier, 1) is StoreOutcome.STORED
        server.stop()
        for call in (lambda: tier.probe([key(1), key(2)]), lambda: store(tier, 2), lambda: load(tier, 1)):
            with pytest.raises(TierError):
                call()
        server.start()
        cloud.make_place(server.port)
        assert load(tier, 1) is LoadOutcome.ABSENT, "it kept nothing"
        assert store(tier, 1) is StoreOutcome.STORED and load(tier, 1) == payload(1)


@pytest.mark.parametrize("kind", CLOUDS)
def test_an_object_store_keeps_a_budget(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    cloud = CLOUDS[kind]
    cloud.sign_in(monkeypatch, request.getfixturevalue(cloud.fixture).port, tmp_path)
    url = cloud.url(tmp_path.name)
    tier = shared(url, max_bytes=10 * CHUNK)
    for number in range(30):
        assert store(tier, number) is StoreOutcome.STORED
    (holding,) = open_inventory(url).holdings()
    assert 5 * CHUNK <= holding.num_bytes <= 10 * CHUNK
    assert sum(tier.probe([key(number) for number in range(30)])) == holding.num_chunks


def test_a_large_chunk_is_written_at_once(s3: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Found by use: an engine that was killed while it wrote left parts in the bucket that no listing shows."""
    CLOUDS["s3"].sign_in(monkeypatch, s3.port, tmp_path)
    config = SharedTierConfig(url=CLOUDS["s3"].url(tmp_path.name))
    tier = open_tier(config, NAMESPACE, [12 * 1024**2])
    assert tier.store(key(1), memoryview(bytes(12 * 1024**2))) is StoreOutcome.STORED
    stored = open_store(config.url)
    (known,) = (known for known in list_ours(stored) if known.key)
    tag = obstore.head(stored, known.path)["e_tag"]
    assert tag and "-" not in tag, "S3 puts the number of parts there"


def test_a_hanging_server_costs_a_miss_and_not_a_stall() -> None:
    with key_value_server("valkey") as server:
        clock = VirtualClock()
        breaker = BreakerConfig(failures_to_open=1)
        queue = TierQueue(shared(f"redis://127.0.0.1:{server.port}", 0.5), clock, QueueConfig(2, breaker=breaker))
        server.freeze()
        assert queue.submit(TierJob(1, JobKind.PROBE, [key(1)], deadline=1.0))
        clock.advance(2.0)
        (late,) = queue.poll()  # at once, although the thread still waits
        assert late.status is JobStatus.EXPIRED
        assert queue.health().look_up is BreakerState.OPEN
        server.thaw()
        clock.advance(5.0)
        assert queue.submit(TierJob(2, JobKind.STORE, [key(1)], clock() + 60.0, [memoryview(payload(1))]))
        assert queue.drain(WAIT_S)
        assert queue.poll()[0].answers == [StoreOutcome.STORED]
        queue.shutdown(WAIT_S)


def test_a_store_that_is_not_there_at_the_start_may_come_later(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(lambda port: [], lambda port: True)
    tier = shared(f"redis://127.0.0.1:{server.port}", 1.0)
    assert "does not answer yet" in caplog.text
    with pytest.raises(TierError):
        tier.probe([key(1)])
    tier.close()
