"""Shared stores that go away, come back, hang, refuse or fill up."""

from __future__ import annotations

import errno
import gc
import os
import resource
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import GenericError, PermissionDeniedError
from obstore.store import MemoryStore

from cargohold.errors import ConfigError, TierError
from cargohold.offload.tier import (
    BreakerConfig,
    BreakerState,
    LoadOutcome,
    QueueConfig,
    StoreOutcome,
    Tier,
    TierQueue,
    object_listing,
)
from cargohold.offload.tier.config import SharedTierConfig
from cargohold.offload.tier.factory import open_tier
from cargohold.offload.tier.inventory.factory import open_inventory
from cargohold.offload.tier.jobs import JobKind, JobStatus, TierJob
from cargohold.offload.tier.object_listing import list_ours
from cargohold.offload.tier.object_tier import open_store
from cargohold.offload.tier.redis_tier import open_client
from cargohold.simulation.clock import VirtualClock
from tests.offload.tier.clouds import CLOUDS
from tests.offload.tier.common import CHUNK, NAMESPACE, in_thread, key, load, payload
from tests.servers import AZURE_ACCOUNT, BUCKET, Server, free_port, key_value_server

WAIT_S = 30.0
REPOSITORY = Path(__file__).parents[3]


def shared(url: str, timeout_s: float = 10.0, **options: object) -> Tier:
    config = SharedTierConfig(url=url, request_timeout_s=timeout_s, **options)  # type: ignore[arg-type]  # by name
    return open_tier(config, NAMESPACE, CHUNK)


def store(tier: Tier, number: int) -> StoreOutcome:
    return tier.store(key(number), memoryview(payload(number)))


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
    tier = open_tier(config, NAMESPACE, 12 * 1024**2)
    assert tier.store(key(1), memoryview(bytes(12 * 1024**2))) is StoreOutcome.STORED
    stored = open_store(config)
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


def test_a_full_server_refuses() -> None:
    with key_value_server("valkey", "--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server:
        tier = shared(f"redis://127.0.0.1:{server.port}")
        outcomes = [store(tier, number) for number in range(400)]
        assert outcomes[0] is StoreOutcome.STORED and outcomes[-1] is StoreOutcome.REFUSED
        assert load(tier, 0) == payload(0)
        assert tier.usage().num_chunks == outcomes.count(StoreOutcome.STORED)
        tier.close()


def test_chunks_can_be_given_an_end() -> None:
    with key_value_server("valkey") as server:
        import redis  # noqa: PLC0415  # an optional package

        tier = shared(f"redis://127.0.0.1:{server.port}", ttl_s=100)
        store(tier, 1)
        with redis.Redis(port=server.port) as client:
            (name,) = client.keys("cargohold:*:*")
            assert 0 < client.ttl(name) <= 100
        tier.close()


@pytest.mark.parametrize(
    "options", ["timeout=3", "decode_responses=true", "protocol=9", "socket_timeout=soon", "ssl_cert_reqs=perhaps"]
)
@pytest.mark.parametrize("start", ["redis://host", "rediss://host", "valkey://host/1", "unix:///run/socket"])
def test_options_that_the_client_of_redis_cannot_have_are_refused_at_the_start(start: str, options: str) -> None:
    """Found by reading: the engine ended with a TypeError; with decoded answers every load failed."""
    with pytest.raises(ConfigError, match="url="):
        shared(f"{start}?{options}")


def test_a_database_that_the_server_does_not_have_is_refused_at_the_start() -> None:
    """Found by use: the server was said not to answer yet, and every request failed."""
    with key_value_server("valkey") as server, pytest.raises(ConfigError, match="no such database"):
        shared(f"valkey://127.0.0.1:{server.port}/99")


def node_of_a_cluster(directory: Path) -> AbstractContextManager[Server]:
    options = ["--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--dir", str(directory)]
    directory.mkdir()
    return key_value_server("valkey", *options)


def test_one_server_of_several_of_a_cluster_is_refused_at_the_start(tmp_path: Path) -> None:
    """Found by use: it was said not to answer yet, for a number and an address, and nearly every request failed."""
    redis = pytest.importorskip("redis", reason="needs the extra cargohold[redis]")
    with node_of_a_cluster(tmp_path / "a") as one, node_of_a_cluster(tmp_path / "b") as other:
        with redis.Redis(port=one.port) as client, redis.Redis(port=other.port) as far:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 8191)
            far.execute_command("CLUSTER", "ADDSLOTSRANGE", 8192, 16383)
            bus = far.config_get("cluster-port")["cluster-port"]
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", other.port, bus)
            while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO"):
                pass
        with pytest.raises(ConfigError, match="one of several of a cluster"):
            shared(f"valkey://127.0.0.1:{one.port}")


def test_a_cluster_of_one_server_is_a_server(tmp_path: Path) -> None:
    redis = pytest.importorskip("redis", reason="needs the extra cargohold[redis]")
    with node_of_a_cluster(tmp_path / "a") as server:
        with redis.Redis(port=server.port) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO"):
                pass
        tier = shared(f"valkey://127.0.0.1:{server.port}")
        assert [store(tier, number) for number in range(3)] == [StoreOutcome.STORED] * 3
        tier.remove([key(0), key(1)])
        assert tier.probe([key(number) for number in range(3)]) == [False, False, True]
        tier.close()


def at_once(client: socket.socket, data: bytes) -> None:
    client.sendall(data)


class Between:
    """What passes on between a client and a server: requests as they are, and answers by ``answer``.

    Args:
        server_port: the server's.
        tls: for the client; the server has none.
    """

    def __init__(self, server_port: int, tls: ssl.SSLContext | None = None) -> None:
        self._server_port = server_port
        self._tls = tls
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.answer: Callable[[socket.socket, bytes], None] = at_once

    @contextmanager
    def serving(self) -> Iterator[None]:
        """For one connection after the other."""
        thread = threading.Thread(target=self._serve)
        with self._listening:
            thread.start()
            try:
                yield
            finally:
                self._listening.shutdown(socket.SHUT_RDWR)
                thread.join()

    def _serve(self) -> None:
        while True:
            try:
                client = self._listening.accept()[0]
            except OSError:
                return
            with (
                suppress(OSError),  # one of the two goes
                self._secured(client) as secured,
                socket.create_connection(("127.0.0.1", self._server_port)) as server,
            ):
                self._pass_on(secured, server)

    def _secured(self, client: socket.socket) -> socket.socket:
        return client if self._tls is None else self._tls.wrap_socket(client, server_side=True)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        while True:
            for source in select.select([client, server], [], [])[0]:
                data = source.recv(2**16)
                if not data:
                    return
                if source is client:
                    server.sendall(data)
                else:
                    self.answer(client, data)


def test_what_is_left_of_an_earlier_answer_is_not_taken_for_another_chunk() -> None:
    """Found by playing: every later load on that connection found another chunk than its own, and deleted its own."""
    with (
        key_value_server("valkey") as server,
        (between := Between(server.port)).serving(),
        closing(shared(f"redis://127.0.0.1:{between.port}")) as tier,
    ):

        def twice(client: socket.socket, data: bytes) -> None:
            between.answer = at_once
            client.sendall(2 * data)

        for number in range(3):
            store(tier, number)
        between.answer = twice
        assert tier.probe([key(0)]) == [True]
        assert between.answer is not twice
        assert [load(tier, number) for number in range(3)] == [payload(number) for number in range(3)]


def tls_of_a_server(directory: Path) -> ssl.SSLContext:
    """With a certificate that is good for nothing else."""
    pytest.importorskip("cryptography", reason="a certificate needs the extra cargohold[encryption]")
    from cryptography import x509  # noqa: PLC0415  # an optional package
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415  # an optional package
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415  # an optional package

    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cargohold.test")])
    now = datetime.now(UTC)
    certificate = x509.CertificateBuilder(
        name, name, secret.public_key(), x509.random_serial_number(), now, now + timedelta(days=1)
    ).sign(secret, hashes.SHA256())
    file = directory / "server.pem"
    file.write_bytes(
        secret.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context


@pytest.mark.parametrize("is_secured", [False, True], ids=["plain", "tls"])
def test_a_request_ends_in_time_however_slowly_the_answer_arrives(tmp_path: Path, is_secured: bool) -> None:
    """Found by use: the limit began again with each byte, so a server could hold an I/O thread for hours."""

    def slowly(client: socket.socket, data: bytes) -> None:
        for byte in data:
            client.sendall(bytes([byte]))
            time.sleep(0.02)

    def load_in_vain() -> None:
        with pytest.raises(TierError, match="Timeout"):
            load(tier, 1)

    tls = tls_of_a_server(tmp_path) if is_secured else None
    scheme, query = ("rediss", "?ssl_cert_reqs=none&ssl_check_hostname=false") if is_secured else ("redis", "")
    with (
        key_value_server("valkey") as server,
        (between := Between(server.port, tls)).serving(),
        closing(shared(f"{scheme}://127.0.0.1:{between.port}/{query}", 1.0)) as tier,
    ):
        assert store(tier, 1) is StoreOutcome.STORED
        assert load(tier, 1) == payload(1)
        between.answer = slowly
        in_thread(load_in_vain, WAIT_S / 3, "it takes as long as the server likes")
        between.answer = at_once
        assert load(tier, 1) == payload(1)


def test_a_url_may_have_a_shorter_limit() -> None:
    def probe_in_vain() -> None:
        with pytest.raises(TierError, match="Timeout"):
            tier.probe([key(1)])

    with (
        key_value_server("valkey") as server,
        closing(shared(f"redis://127.0.0.1:{server.port}?socket_timeout=0.5", 600.0)) as tier,
    ):
        store(tier, 1)
        server.freeze()
        in_thread(probe_in_vain, WAIT_S / 3, "the longer one counts")
        server.thaw()


def test_an_error_of_the_server_is_told_without_keys() -> None:
    """Found by use: the bytes of a key, which are no text, stood in the log."""
    redis = pytest.importorskip("redis", reason="needs the extra cargohold[redis]")
    with key_value_server("valkey") as server, redis.Redis(port=server.port) as client:
        client.acl_setuser("limited", enabled=True, nopass=True, keys=["*"], commands=["+@all"])
        tier = shared(f"valkey://limited:any@127.0.0.1:{server.port}")
        client.acl_setuser("limited", commands=["-exists"])
        with pytest.raises(TierError, match=r"^tier shared: User limited has no permissions") as caught:
            tier.probe([key(1), key(2)])
        assert str(caught.value).isprintable()
        tier.close()


@pytest.mark.parametrize("command", ["set", "get", "exists", "unlink"])
def test_a_user_who_may_not_do_all_that_a_tier_does_is_refused_at_the_start(command: str) -> None:
    """Found by reading: only whether it might write was asked."""
    redis = pytest.importorskip("redis", reason="needs the extra cargohold[redis]")
    with key_value_server("valkey") as server, redis.Redis(port=server.port) as client:
        client.acl_setuser("limited", enabled=True, nopass=True, keys=["*"], commands=["+@all", f"-{command}"])
        with pytest.raises(ConfigError, match=rf"the server refuses access: .*'{command}'"):
            shared(f"valkey://limited:any@127.0.0.1:{server.port}")


def test_schemes_may_be_written_in_capitals() -> None:
    """Found by reading: of Valkey://valkey.example the host was taken for the scheme, and of others it was unknown."""
    with key_value_server("valkey") as server:
        for scheme in ("Valkey", "REDIS"):
            tier = shared(f"{scheme}://127.0.0.1:{server.port}")
            assert store(tier, 1) in {StoreOutcome.STORED, StoreOutcome.PRESENT} and load(tier, 1) == payload(1)
            tier.close()


def test_a_password_is_asked_for_and_never_shown() -> None:
    with key_value_server("valkey", "--requirepass", "right") as server:
        tier = shared(f"redis://:right@127.0.0.1:{server.port}")
        assert store(tier, 1) is StoreOutcome.STORED
        tier.close()
        for url in (f"redis://:wrongly@127.0.0.1:{server.port}", f"redis://127.0.0.1:{server.port}"):
            with pytest.raises(ConfigError, match="refuses access") as caught:
                shared(url)
            assert "wrongly" not in str(caught.value)


def test_a_password_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by use: a password in a URL is in lists of processes."""
    monkeypatch.setenv("REDISCLI_AUTH", "right")
    with key_value_server("valkey", "--requirepass", "right") as server:
        tier = shared(f"redis://127.0.0.1:{server.port}")
        assert store(tier, 1) is StoreOutcome.STORED
        tier.close()
        assert len(open_inventory(f"redis://127.0.0.1:{server.port}").holdings()) == 1
        with pytest.raises(ConfigError, match="refuses access"):
            shared(f"redis://:wrongly@127.0.0.1:{server.port}")  # what is said here counts


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("rediss://host", True),
        ("VALKEYS://host", True),
        ("rediss://host?ssl_check_hostname=false", False),
    ],
)
def test_a_server_with_tls_must_be_the_one_that_was_named(url: str, expected: bool) -> None:
    """Clients before version 6 took any server whose certificate is good for its own name."""
    pool = open_client(SharedTierConfig(url=url)).connection_pool
    assert pool.connection_class(**pool.connection_kwargs).check_hostname is expected


def bytes_of_chunks(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_a_budget_is_kept_by_one_engine_and_the_oldest_go_first(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_bytes(bytes(CHUNK))
    tier = shared(f"file://{tmp_path}", max_bytes=10 * CHUNK)
    for number in range(40):
        assert store(tier, number) is StoreOutcome.STORED
        assert bytes_of_chunks(tmp_path) <= 11 * CHUNK, "what is not ours does not count, and stays"
        for at, path in enumerate(sorted(tmp_path.glob("*/00/*"))):
            os.utime(path, (at, at))  # a clock that is fine enough to tell them apart
    kept = [number for number in range(40) if load(tier, number) == payload(number)]
    assert kept == list(range(40 - len(kept), 40)) and len(kept) >= 7


def test_two_engines_share_a_budget(tmp_path: Path) -> None:
    tiers = [shared(f"file://{tmp_path}", max_bytes=32 * CHUNK) for _ in range(2)]
    for number in range(200):
        store(tiers[number % 2], number)
        assert bytes_of_chunks(tmp_path) <= 35 * CHUNK
    assert sum(tiers[0].probe([key(number) for number in range(200)])) >= 20


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a name that is no text": lambda place: os.mknod(os.fsencode(place) + b"/\xff"),
    "a name of two lines": lambda place: (place / "two\nlines").write_text("mine"),
    "a link to itself": lambda place: (place / "link").symlink_to("link"),
    "a link to what it is in": lambda place: (place / "link").symlink_to("."),
    "a link in our place": lambda place: (place / ("0" * 32)).symlink_to("."),
    "a file in our place": lambda place: (place / ("0" * 32)).write_text("mine"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_what_others_keep_in_a_shared_directory_is_not_looked_at(tmp_path: Path, what: str) -> None:
    """Found by use: one such name, and with ``max_bytes`` every store failed, and every look at what is there."""
    FOREIGN[what](tmp_path)
    tier = shared(f"file://{tmp_path}", max_bytes=10 * CHUNK)
    for number in range(20):
        assert store(tier, number) is StoreOutcome.STORED
    (holding,) = open_inventory(f"file://{tmp_path}").holdings()
    assert holding.num_chunks in range(5, 11)
    assert len(os.listdir(tmp_path)) == 2  # noqa: PTH208  # of any name


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can become somebody else")
def test_a_directory_that_is_not_for_everybody_does_not_stand_in_the_way() -> None:
    """Found by reading: the root of a file system has such a one, ``lost+found``."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)  # noqa: PTH101
        Path(place, "lost+found").mkdir(mode=0o700)
        script = f"""
import os
import cargohold.offload.tier.object_tier, numpy.random  # while all modules can be read
from tests.offload.tier.test_shared import CHUNK, shared, store
os.setgid(65534)
os.setuid(65534)
tier = shared("file://{place}", max_bytes=10 * CHUNK)
print({{store(tier, number).value for number in range(20)}})
"""
        run = subprocess.run(
            [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        assert run.stdout == "{'stored'}\n", run.stderr


def killed_while_it_writes(directory: Path) -> Path:
    """What a process leaves that is killed in the middle of a chunk, by the signal for files that become too large."""
    script = f"""
import resource, signal
from pathlib import Path
from tests.offload.tier.test_shared import shared, store
tier = shared("file://{directory}")
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, ({CHUNK // 2}, {CHUNK // 2}))
store(tier, 1)
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=False)
    assert run.returncode == -signal.SIGXFSZ
    (left,) = directory.rglob("*#*")
    assert left.stat().st_size == CHUNK // 2
    return left


def test_what_a_killed_process_was_writing_counts_until_it_is_deleted(tmp_path: Path) -> None:
    """Found by use: where a process was killed again and again, its directory became larger than it may be."""
    left = killed_while_it_writes(tmp_path)
    with left.open("r+b") as file:
        file.truncate(6 * CHUNK)
    tier = shared(f"file://{tmp_path}", max_bytes=10 * CHUNK)
    for number in range(10, 20):
        assert store(tier, number) is StoreOutcome.STORED
        assert bytes_of_chunks(tmp_path) <= 10 * CHUNK
    (holding,) = open_inventory(f"file://{tmp_path}").holdings()
    assert holding.num_bytes == bytes_of_chunks(tmp_path)
    assert holding.num_chunks in {2, 3} and left.exists()


def test_what_a_killed_process_was_writing_is_deleted_an_hour_later(tmp_path: Path) -> None:
    """Found by reading: such files are never listed, so they neither counted nor went, however many there were."""
    left = killed_while_it_writes(tmp_path)
    foreign = tmp_path / "photos" / "00" / "abcd#1"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine")
    assert store(shared(f"file://{tmp_path}", max_bytes=10 * CHUNK), 2) is StoreOutcome.STORED
    assert left.exists(), "another process may be writing it"
    for path in (left, foreign):
        os.utime(path, (time.time() - 4000, time.time() - 4000))
    assert store(shared(f"file://{tmp_path}", max_bytes=10 * CHUNK), 3) is StoreOutcome.STORED
    assert not left.exists() and foreign.read_text() == "mine"


@pytest.mark.parametrize("what", ["rm", "prune"])
def test_what_a_killed_process_was_writing_can_be_deleted_by_hand(tmp_path: Path, what: str) -> None:
    left = killed_while_it_writes(tmp_path)
    inventory = open_inventory(f"file://{tmp_path}")
    if what == "rm":
        inventory.remove(NAMESPACE.id)
    else:
        inventory.trim(NAMESPACE.id, 1)
        assert left.exists(), "another process may be writing it"
        os.utime(left, (1, 1))
        inventory.trim(NAMESPACE.id, 1)
    assert not left.exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_directory_refuses_and_what_is_there_can_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Found by reading: stores failed, so the tier was left to rest, and nothing was loaded from it."""
    tier = shared(f"file://{tmp_path}")
    store(tier, 1)
    text = f"Generic LocalFileSystem error: Unable to copy data to file: {os.strerror(number)} (os error {number})"
    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", raising(GenericError(text)))
        assert store(tier, 2) is StoreOutcome.REFUSED
    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", raising(GenericError(text.replace(f"{number}", f"{errno.EIO}"))))
        with pytest.raises(TierError, match="Unable to copy data"):
            store(tier, 2)
    assert load(tier, 1) == payload(1) and load(tier, 2) is LoadOutcome.ABSENT


@pytest.mark.parametrize("can_delete", [True, False])
def test_a_bad_place_under_a_directory_fails_one_load_and_not_every_one_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_delete: bool
) -> None:
    """Found by reading: the file was found and failed again and again, and was never stored anew."""
    tier = shared(f"file://{tmp_path}")
    store(tier, 1)
    with monkeypatch.context() as patch:
        patch.setattr(object_listing, "Descriptor", raising(OSError(errno.EIO, os.strerror(errno.EIO))))
        if not can_delete:
            patch.setattr(Path, "unlink", raising(OSError(errno.EIO, "a file system that is not there at all")))
        with pytest.raises(TierError, match=os.strerror(errno.EIO)):
            load(tier, 1)
    assert store(tier, 1) is (StoreOutcome.STORED if can_delete else StoreOutcome.PRESENT)
    assert load(tier, 1) == payload(1)


def test_a_store_that_fails_to_answer_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = shared(f"file://{tmp_path}")
    store(tier, 1)
    with monkeypatch.context() as patch:
        patch.setattr(object_listing, "Descriptor", raising(OSError(errno.ESTALE, os.strerror(errno.ESTALE))))
        with pytest.raises(TierError, match="Stale"):
            load(tier, 1)
    assert load(tier, 1) == payload(1)


def test_a_file_that_may_not_become_so_large_is_refused(tmp_path: Path) -> None:
    """What the package says of a real limit."""
    tier = shared(f"file://{tmp_path}")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (CHUNK // 2, hard))
    try:
        outcome = store(tier, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert outcome is StoreOutcome.REFUSED
    assert store(tier, 1) is StoreOutcome.STORED


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_a_shared_directory_that_was_deleted_is_made_anew_for_its_owner_only(tmp_path: Path) -> None:
    """Found by reading: the package made it, so that everybody could read what users wrote."""
    directory = tmp_path / "kv"
    tier = shared(f"file://{directory}")
    store(tier, 1)
    shutil.rmtree(directory)
    assert load(tier, 1) is LoadOutcome.ABSENT
    assert store(tier, 1) is StoreOutcome.STORED and load(tier, 1) == payload(1)
    assert directory.stat().st_mode & 0o077 == 0


def test_one_folder_that_cannot_be_entered_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests may run as the superuser, who may enter every folder."""
    tier = shared(f"file://{tmp_path}")
    store(tier, 1)
    store(tier, 2)
    really_look = os.lstat

    def look(path: Path) -> os.stat_result:
        if path.name in closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return really_look(path)

    closed = {key(1).hex()}
    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", look)
        assert tier.probe([key(1), key(2), key(3)]) == [False, True, False]
        closed |= {key(number).hex() for number in (2, 3)}
        with pytest.raises(TierError, match="Permission denied"):
            tier.probe([key(1), key(2), key(3)])


def test_a_probe_without_files_is_an_error_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by playing: where no more files could be opened, Python warned of a coroutine that nobody awaits."""
    monkeypatch.setattr("cargohold.offload.tier.object_tier.from_url", lambda *_, **__: MemoryStore())
    tier = shared("s3://bucket/prefix")
    store(tier, 1)
    with monkeypatch.context() as patch:
        patch.setattr("asyncio.events.new_event_loop", raising(OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
        with pytest.raises(TierError, match="Too many open files"):
            tier.probe([key(1), key(2)])
        gc.collect()
    assert tier.probe([key(1), key(2)]) == [True, False]


def test_a_file_is_no_shared_directory(tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    directory.write_text("no directory")
    with pytest.raises(ConfigError, match="cannot be used"):
        shared(f"file://{directory}")


def test_credentials_that_may_not_ask_what_is_there_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by reading: without the right to list, S3 answers so to a request for any chunk that is not there."""
    monkeypatch.setattr("cargohold.offload.tier.object_tier.from_url", lambda *_, **__: MemoryStore())
    monkeypatch.setattr(obstore, "head", raising(PermissionDeniedError("403 Forbidden")))
    with pytest.raises(ConfigError, match="refuses access for reading, or for listing: 403 Forbidden"):
        shared("s3://bucket/prefix")


def test_missing_credentials_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    # Where a cloud's machine would look for credentials; nothing listens there.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match="no credentials"):
        shared(f"s3://{BUCKET}/prefix", 1.0)


def test_missing_credentials_for_google_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # where Google's own tools leave credentials
    nobody = f"127.0.0.1:{free_port()}"
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP", "METADATA_HOST", "METADATA_IP"):
        monkeypatch.setenv(name, nobody)
    with pytest.raises(ConfigError, match="no credentials"):
        shared(f"gs://{BUCKET}/prefix", 1.0)


def test_missing_credentials_for_azure_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY", raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", AZURE_ACCOUNT)
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", f"http://127.0.0.1:{free_port()}/metadata/identity/oauth2/token")
    monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
    with pytest.raises(ConfigError, match="no credentials"):
        shared(f"az://{BUCKET}/prefix", 1.0)


def test_azure_without_an_account_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match="Account must be specified"):
        shared("az://container/prefix", 1.0)


def test_a_wrong_key_for_azure_is_refused_and_not_shown(
    azure: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cloud = CLOUDS["azure"]
    cloud.sign_in(monkeypatch, azure.port, tmp_path)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc=")
    with pytest.raises(ConfigError, match="refuses access") as caught:
        shared(cloud.url("prefix"))
    assert "d3Jvbmc" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "key_of_error"),
    [
        ({"url": "ftp://host/x"}, "url"),
        ({"url": "bucket"}, "url"),
        ({"url": ""}, "url"),
        ({"url": "s3://b", "ttl_s": 5}, "ttl_s"),
        ({"url": "redis://h", "ttl_s": 0}, "ttl_s"),
        ({"url": "redis://h", "max_bytes": "1GiB"}, "max_bytes"),
        ({"url": "s3://b", "max_bytes": "lots"}, "max_bytes"),
        ({"url": "redis://h", "request_timeout_s": 0}, "request_timeout_s"),
        ({"url": "redis://h", "num_threads": 0}, "num_threads"),
    ],
)
def test_impossible_options_are_refused_by_name(options: dict[str, object], key_of_error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SharedTierConfig(**options)  # type: ignore[arg-type]  # wrong on purpose
    assert caught.value.key == key_of_error


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("file://relative/kv", "file:///absolute/path"),
        ("file:kv", "file:///absolute/path"),
        ("file://", "file:///absolute/path"),
        ("file:///kv?old", "as %3F and %23"),
        ("file:///kv#2", "as %3F and %23"),
        ("s3:/bucket", "s3://bucket/prefix"),
        ("s3://", "s3://bucket/prefix"),
        ("az:///prefix", "az://container/prefix"),
        ("redis:host", "redis://host:6379/0"),
        ("redis://host:0/1", "a number from 1 to 65535"),
        ("redis://host:99999", "a number from 1 to 65535"),
        ("redis://host/notanumber", "the database, which is a number"),
        ("redis://host?db=first", "the database, which is a number"),
        ("valkey://host/1/2", "the database, which is a number"),
        ("unix://relative/socket", "the absolute path of a socket"),
        ("unix://", "the absolute path of a socket"),
        ("redis://[::1", "it must be a URL"),
    ],
)
def test_a_url_that_would_mean_some_other_place_is_refused(url: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SharedTierConfig(url=url)
    assert (caught.value.key, caught.value.value) == ("url", url)
    assert expected in caught.value.expected
    with pytest.raises(ConfigError, match="PLACE=") as caught:
        open_inventory(url)
    assert expected in caught.value.expected


@pytest.mark.parametrize(
    "url",
    [
        "redis://:secret@[::1",
        "redis://\N{ACCOUNT OF}secret@host",
        "redis://:secret",
        "redis://:secret#1@host",
        "redis://:sec/secret@host",
        "redis://:12/secret@host",
        "redis:secret@host",
        "redis://host/first?password=secret",
        "unix://:secret@host/socket",
        "rediss://host/first?ssl_password=secret",
    ],
)
def test_no_refusal_of_a_url_shows_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SharedTierConfig(url=url)
    assert "secret" not in str(caught.value)
    assert str(caught.value.value).startswith(f"{url.partition(':')[0]}:"), "what it is about"


@pytest.mark.parametrize(
    "url", ["s3://name:secret@bucket/prefix", "s3://name:sec/secret@bucket/prefix", "az://container/prefix?sig=secret"]
)
def test_what_is_said_of_an_object_store_shows_no_secret(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, url: str
) -> None:
    """Found by reading: who writes credentials where Redis takes them read them in the log."""
    monkeypatch.setattr("cargohold.offload.tier.object_tier.from_url", lambda *_, **__: MemoryStore())
    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", raising(OSError("no")))
        shared(url)
    assert "does not answer yet" in caplog.text and "secret" not in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", raising(PermissionError("no")))
        with pytest.raises(ConfigError, match="refuses access") as caught:
            shared(url)
    assert "secret" not in str(caught.value)
    monkeypatch.setattr("cargohold.offload.tier.object_tier.from_url", raising(ValueError("no")))
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        shared(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "file:///kv",
        "file://localhost/kv",
        "s3://bucket",
        "redis://host",
        "redis://[::1]:6379/2",
        "rediss://user:p%2Fw@host/",
        "valkey://host?db=3",
        "unix:///run/socket?db=1",
        "unix://user:secret@/run/socket",
    ],
)
def test_other_urls_are_taken(url: str) -> None:
    assert SharedTierConfig(url=url).url == url


@pytest.mark.parametrize(
    ("package", "url", "extra"),
    [("obstore", "s3://b/p", "objects"), ("redis", "redis://:secret@h", "redis"), ("cryptography", "", "encryption")],
)
def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, package: str, url: str, extra: str) -> None:
    script = f"""
import sys
sys.modules[{package!r}] = None
from cargohold.errors import ConfigError
from cargohold.offload.tier import SharedTierConfig, check_tier, open_tier
from tests.offload.tier.common import CHUNK, NAMESPACE
config = SharedTierConfig(url={url!r} or "file://{tmp_path}", encryption_key="env:KV_KEY")
for refuse in (lambda: check_tier(config, CHUNK, 1), lambda: open_tier(config, NAMESPACE, CHUNK)):
    try:
        refuse()
    except ConfigError as error:
        print(error)
"""
    if package != "cryptography":
        script = script.replace(', encryption_key="env:KV_KEY"', "")
    run = subprocess.run(
        [sys.executable, "-c", script], env={"KV_KEY": "ab" * 32}, capture_output=True, text=True, check=True
    )
    # Before the weights are loaded, and by whoever opens a tier alone.
    assert run.stdout.count(f"pip install 'cargohold[{extra}]'") == 2
    assert package == "cryptography" or f"url='{url.replace(':secret@', '')}'" in run.stdout, "as it was given"
