"""The process in which Mooncake's client runs, because its ``setup`` may hold the interpreter's lock for minutes.

Started by ``mooncake.ClientProcess``, and ended by it: it may be killed in any call. It imports nothing of ours. Over each of
its sockets comes one request at a time, in JSON: the name of an operation and its arguments. Chunks are in memory that both
processes have, which is registered once; a request names their place there.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import Any, Final

MAX_MESSAGE_BYTES: Final = 128 * 1024
_INVALID_PARAMS: Final = -600
_CLOSE_S: Final = 5
_RETRY_S: Final = 1.0


class MooncakeStore:
    """The operations, with values in shared memory.

    Args:
        settings: what ``ClientProcess`` has sent.

    Raises ``OSError`` if nothing listens at the master's address, or the store refuses.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        master, lent_bytes = settings["master"], settings["lent_bytes"]
        host, _, port = master.rpartition(":")
        # Where nothing listens, `setup` tries for 90 s, and nobody can interrupt it.
        with socket.create_connection((host.strip("[]"), int(port)), settings["limit_s"]) as connection:
            own_host = connection.getsockname()[0]
        from mooncake.mooncake_config import MooncakeConfig  # noqa: PLC0415  # the same

        from mooncake import store as mooncake  # noqa: PLC0415  # takes long, and may lack a library

        os.environ["MOONCAKE_MASTER"] = master  # without it, or a file, they refuse the rest of the environment
        theirs = MooncakeConfig.load_from_env()
        host = own_host if theirs.local_hostname == "localhost" else theirs.local_hostname
        protocol, devices = settings["protocol"] or theirs.protocol, settings["devices"] or theirs.device_name or ""
        self._mooncake = mooncake
        self._store = mooncake.MooncakeDistributedStore()
        code = self._store.setup(host, theirs.metadata_server, lent_bytes, 0, protocol, devices, master)
        if code:
            raise OSError(f"its setup ends with {code}")
        self._memory = mmap.mmap(settings["memory"], settings["num_bytes"])
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        code = self._store.register_buffer(self._base, settings["num_bytes"])
        if code:
            raise OSError(f"its memory cannot be registered: {code}")

    def exist(self, keys: list[str]) -> list[int]:
        """Return 1 for each value that is there, 0, or a negative code. Those that are there get a lease."""
        return list(self._store.batch_is_exist(keys))

    def get(self, key: str, at: int, size: int) -> int:
        """Read a value; return its size, more than ``size`` if it is larger and was not read, or a negative code."""
        code = int(self._store.get_into(key, self._base + at, size))
        return size + 1 if code == _INVALID_PARAMS and self._store.get_size(key) > size else code

    def put(self, key: str, at: int, size: int, pin_ms: int | None) -> list[int]:
        """Write a value; return 0 or a negative code, and, as ``exist``, whether it is there now.

        Args:
            key: its name.
            at, size: where it is in shared memory.
            pin_ms: for how long others are evicted before it; -1 for never evicting it; ``None`` for no difference.
        """
        how = self._mooncake.ReplicateConfig()
        how.with_hard_pin = pin_ms == -1
        if pin_ms is not None and pin_ms > 0:
            how.soft_pin_action = self._mooncake.SoftPinAction.ENABLE
            how.soft_pin_ttl_ms = pin_ms
        code = int(self._store.put_from(key, self._base + at, size, how))
        if code == _INVALID_PARAMS and pin_ms is not None:  # the master allows no pin of that length
            code = int(self._store.put_from(key, self._base + at, size))
        return [code, *(self.exist([key]) if code == 0 else [0])]

    def remove(self, keys: list[str]) -> list[int]:
        """Remove values, also those that somebody has a lease on; return 0 or a negative code for each."""
        return list(self._store.batch_remove(keys, True))

    def close(self) -> None:
        """Take leave of the master, so that what was lent is given up in order."""
        self._store.close()


def reached(settings: dict[str, Any], lines: list[socket.socket]) -> MooncakeStore:
    """Connect to the store. A process that only lends memory tries until it succeeds; another says why it cannot, and ends."""
    while os.getppid() == settings["parent"]:
        try:
            return MooncakeStore(settings)
        except Exception as error:  # noqa: BLE001  # goes to the one who can report it
            if not settings["lent_bytes"]:
                answered, *_ = select.select(lines, (), ())
                for line in answered:
                    line.recv(MAX_MESSAGE_BYTES)
                    line.send(json.dumps(str(error)).encode())
                break
        time.sleep(_RETRY_S)
    sys.exit(1)


def serve(store: MooncakeStore, line: socket.socket) -> None:
    """Carry out requests until the other end is closed."""
    while message := line.recv(MAX_MESSAGE_BYTES):
        operation, *arguments = json.loads(message)
        line.send(json.dumps([getattr(store, operation)(*arguments)]).encode())
    leave(store)


def leave(store: MooncakeStore) -> None:
    """End the process, with good manners if that does not take long."""
    signal.alarm(_CLOSE_S)
    store.close()
    os._exit(0)


def main() -> None:
    """Serve each socket in a thread of its own, as long as the parent lives."""
    settings = json.loads(sys.argv[1])
    settings["memory"], *descriptors = settings["descriptors"]
    lines = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    store = reached(settings, lines)
    for line in lines:
        threading.Thread(target=serve, args=(store, line), daemon=True).start()
    while os.getppid() == settings["parent"]:  # what it has forked may keep the sockets open
        time.sleep(_RETRY_S)
    leave(store)


if __name__ == "__main__":
    main()
