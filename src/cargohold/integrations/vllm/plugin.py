"""Entry point of the group ``vllm.general_plugins``: makes the connector known to vLLM by its short name."""

from __future__ import annotations

import logging
import os
import sys
import time
from copy import copy
from multiprocessing import parent_process
from typing import Final

from cargohold.errors import ConfigError

logger = logging.getLogger("vllm.cargohold")  # vLLM shows only loggers below its own name

NAME: Final = "CargoholdConnector"
MODULE: Final = "cargohold.integrations.vllm.connector"

_REPLACED: Final = (
    f"--kv-offloading-size makes vLLM use a connector of its own instead of {NAME}, so Cargohold does nothing: leave it out, "
    'and say in kv_connector_extra_config how much memory Cargohold may use, as "host_bytes": "8GiB"'
)

_PASSED_BY: Final = "vLLM's Rust front end (VLLM_USE_RUST_FRONTEND) runs no --middleware"

_ran_first_at_s: float | None = None
"""When ``register`` ran first in this process, or, if the process was forked since, when it began."""


def _begin_as_child() -> None:
    """Note when a forked child began: vLLM does not call ``register`` in it again."""
    global _ran_first_at_s  # noqa: PLW0603  # it is the process's, as forks are
    _ran_first_at_s = time.time()


os.register_at_fork(after_in_child=_begin_as_child)


def ran_first_at() -> float | None:
    """When code of ours ran first in this process, in seconds since 1970; ``None`` if vLLM loads no such plugins.

    In an engine's own process that is before the weights are loaded. Connectors are made later.
    """
    return _ran_first_at_s


def register() -> None:
    """Register the connector. vLLM calls this in each of its processes, and may call it several times.

    Every vLLM in this environment calls it, also one without a connector. So it must not raise, whatever vLLM is like; it ends
    only a server whose command line has impossible options of ours.
    """
    global _ran_first_at_s  # noqa: PLW0603  # it is the process's, as the registration is
    _ran_first_at_s = _ran_first_at_s or time.time()
    if parent_process() is None:
        _check_front()
        _check_command()
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415  # vLLM is there now

        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except ValueError:
        return  # an earlier call did
    except (ImportError, AttributeError, TypeError) as error:
        line = "cargohold: this vLLM takes no connectors by name, so it does not know %s: %s"
        logger.error(line, NAME, error)  # noqa: TRY400  # one line


def _check_front() -> None:
    """Say where requests pass the front by; end the process if tenants would not be kept apart."""
    has_tenants = bool(os.environ.get("CARGOHOLD_TENANTS"))
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") in {"", "0"}:
        return
    if has_tenants:
        raise SystemExit(f"cargohold: {_PASSED_BY}, so the tenants of CARGOHOLD_TENANTS would not be kept apart")
    if any("cargohold.serve.front" in word for word in sys.argv):
        logger.error("cargohold: %s: requests pass the front by", _PASSED_BY)


def _check_command() -> None:
    """End the process if it is vLLM's server, and was started with options of ours that cannot work."""
    try:
        from cargohold.integrations.vllm import command as command_line  # noqa: PLC0415  # imports vLLM
    except ImportError as error:
        logger.debug("cargohold: this vLLM has its parser elsewhere, so wrong options are found later: %s", error)
        return
    command = command_line.of_this_process()
    if command is None:
        return
    if command.is_replaced:
        logger.error("cargohold: %s", _REPLACED)
    shown, ours = _OursFirst(logging.StreamHandler()), logging.getLogger("cargohold")
    ours.addHandler(shown)  # vLLM sets its log up later
    try:
        command_line.check(command)
    except ConfigError as error:
        raise SystemExit(f"cargohold: {error}") from None
    except Exception as error:  # noqa: BLE001  # a third-party connector or tier may raise anything; the engine says so
        logger.debug("cargohold: options were not checked: %r", error)
    finally:
        ours.removeHandler(shown)


class _OursFirst(logging.Handler):
    """Hands our lines on to one of vLLM's handlers, with our name in front: else nothing in its log says whose they are."""

    def __init__(self, inner: logging.Handler) -> None:
        super().__init__(inner.level)
        self._inner = inner

    def emit(self, record: logging.LogRecord) -> None:
        named = copy(record)
        named.msg = f"cargohold: {record.msg}"
        self._inner.handle(named)


def follow_vllm_log() -> None:
    """Let vLLM's log have our lines, unless the program logs them elsewhere."""
    ours, theirs = logging.getLogger("cargohold"), logging.getLogger("vllm")
    if not ours.handlers and not logging.getLogger().handlers:
        for handler in theirs.handlers:
            ours.addHandler(_OursFirst(handler))
        if ours.level == logging.NOTSET:
            ours.setLevel(theirs.level)
