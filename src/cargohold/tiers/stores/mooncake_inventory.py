"""The inventory of a Mooncake Store. Its clients cannot list values; the master's own web server can."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from cargohold.errors import TierError, one_line
from cargohold.tiers.config import REQUEST_S
from cargohold.tiers.inventory import PIECE_BYTES
from cargohold.tiers.namespace import MAX_DESCRIPTION_BYTES
from cargohold.tiers.stores.inventory import NAME, StoredObject, StoreInventory
from cargohold.tiers.stores.mooncake import PREFIX, ClientProcess

_OURS: Final = re.compile(re.escape(PREFIX) + "([0-9a-f]{32})(?::((?:[0-9a-f]{2})+))?")
_METRICS_PORT: Final = "9003"
"""Port of the master's web server, unless the URL has another one: ``?metrics_port=``."""
_NAMES_AT_ONCE: Final = 50


class MooncakeInventory(StoreInventory):
    """The namespaces in a store.

    Args:
        url: names the master.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        (port, *_) = parse_qs(parts.query).get("metrics_port", [_METRICS_PORT])
        self._web = f"http://{parts.netloc.rpartition(':')[0]}:{port}"
        self._url = url
        self._client: ClientProcess

    @contextmanager
    def _session(self) -> Iterator[None]:
        self._client = ClientProcess(self._url, {})
        try:
            yield
        except (OSError, ValueError, LookupError, TypeError) as error:
            reason = f"the list at {self._web} (?metrics_port=) cannot be read: {one_line(error)}"
            raise TierError(NAME, reason) from error
        finally:
            self._client.close()

    def _listed(self, namespace_id: str) -> Iterator[StoredObject]:
        start = f"{PREFIX}{namespace_id}"
        names = [name for name in self._ask("get_all_keys").decode().split() if name.startswith(start)]
        for at in range(0, len(names), _NAMES_AT_ONCE):
            found = json.loads(self._ask(f"batch_query_keys?keys={','.join(names[at : at + _NAMES_AT_ONCE])}"))["data"]
            for name, about in found.items():
                match = _OURS.fullmatch(name)
                if match is not None and about["ok"] and about["values"]:
                    yield StoredObject(name, match[1], bytes.fromhex(match[2] or ""), int(about["values"][0]["size_"]))

    def _pieces(self, chunk: StoredObject) -> Iterator[memoryview]:
        value = self._read(chunk.path, chunk.num_bytes)
        if not value:
            raise FileNotFoundError(chunk.path)
        for start in range(0, len(value), PIECE_BYTES):
            yield value[start : start + PIECE_BYTES]

    def _description(self, namespace_id: str) -> bytes:
        return bytes(self._read(f"{PREFIX}{namespace_id}", MAX_DESCRIPTION_BYTES))

    def _delete(self, path: str) -> None:
        self._client.call("remove", [path])

    def _read(self, name: str, num_bytes: int) -> memoryview:
        """Return a value of so many bytes at most; empty if it is not there, or longer."""
        if len(self._client.memory) < num_bytes:
            self._client.close()
            self._client = ClientProcess(self._url, {}, num_bytes=num_bytes)
        num_read: Any = self._client.call("get", name, 0, num_bytes)
        return self._client.memory[: num_read if 0 < num_read <= num_bytes else 0]

    def _ask(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self._web}/{path}", timeout=REQUEST_S) as answer:  # noqa: S310  # always http
            return bytes(answer.read())
