"""Who is let in with which key, and that nothing which others read says anything of a key."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator

import pytest

from cargohold import OffloadConfig, TenantQuota
from cargohold.connector.tenants import Tenant
from cargohold.protocol import BlockStored
from cargohold.serve.access import Client
from cargohold.serve.scrape import metrics_url, scrape
from cargohold.serve.server import Server
from cargohold.serve.settings import ServeConfig, tenant_of, with_shares
from tests.serve.running import call, connect, running, wait_until
from tests.serve.test_cache_view import PROMPT, complete, keyed

KEYS = ("open sesame", "open poppy")
KEY = b"authorization: Bearer of acme\r\n"
TENANT = Tenant(name="acme", key="of acme", hard="50%")


@pytest.fixture(scope="module")
def guarded(chat_model: str) -> Iterator[Server]:
    """A server with every kind of key, whose tenants have something in host memory."""
    config = ServeConfig(port=0, api_keys=KEYS, tenants=(TENANT,), admin_key="all", metrics_key="read me")
    offload = with_shares(OffloadConfig(host_bytes="16MiB"), config)
    with running(chat_model, config, offload=offload) as server:
        for key in (*KEYS, TENANT.key):
            assert complete(server, key=key).status == 200
        wait_until(lambda: tenants_in_metrics(server, "read me") == {"key/1", "key/2", "acme", "others"})
        yield server


def tenants_in_metrics(server: Server, key: str) -> set[str]:
    samples = scrape(metrics_url(server.url), key).samples.get("cargohold_tenant_bytes", {})
    return {dict(labels)["tenant"] for labels, value in samples.items()}


def fast_digests(key: str) -> set[str]:
    """What a guess can be compared with hundreds of thousands of times a second."""
    own = hashlib.blake2b(key.encode(), digest_size=16, person=b"cargohold-tenant").hexdigest()
    return {own, *(hashlib.new(name, key.encode()).hexdigest() for name in ("md5", "sha1", "sha256", "blake2b"))}


def test_the_key_for_metrics_reads_metrics_and_nothing_else(guarded: Server) -> None:
    key = keyed("read me")
    assert call(guarded, "/metrics", headers=key).status == 200
    for path in ("/cache", "/cache/pins", "/cache/explain/1", "/v1/models"):
        assert call(guarded, path, headers=key).status == 401, path
    assert call(guarded, "/cache/reset", headers=key, method="POST").status == 401
    assert complete(guarded, key="read me").status == 401


def test_with_a_key_for_metrics_nobody_reads_them_without(guarded: Server) -> None:
    for headers in ({}, keyed("wrong"), keyed(KEYS[0]), keyed(TENANT.key)):
        assert call(guarded, "/metrics", headers=headers).status == 401
        shown = call(guarded, "/cache", headers=headers)
        assert shown.status == 401 or (shown.json["tiers"], shown.json["engine"], shown.json["history"]) == (
            [],
            None,
            None,
        )
    assert len(call(guarded, "/cache", headers=keyed("all")).json["tiers"]) == 2
    assert tenants_in_metrics(guarded, "all"), "the admin may"
    assert scrape(metrics_url(guarded.url)).error == "it needs a key (--metrics-key)"


def test_a_key_that_is_sent_twice_is_refused(guarded: Server) -> None:
    with connect(guarded) as connection:
        connection.sendall(
            b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + 2 * b"authorization: Bearer of acme\r\n" + b"\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_without_one_metrics_are_for_everybody_and_name_no_tenant(chat_model: str) -> None:
    config = ServeConfig(port=0, api_keys=KEYS, tenants=(TENANT,), admin_key="all")
    with running(chat_model, config, offload=with_shares(OffloadConfig(host_bytes="16MiB"), config)) as server:
        assert complete(server, key=TENANT.key).status == 200
        wait_until(lambda: "acme" in tenants_in_metrics(server, "all"))
        text = call(server, "/metrics").body.decode()
        assert "cargohold_prompt_tokens_total" in text
        assert not [line for line in text.splitlines() if "tenant" in line or "acme" in line or "key/" in line]


def test_nothing_that_is_read_is_a_fast_digest_of_a_key(guarded: Server) -> None:
    read = [call(guarded, path, headers=keyed("all")).body.decode() for path in ("/metrics", "/cache", "/cache/pins")]
    for key in KEYS:
        assert not any(digest in text or key in text for text in read for digest in fast_digests(key))
        assert tenant_of(key) not in read[0] and tenant_of(key) not in read[1]


def test_salts_in_events_are_what_scrypt_makes_of_keys(chat_model: str) -> None:
    config = ServeConfig(port=0, api_keys=KEYS[:1])
    with running(chat_model, config, kv_events=True, kv_events_salted=True) as server:
        assert complete(server, key=KEYS[0], cache_salt="mine").status == 200
        salts = {
            key
            for event in asyncio.run(server.admission.llm.take_events())
            if isinstance(event, BlockStored)
            for keys in event.extra_keys
            for key in keys
        }
    # Chunks on disk are found under it again, so it stays as it is.
    assert salts == {f"{tenant_of(KEYS[0])}/mine"}
    assert tenant_of(KEYS[0]) == "f74baf7d9079a9ace51dc6b27c97940a"
    assert not any(digest in salt for salt in map(str, salts) for digest in fast_digests(KEYS[0]))


def test_metrics_call_a_tenant_by_its_label_and_never_by_its_salt(chat_model: str) -> None:
    quotas = (TenantQuota(tenant="a salt"), TenantQuota(tenant="another", label="acme"))
    config = ServeConfig(port=0, metrics_key="read me")
    with running(chat_model, config, offload=OffloadConfig(host_bytes="16MiB", quotas=quotas)) as server:
        for salt in ("a salt", "another"):
            assert complete(server, PROMPT, cache_salt=salt).status == 200
        wait_until(lambda: tenants_in_metrics(server, "read me") == {"tenant 1", "acme", "others"})


def test_a_tenant_sees_its_own_and_nothing_that_is_nobodys() -> None:
    seen_by = {who: [what for what in ("acme", "other", None) if who.sees(what)] for who in (Client("acme"), Client())}
    assert seen_by == {Client("acme"): ["acme"], Client(): [None]}
    assert all(Client(is_admin=True).sees(what) for what in ("acme", None))
