"""The clouds whose object stores can be tested here, each with a server that speaks its protocol.

No server for Google's protocol can be had as a package. But for everything that we ask of a store, the XML API that Google's
client uses equals Amazon's. So Google's own client, with a service account that it signs tokens for, is given Amazon's server.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.servers import (
    AZURE_ACCOUNT,
    AZURE_KEY,
    BUCKET,
    Server,
    azure_server,
    make_bucket,
    make_container,
    s3_server,
    set_credentials,
)


@dataclass(frozen=True)
class Cloud:
    """One kind of object store.

    Attributes:
        scheme: scheme of its URLs.
        fixture: name of the fixture that is a server, with a bucket, for the whole session.
        serve: starts such a server.
        make_place: makes the bucket in the server on a port.
        sign_in: sets the environment's credentials for a server on a port; may keep files in a directory.
    """

    scheme: str
    fixture: str
    serve: Callable[[], AbstractContextManager[Server]]
    make_place: Callable[[int], None]
    sign_in: Callable[[pytest.MonkeyPatch, int, Path], None]

    def url(self, prefix: str) -> str:
        return f"{self.scheme}://{BUCKET}/{prefix}"


def _sign_in_to_amazon(monkeypatch: pytest.MonkeyPatch, port: int, directory: Path) -> None:
    del directory
    set_credentials(monkeypatch, port)


def _sign_in_to_google(monkeypatch: pytest.MonkeyPatch, port: int, directory: Path) -> None:
    account = {
        "type": "service_account",
        "gcs_base_url": f"http://127.0.0.1:{port}",
        "client_email": "tests@cargohold.test",
        "private_key": _private_key(),
        "private_key_id": "1",
    }
    file = directory / "service-account.json"
    file.write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(file))
    monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")


def _sign_in_to_azure(monkeypatch: pytest.MonkeyPatch, port: int, directory: Path) -> None:
    del directory
    for name, value in {
        "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}",
        "AZURE_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)


@cache
def _private_key() -> str:
    pytest.importorskip("cryptography", reason="a service account's key needs the extra cargohold[encryption]")
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415  # an optional package
    from cryptography.hazmat.primitives.asymmetric import rsa  # noqa: PLC0415  # an optional package

    key = rsa.generate_private_key(65537, 2048)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


CLOUDS = {
    "s3": Cloud("s3", "s3", s3_server, make_bucket, _sign_in_to_amazon),
    "google": Cloud("gs", "s3", s3_server, make_bucket, _sign_in_to_google),
    "azure": Cloud("az", "azure", azure_server, make_container, _sign_in_to_azure),
}
