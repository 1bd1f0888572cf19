"""The process in which Mooncake's client runs, because its ``setup`` may hold the interpreter's lock for minutes.

Started by ``mooncake.ClientProcess``, and ended by it: it may be killed in any call. It imports nothing of ours. Over its first
socket it says that it is ready; over each of the others comes one request at a time, a line of JSON: the name of an operation
and its arguments. Chunks are in memory that both processes have, registered once; a request names their place there.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
from typing import Any, Final

READY: Final = b"ready"
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
        master, num_bytes = settings["master"], settings["num_bytes"]
        host, _, port = master.rpartition(":")
        # Where nothing listens, `setup` tries for 90 s, and can't be interrupted.
        with socket.create_connection((host.strip("[]"), int(port)), settings["limit_s"]) as connection:
            own_host = connection.getsockname()[0]
        from mooncake.mooncake_config import MooncakeConfig  # noqa: PLC0415  # takes long
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig  # noqa: PLC0415  # may lack a library

        os.environ["MOONCAKE_MASTER"] = master  # without it, or a file, they refuse the rest of the environment
        theirs = MooncakeConfig.load_from_env()
        if theirs.local_hostname != "localhost":
            own_host = theirs.local_hostname
        network = settings["protocol"] or theirs.protocol, settings["devices"] or theirs.device_name or ""
        self._store, self._make_config = MooncakeDistributedStore(), ReplicateConfig
        self._memory = mmap.mmap(settings["memory"], num_bytes)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        code = self._store.setup(own_host, theirs.metadata_server, settings["lent_bytes"], 0, *network, master)
        code = code or self._store.register_buffer(self._base, num_bytes)
        if code:
            raise OSError(f"Mooncake's client cannot be set up ({code})")

    def exist(self, keys: list[str]) -> list[int]:
        """Return 1 for each value that is there, 0, or a negative code. Those that are there get a lease."""
        return list(self._store.batch_is_exist(keys))

    def get(self, key: str, at: int, size: int) -> int:
        """Read a value; return its size, more than ``size`` if it is larger and was not read, or a negative code."""
        code = int(self._store.get_into(key, self._base + at, size))
        return size + 1 if code == _INVALID_PARAMS and self._store.get_size(key) > size else code

    def put(self, key: str, at: int, size: int, is_kept: bool) -> list[int]:  # by JSON
        """Write a value, which is never evicted if it is to be kept.

        Returns 0 or a negative code, and, as ``exist``, whether it is there now.
        """
        how = self._make_config()
        how.with_hard_pin = is_kept
        code = int(self._store.put_from(key, self._base + at, size, how))
        return [code, *(self.exist([key]) if code == 0 else [0])]

    def remove(self, keys: list[str]) -> list[int]:
        """Remove values, also those with a lease; return 0 or a negative code for each."""
        return list(self._store.batch_remove(keys, True))

    def serve(self, line: socket.socket) -> None:
        """Carry out requests until the other end is closed."""
        for message in line.makefile("rb"):
            operation, *arguments = json.loads(message)
            line.sendall(json.dumps(getattr(self, operation)(*arguments)).encode() + b"\n")
        self.leave()

    def leave(self) -> None:
        """End the process; take leave of the master, so that what was lent is given up in order, if that does not take long."""
        signal.alarm(_CLOSE_S)
        self._store.close()
        os._exit(0)


def reached(settings: dict[str, Any], control: socket.socket) -> MooncakeStore:
    """Connect to the store. A process that only lends memory tries until it succeeds; another says why it cannot, and ends."""
    while os.getppid() == settings["parent"]:
        try:
            return MooncakeStore(settings)
        except Exception as error:  # noqa: BLE001  # goes to the process that can report it
            if not settings["lent_bytes"]:
                control.sendall(str(error).encode())
                break
        time.sleep(_RETRY_S)
    sys.exit(1)


def main() -> None:
    """Serve each socket in a thread of its own, as long as the parent lives."""
    settings = json.loads(sys.argv[1])
    settings["memory"], *descriptors = settings["descriptors"]
    control, *lines = (socket.socket(fileno=descriptor) for descriptor in descriptors)
    store = reached(settings, control)
    for line in lines:
        threading.Thread(target=store.serve, args=(line,), daemon=True).start()
    control.sendall(READY)
    while os.getppid() == settings["parent"]:  # what it has forked may keep the sockets open
        time.sleep(_RETRY_S)
    store.leave()


if __name__ == "__main__":
    main()
