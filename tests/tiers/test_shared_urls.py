"""What shared tiers refuse at the start: URLs, options, credentials, missing packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import PermissionDeniedError
from obstore.store import MemoryStore

from cargohold.errors import ConfigError
from cargohold.tiers import SharedTierConfig
from cargohold.tiers.kinds import open_inventory
from tests.servers import AZURE_ACCOUNT, BUCKET, Server, free_port
from tests.tiers.clouds import CLOUDS
from tests.tiers.shared import raising, shared


def test_credentials_that_may_not_ask_what_is_there_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by reading: without the right to list, S3 answers so to a request for any chunk that is not there."""
    monkeypatch.setattr("cargohold.tiers.stores.objects.from_url", lambda *_, **__: MemoryStore())
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
def test_messages_about_an_object_store_show_no_secret(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, url: str
) -> None:
    """Found by reading: who writes credentials where Redis takes them read them in the log."""
    monkeypatch.setattr("cargohold.tiers.stores.objects.from_url", lambda *_, **__: MemoryStore())
    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", raising(OSError("no")))
        shared(url)
    assert "does not answer yet" in caplog.text and "secret" not in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", raising(PermissionError("no")))
        with pytest.raises(ConfigError, match="refuses access") as caught:
            shared(url)
    assert "secret" not in str(caught.value)
    monkeypatch.setattr("cargohold.tiers.stores.objects.from_url", raising(ValueError("no")))
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
from cargohold.tiers import SharedTierConfig, check_tier, open_tier
from tests.tiers.common import CHUNK, NAMESPACE
config = SharedTierConfig(url={url!r} or "file://{tmp_path}", encryption_key="env:KV_KEY")
for refuse in (lambda: check_tier(config, [CHUNK], 1), lambda: open_tier(config, NAMESPACE, [CHUNK])):
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


@pytest.mark.parametrize(("place", "lacks"), [("file:///", "redis"), ("redis://127.0.0.1:1", "obstore")])
def test_an_inventory_needs_the_package_of_its_own_store_only(place: str, lacks: str) -> None:
    use = f"from cargohold.tiers.kinds import open_inventory; open_inventory({place!r})"
    script = f"import sys; sys.modules[{lacks!r}] = None; {use}"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
