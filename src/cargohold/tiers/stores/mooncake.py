"""The shared tier on Mooncake Store: memory that machines of a cluster lend.

A chunk is the value of ``cargohold:<namespace id>:<key>``, in hexadecimal; the value of ``cargohold:<namespace id>`` describes
the namespace, and is never evicted. What is asked for or was just stored has a lease of the master's, so it is not evicted for
that time (``--default_kv_lease_ttl``, 10 s): as long as a hand-off needs.

Mooncake's client runs in a process of its own (``mooncake_process``): where the master does not answer, its ``setup`` holds the
interpreter's lock for 90 s. A call that takes too long ends that process, and the next call starts another one. Both processes
have the memory that chunks are staged in.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from cargohold.cache.manager import OffloadKey
from cargohold.deadlines import ANSWER
from cargohold.errors import ConfigError, TierError, one_line
from cargohold.tiers import places
from cargohold.tiers.config import REQUEST_S, Opening
from cargohold.tiers.inventory import NAME, PIECE_BYTES, StoredObject, StoreInventory
from cargohold.tiers.memory import Staging, address_of, copy_bytes, padded
from cargohold.tiers.namespace import MAX_DESCRIPTION_BYTES
from cargohold.tiers.port import StoreOutcome
from cargohold.tiers.stores.base import SharedTier
from cargohold.tiers.stores.mooncake_process import READY

if find_spec("mooncake") is None:
    raise ImportError("mooncake")  # imported where the client runs: it brings Go's runtime and handlers of signals

logger = logging.getLogger(__name__)

PREFIX: Final = "cargohold:"
_PROGRAM: Final = Path(__file__).with_name("mooncake_process.py")
_LOG_LEVEL: Final = "MC_LOG_LEVEL"
"""Mooncake's variable for what its log is to say. Where it is not set there is no log: to it, each miss is an error."""
_LEAVE_S: Final = 1.0
_PACKAGES: Final = {
    "libibverbs.so.1": "apt-get install libibverbs1",
    "libcurl.so.4": "apt-get install libcurl4",
    "libnuma.so.1": "apt-get install libnuma1",
    "libcudart.so.12": "pip install mooncake-transfer-engine-non-cuda>=0.3.13.post1",
}
"""Libraries that Mooncake's package needs and does not bring, and what does."""
_NO_ROOM, _NOT_READY, _NOT_FOUND = -200, -703, -704
_MEANINGS: Final = {
    -800: "a machine that lends memory does not answer",
    -900: "the master does not answer, or has another version of Mooncake",
    -901: "the master has not answered in time",
}
_MAX_REASON_BYTES: Final = 4096


@cache
def require_libraries(url: str) -> None:
    """Raise ``ConfigError`` if Mooncake's client cannot be imported on this machine, or its own configuration is wrong."""
    text = "import mooncake.store; from mooncake.mooncake_config import MooncakeConfig; MooncakeConfig.load_from_env()"
    environment = {**os.environ, "MOONCAKE_MASTER": urlsplit(url).netloc}
    trial = subprocess.run(  # noqa: S603  # our own interpreter, and no shell
        [sys.executable, "-c", text],
        env=environment,
        capture_output=True,
        text=True,
        timeout=ANSWER.seconds(),
        check=False,
    )
    if trial.returncode:
        reason = (trial.stderr.splitlines() or [f"it ends with {trial.returncode}"])[-1]
        library = re.search(r"(\S+): cannot open shared object file", reason)
        remedy = f"; {_PACKAGES[library[1]]}" if library and library[1] in _PACKAGES else ""
        raise ConfigError("url", places.without_secrets(url), f"Mooncake's client cannot be used: {reason}{remedy}")


@dataclass(slots=True)
class _Run:
    """One run of the client's process.

    Attributes:
        process: the process.
        control: over which it says that it is ready, or why it ends.
        free: the sockets over which no request is under way.
        is_ready: whether it has said so. It is given time for that, even if requests end: libraries and networks may be slow.
        gives_up_at: when it should be ready at the latest.
    """

    process: subprocess.Popen[bytes]
    control: socket.socket
    free: queue.SimpleQueue[socket.socket]
    is_ready: bool = False
    gives_up_at: float = field(default_factory=lambda: time.monotonic() + ANSWER.seconds())

    def ask(self, request: str, ends_at: float) -> Any:
        """Send a request, when the process is ready, and return the answer. Raises ``OSError`` or ``queue.Empty``."""
        said = self.control.recv(_MAX_REASON_BYTES, socket.MSG_PEEK)
        if said != READY:
            raise ConnectionError(said.decode() or "its client has ended")
        self.is_ready = True
        line = self.free.get(timeout=max(0.001, ends_at - time.monotonic()))
        try:
            line.settimeout(max(0.001, ends_at - time.monotonic()))
            line.sendall(f"{request}\n".encode())
            with line.makefile("rb") as answers:
                answer = answers.readline()
            if not answer:
                raise ConnectionError("its client has ended")
        except OSError:
            line.close()
            raise
        self.free.put(line)
        return json.loads(answer)

    def end(self, patience_s: float = 0.0) -> None:
        """End the process, and wait until it can write to no memory any more. Calls under way get no answer."""
        with suppress(queue.Empty):
            while True:
                self.free.get_nowait().close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        self.process.kill()
        self.process.wait()
        self.control.close()


class ClientProcess:
    """Mooncake's client, in a process of its own that is started when it is needed. Thread-safe.

    Args:
        url: names the master.
        network: ``protocol`` and ``devices``, where Mooncake's own environment does not decide.
        limit_s: maximum time of a call, with the start of the process.
        num_bytes: bytes of ``memory``.
        num_lines: number of calls at the same time.
        lent_bytes: bytes that it lends to the store.

    Attributes:
        memory: memory that calls read and write, by offset.
    """

    def __init__(
        self,
        url: str,
        network: Mapping[str, str | None],
        limit_s: float = REQUEST_S,
        *,
        num_bytes: int = 1,
        num_lines: int = 1,
        lent_bytes: int = 0,
    ) -> None:
        self._file = os.fdopen(os.memfd_create("cargohold"), "rb+", buffering=0)
        self._file.truncate(num_bytes)
        self.memory = memoryview(mmap.mmap(self._file.fileno(), num_bytes))
        self._settings = {
            "protocol": None,
            "devices": None,
            **network,
            "master": urlsplit(url).netloc,
            "lent_bytes": lent_bytes,
            "num_bytes": num_bytes,
            "limit_s": limit_s,
            "parent": os.getpid(),
        }
        self._shown = places.without_secrets(url)
        self._limit_s, self._num_lines = limit_s, num_lines
        self._lock = threading.Lock()
        self._run: _Run | None = None

    def call(self, operation: str, *arguments: object) -> Any:
        """Carry out an operation of ``mooncake_process.MooncakeStore``, and return its answer.

        Raises ``TierError`` if it has taken too long, the process has ended, or it cannot reach the master.
        """
        ends_at = time.monotonic() + self._limit_s
        run = self.begin()
        try:
            return run.ask(json.dumps([operation, *arguments]), ends_at)
        except (OSError, queue.Empty) as error:
            is_late = isinstance(error, TimeoutError | queue.Empty)
            if run.is_ready or not is_late or time.monotonic() > run.gives_up_at:
                run.end()
            reason = f"it has not answered for {self._limit_s:g} s" if is_late else one_line(error)
            raise TierError(NAME, f"{self._shown}: {reason}") from error

    def begin(self) -> _Run:
        """Start the process, if it does not run, without waiting for it."""
        with self._lock:
            if self._run is not None and self._run.process.poll() is not None:
                self._run.end()
                self._run = None
            self._run = self._run or self._start()
            return self._run

    def close(self, patience_s: float = 0.0) -> None:
        """End the process, with so much time to take leave of the master. Nothing may be called any more."""
        with self._lock:
            if self._run is not None:
                self._run.end(patience_s)
        self._file.close()

    def _start(self) -> _Run:
        pairs = [socket.socketpair() for _ in range(self._num_lines + 1)]
        passed = [self._file.fileno(), *(their.fileno() for _, their in pairs)]
        process = subprocess.Popen(  # noqa: S603  # our own interpreter and file, and no shell
            [sys.executable, "-P", str(_PROGRAM), json.dumps({**self._settings, "descriptors": passed})],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if _LOG_LEVEL in os.environ else subprocess.DEVNULL,
        )
        for our, their in pairs:
            their.close()
            our.settimeout(self._limit_s)
        run = _Run(process, pairs[0][0], queue.SimpleQueue())
        for our, _ in pairs[1:]:
            run.free.put(our)
        return run


class MooncakeTier(SharedTier):
    """A tier that keeps chunks in a Mooncake Store.

    Args:
        url: names the master.
        network: see ``ClientProcess``.
        opening: what this worker keeps there. The store keeps the limit of all its clients.
        num_threads: number of calls at the same time.
        lend_bytes: bytes that all workers together lend to the store.

    Raises:
        ConfigError: Mooncake's client cannot be imported, or its own configuration is wrong.
    """

    def __init__(
        self, url: str, network: Mapping[str, str | None], opening: Opening, num_threads: int, lend_bytes: int
    ) -> None:
        require_libraries(url)
        super().__init__(opening.codec, opening.chunk_bytes)
        self._to_introduce = self._description()
        slot_bytes = padded(max(self._max_value_bytes, len(self._to_introduce)))
        num_bytes = slot_bytes * (num_threads + 1)
        self._client = ClientProcess(url, network, opening.request_s, num_bytes=num_bytes, num_lines=num_threads)
        self._lent_bytes = lend_bytes // opening.num_shards
        self._lender = ClientProcess(url, network, lent_bytes=self._lent_bytes)
        memory = self._client.memory
        self._spare, *self._slots = (memory[at : at + slot_bytes] for at in range(0, num_bytes, slot_bytes))
        self._spare_lock = threading.Lock()  # of the slot for what is not in a slot
        self._first = address_of(memory)
        self._prefix = f"{PREFIX}{opening.codec.namespace.id}"
        self._introduce()

    def begin(self) -> None:
        """Begin to lend memory, also again, if the process that did has ended."""
        if self._lent_bytes:
            self._lender.begin()

    def staging(self) -> memoryview:
        """As for ``SharedTier``, in memory that is registered with the store, while there is some left."""
        return super().staging() if self._slots else Staging(self.chunk_bytes).view

    def probe(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Ask for many keys at once. What is there gets a lease."""
        return [code == 1 for code in self._of_each("exist", keys, {0, 1})]

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Remove values, also those with a lease."""
        self._of_each("remove", keys, {0, _NOT_FOUND, _NOT_READY})

    def close(self) -> None:
        """End the client, and give up what was lent."""
        self._client.close()
        self._lender.close(_LEAVE_S)

    def _value_memory(self) -> memoryview:
        return self._slots.pop()

    def _put(self, key: OffloadKey, value: memoryview) -> StoreOutcome:
        self.begin()
        outcome = self._write(self._name(key), value)
        if outcome is StoreOutcome.STORED and self._to_introduce:
            self._introduce()
        return outcome

    def _write(self, name: str, value: memoryview, *, is_kept: bool = False) -> StoreOutcome:
        at = address_of(value) - self._first
        if not 0 <= at < len(self._client.memory):
            with self._spare_lock:
                slot = self._spare[: len(value)]
                copy_bytes(slot, value)
                return self._write(name, slot, is_kept=is_kept)
        code, is_there = self._client.call("put", name, at, len(value), is_kept)
        if code == _NO_ROOM or (code, is_there) == (0, 0):
            return StoreOutcome.LATER  # the master is evicting, or another client is writing it
        self._require([code, is_there], {0, 1})
        return StoreOutcome.STORED

    def _get(self, key: OffloadKey) -> memoryview | None:
        with self._spare_lock:
            found = self._get_into(key, self._spare)
            return None if found is None else memoryview(bytes(found))

    def _read(self, key: OffloadKey, into: memoryview) -> memoryview | None:
        slot = self._staged.get(address_of(into))
        return self._get(key) if slot is None else self._get_into(key, slot)

    def _get_into(self, key: OffloadKey, slot: memoryview) -> memoryview | None:
        """Read a value into a slot; return it, empty if it is too large to be ours."""
        size = self._client.call("get", self._name(key), address_of(slot) - self._first, self._max_value_bytes)
        if size in {_NOT_FOUND, _NOT_READY}:
            return None
        self._require([min(size, 0)], {0})
        return slot[: size if size <= self._max_value_bytes else 0]

    def _of_each(self, operation: str, keys: Sequence[OffloadKey], good: AbstractSet[int]) -> list[int]:
        codes: list[int] = self._client.call(operation, [self._name(key) for key in keys]) if keys else []
        self._require(codes, good)
        return codes

    def _require(self, codes: Iterable[int], good: AbstractSet[int]) -> None:
        """Raise ``TierError`` for the first code that is none of those."""
        for code in codes:
            if code not in good:
                raise TierError(NAME, f"{_MEANINGS.get(code, 'Mooncake reports an error')} ({code})")

    def _name(self, key: OffloadKey) -> str:
        return f"{self._prefix}:{key.hex()}"

    def _introduce(self) -> None:
        """Store the description of the namespace, for ``cargohold cache``, once: the first lender may come later."""
        try:
            if self._write(self._prefix, memoryview(self._to_introduce), is_kept=True) is StoreOutcome.STORED:
                self._to_introduce = b""
        except TierError as error:
            logger.warning("shared tier: the store does not answer yet as it should: %s", error.reason)


# --- the inventory: clients cannot list values, but the master's own web server can -----------------------------------

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


def open_inventory(url: str) -> MooncakeInventory:
    """Make the inventory of a store. Raises as ``require_libraries``."""
    require_libraries(url)
    return MooncakeInventory(url)
