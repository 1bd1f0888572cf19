"""What a tier that can never work says at the start: missing rights, a missing bucket, sizes for which there is no room."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cargohold.errors import ConfigError
from cargohold.lab.simulation.faults import VirtualClock
from cargohold.tiers import (
    DiskTierConfig,
    LoadOutcome,
    QueueConfig,
    SharedTierConfig,
    StoreOutcome,
    Tier,
    TierConfig,
    TierQueue,
    check_tier,
    open_tier,
)
from cargohold.tiers.chunk_format import HEADER_BYTES
from cargohold.tiers.port import JobKind, JobStatus, TierJob
from tests.servers import BUCKET, Server, set_credentials
from tests.tiers.clouds import CLOUDS
from tests.tiers.common import CHUNK, NAMESPACE, key, load, payload
from tests.tiers.shared import store

WAIT_S = 20.0
MIB = 1024**2
GIB = 1024**3


# --- rights -----------------------------------------------------------------------------------------------------------


class Bucket:
    """A server of S3 with one bucket, whose answers to credentials that lack a right are those of Amazon.

    Attributes:
        port: where it listens.
        objects: contents by path.
        denied: actions that are denied: ``put``, ``head``, ``get``, ``delete``, ``list``.
    """

    def __init__(self) -> None:
        bucket = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def answer(self) -> None:
                status, body = bucket.answer(self.command, self.path, self.rfile.read(self.num_sent))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", '"1"')
                self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def do_DELETE(self) -> None:
                if not bucket.is_endless:
                    return self.answer()
                bucket.answer(self.command, self.path, b"")
                self.send_response(200)
                self.end_headers()
                with suppress(OSError):
                    while bucket.num_sent < 256 * MIB:
                        bucket.num_sent += self.wfile.write(bytes(MIB))
                bucket.sent_all.set()
                return None

            @property
            def num_sent(self) -> int:
                return int(self.headers.get("Content-Length") or 0)

            do_GET = do_PUT = do_HEAD = answer  # noqa: N815  # the names are the base class's

        self.objects: dict[str, bytes] = {}
        self.denied: set[str] = set()
        self.is_endless = False
        self.num_sent = 0
        self.sent_all = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port

    @contextmanager
    def serving(self) -> Iterator[None]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def answer(self, command: str, path: str, sent: bytes) -> tuple[int, bytes]:
        path, _, query = path.partition("?")
        action = "list" if "list-type" in query else command.lower()
        if action in self.denied:
            return 403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        if action == "list":
            return 200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
        if action == "put":
            self.objects[path] = sent
            return 200, b""
        if action == "delete":
            self.objects.pop(path, None)
            return 204, b""
        found = self.objects.get(path)
        return (404, b"<Error><Code>NoSuchKey</Code></Error>") if found is None else (200, found)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    bucket = Bucket()
    set_credentials(monkeypatch, bucket.port)
    with bucket.serving():
        yield bucket


def in_bucket(max_bytes: str | None = None) -> Tier:
    config = SharedTierConfig(url=f"s3://{BUCKET}/kv", max_bytes=max_bytes)
    return open_tier(config, NAMESPACE, [CHUNK], request_s=WAIT_S)


def test_an_endless_answer_to_a_deletion_is_not_read(bucket: Bucket) -> None:
    """Found by attack: it was read into memory, a gigabyte in five seconds."""
    with closing(in_bucket()) as tier:
        store(tier, 1)
        bucket.is_endless = True
        tier.remove([key(1)])
        bucket.is_endless = False
        assert bucket.sent_all.wait(WAIT_S) and bucket.num_sent < 16 * MIB, "what sockets keep"
        assert tier.probe([key(1)]) == [False]


@pytest.mark.parametrize(
    ("action", "purpose"),
    [("put", "writing"), ("head", "reading, or for listing"), ("delete", "deleting"), ("list", "listing")],
)
def test_credentials_that_lack_a_right_are_refused_and_the_right_is_named(
    bucket: Bucket, action: str, purpose: str
) -> None:
    """Found by reading: deleting and listing were not tried, and failed when the engine had run for long."""
    store(in_bucket("1MiB"), 1)
    bucket.denied = {action}
    with pytest.raises(ConfigError, match=f"url='s3://{BUCKET}/kv'.*refuses access for {purpose}.*(Denied|Forbidden)"):
        in_bucket("1MiB")


def test_who_sets_no_limit_needs_no_list(bucket: Bucket) -> None:
    bucket.denied = {"list"}
    assert store(in_bucket(), 1) is StoreOutcome.STORED


def damaged(bucket: Bucket, number: int) -> None:
    (name,) = (name for name in bucket.objects if name.endswith(key(number).hex()))
    bucket.objects[name] = bucket.objects[name][:-1] + b"?"


def test_a_damaged_chunk_that_may_not_be_deleted_is_a_miss_and_no_failure(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by use: one such chunk, three requests that wanted it, and nothing was loaded from the store any more."""
    tier = in_bucket()
    for number in range(3):
        store(tier, number)
    damaged(bucket, 1)
    bucket.denied = {"delete"}
    clock = VirtualClock()
    queue = TierQueue(tier, clock, QueueConfig())
    for job in range(6):
        into = [memoryview(bytearray(CHUNK)) for _ in range(3)]
        keys = [key(number) for number in range(3)]
        assert queue.submit(TierJob(job, JobKind.LOAD, keys, clock() + 60.0, into)), "loads are not suspended"
        assert queue.drain(WAIT_S)
        (result,) = queue.poll()
        assert result.answers == [LoadOutcome.LOADED, LoadOutcome.CORRUPT, LoadOutcome.LOADED]
        assert result.status is JobStatus.DONE
    queue.shutdown(WAIT_S)
    assert "it is deleted" not in caplog.text
    assert f"chunk {key(1).hex()} is damaged, and cannot be deleted: " in caplog.text


def test_a_damaged_chunk_is_said_to_be_deleted_when_it_is(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    tier = in_bucket()
    store(tier, 1)
    damaged(bucket, 1)
    assert load(tier, 1) is LoadOutcome.CORRUPT
    assert f"chunk {key(1).hex()} is damaged; it is deleted" in caplog.text
    assert store(tier, 1) is StoreOutcome.STORED and load(tier, 1) == payload(1)


@pytest.mark.parametrize("kind", CLOUDS)
def test_a_bucket_that_is_not_there_is_refused_by_name(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Found by use: it was said not to answer yet, so the engine ran without the tier for good."""
    cloud = CLOUDS[kind]
    server: Server = request.getfixturevalue(cloud.fixture)
    cloud.sign_in(monkeypatch, server.port, tmp_path)
    url = cloud.url("prefix").replace(BUCKET, "nosuchplace")
    place = "container" if kind == "azure" else "bucket"
    with pytest.raises(ConfigError, match=f"there is no such {place}; create it") as caught:
        open_tier(SharedTierConfig(url=url), NAMESPACE, [CHUNK])
    assert (caught.value.key, caught.value.value) == ("url", url)


# --- sizes ------------------------------------------------------------------------------------------------------------


def refusals(config: TierConfig, chunk_bytes: int, num_shards: int = 1) -> list[ConfigError]:
    """What is refused, before anything is loaded, and by whoever opens a tier alone."""
    refused = []
    try:
        check_tier(config, [chunk_bytes], num_shards)
    except ConfigError as error:
        refused.append(error)
    try:
        open_tier(config, NAMESPACE, [chunk_bytes], num_shards).close()
    except ConfigError as error:
        refused.append(error)
    return refused


VALUE = HEADER_BYTES + CHUNK


@pytest.mark.parametrize(("num_shards", "need"), [(1, VALUE), (2, 3 * VALUE), (8, 15 * VALUE)])
def test_a_limit_without_room_for_a_chunk_is_refused(tmp_path: Path, num_shards: int, need: int) -> None:
    """Found by use: nothing was stored, and nothing was said."""

    def limited(max_bytes: int) -> SharedTierConfig:
        return SharedTierConfig(url=f"file://{tmp_path}", max_bytes=max_bytes)

    assert [error.key for error in refusals(limited(need - 1), CHUNK, num_shards)] == ["max_bytes"] * 2
    assert refusals(limited(need), CHUNK, num_shards) == []
    tier = open_tier(limited(VALUE), NAMESPACE, [CHUNK])
    (tmp_path / NAMESPACE.id / "namespace.json").unlink()
    assert store(tier, 1) is StoreOutcome.STORED


@pytest.mark.parametrize("num_shards", [1, 4])
def test_a_daily_limit_without_room_for_a_chunk_is_refused(tmp_path: Path, num_shards: int) -> None:
    """Found by use: one chunk was written at the start, and none in the year after."""

    def limited(max_daily_bytes: int) -> DiskTierConfig:
        return DiskTierConfig(directory=tmp_path, max_bytes="16MiB", reserve_bytes=0, max_daily_bytes=max_daily_bytes)

    refused = refusals(limited(num_shards * CHUNK - 1), CHUNK, num_shards)
    assert [error.key for error in refused] == ["max_daily_bytes"] * 2
    assert refusals(limited(num_shards * CHUNK), CHUNK, num_shards) == []


LARGE: dict[str, tuple[Callable[[Path], TierConfig], int, str]] = {
    "redis": (lambda _: SharedTierConfig(url="redis://127.0.0.1:1/0"), 512 * MIB - HEADER_BYTES, "url"),
    "valkey": (lambda _: SharedTierConfig(url="valkey://:secret@127.0.0.1:1"), 512 * MIB - HEADER_BYTES, "url"),
    "s3": (lambda _: SharedTierConfig(url="s3://bucket/kv"), 5 * GIB - HEADER_BYTES, "url"),
    "azure": (lambda _: SharedTierConfig(url="az://container/kv"), 5000 * MIB - HEADER_BYTES, "url"),
    "disk": (lambda place: DiskTierConfig(directory=place, max_bytes="16GiB"), 0x7FFFF000, "directory"),
    "encrypted": (
        lambda place: SharedTierConfig(url=f"file://{place}", encryption_key="env:KV_KEY"),
        2**31 - 17,
        "encryption_key",
    ),
}


@pytest.mark.parametrize("what", LARGE)
def test_a_chunk_that_the_medium_can_never_take_is_refused(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by use: every store failed, with words of the package or of the system."""
    monkeypatch.setenv("KV_KEY", "ab" * 32)
    make, most, option = LARGE[what]
    refused = refusals(make(tmp_path / "kv"), most + 1)
    assert len(refused) == 2
    for error in refused:
        assert error.key == option
        assert re.search(rf"has ({most + 1}|{most + 1 + HEADER_BYTES}) bytes", error.expected)
        assert "fewer blocks" in error.expected and "secret" not in str(error)


@pytest.mark.parametrize("what", ["redis", "encrypted", "disk"])
def test_a_chunk_that_the_medium_can_just_take_is_not_refused(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KV_KEY", "ab" * 32)
    monkeypatch.setattr("cargohold.tiers.disk.kind.require_place", lambda *_: None)  # whatever the disk has
    make, most, _ = LARGE[what]
    check_tier(make(tmp_path / "kv"), [most], 1)
