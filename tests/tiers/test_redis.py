"""Shared tiers on Redis and Valkey: answers, clusters, TLS, passwords."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cargohold.errors import ConfigError, TierError
from cargohold.tiers import StoreOutcome, Tier
from cargohold.tiers.kinds import open_inventory
from cargohold.tiers.stores.redis import open_client
from tests.servers import Server, free_port, key_value_server
from tests.tiers.common import CHUNK, in_thread, key, load, payload
from tests.tiers.shared import WAIT_S, shared, store


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


def test_the_rest_of_an_earlier_answer_is_not_taken_for_another_chunk() -> None:
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


MALFORMED = {
    "a number that is none": b":abc\r\n",
    "a length that is none": b"$abc\r\n",
    "a count that is none": b"*abc\r\n",
    "a number of too many digits": b":" + b"9" * 5000 + b"\r\n",
    "lists in lists without end": b"*1\r\n" * 5000,
    "a place that is none": b"-MOVED somewhere\r\n",
    "not the protocol": b"HTTP/1.1 400 Bad Request\r\n",
}


def answering(data: bytes) -> Callable[[socket.socket, bytes], None]:
    return lambda client, _: client.sendall(data)


def calls_of(tier: Tier, url: str) -> list[Callable[[], object]]:
    return [
        lambda: tier.probe([key(1)]),
        lambda: tier.load(key(1), memoryview(bytearray(CHUNK))),
        lambda: tier.store(key(2), memoryview(payload(2))),
        lambda: tier.remove([key(2)]),
        lambda: open_inventory(url).holdings(),
    ]


def test_answers_that_no_server_gives_are_failures_of_the_tier(caplog: pytest.LogCaptureFixture) -> None:
    """Found by attack: the client's package raised whatever it stumbled on, which ended an engine's start with a traceback."""
    with key_value_server("valkey") as server, (between := Between(server.port)).serving():
        url = f"redis://127.0.0.1:{between.port}"
        with closing(shared(url)) as tier:
            store(tier, 1)
        for name, data in MALFORMED.items():
            caplog.clear()
            between.answer = answering(data)
            with closing(shared(url)) as tier:
                assert "the server does not answer yet as it should" in caplog.text, name
                for call in calls_of(tier, url):
                    with suppress(TierError):  # some of it is a good answer to some commands
                        call()
                between.answer = at_once
                assert load(tier, 1) == payload(1), name


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


def test_a_tier_over_tls(tmp_path: Path) -> None:
    with (
        key_value_server("valkey") as server,
        (between := Between(server.port, tls_of_a_server(tmp_path))).serving(),
        closing(shared(f"rediss://127.0.0.1:{between.port}/?ssl_cert_reqs=none&ssl_check_hostname=false")) as tier,
    ):
        assert store(tier, 1) is StoreOutcome.STORED
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


@pytest.mark.parametrize("command", ["set", "getrange", "exists", "unlink"])
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
    pool = open_client(url).connection_pool
    assert pool.connection_class(**pool.connection_kwargs).check_hostname is expected
