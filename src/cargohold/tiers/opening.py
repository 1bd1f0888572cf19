"""Checks tiers by their options, and opens them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Final, TypeVar

from cargohold.deadlines import ANSWER
from cargohold.errors import ConfigError
from cargohold.tiers import packing
from cargohold.tiers.chunk_format import ChunkCodec
from cargohold.tiers.config import REQUEST_S, Opening, TierConfig
from cargohold.tiers.encryption import read_key, require_package
from cargohold.tiers.namespace import Namespace
from cargohold.tiers.port import Tier

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SILENT_S: Final = 10.0
"""How long a start waits for a medium before it says so."""


def require_packages(config: TierConfig) -> None:
    """Raise ``ConfigError`` if a package for a tier is missing. Touches no medium, so it may run on any machine."""
    if config.encryption_key is not None:
        require_package()
    if config.pack == "exponent":
        packing.require_package()
    config.require_packages()


def check_place_here(config: TierConfig) -> None:
    """Raise ``ConfigError`` for what can be seen, without changing anything, on the machine where a tier will be opened."""
    if config.encryption_key is not None:
        read_key(config.encryption_key)
    at_medium(config, config.require_place, ANSWER.seconds())


def check_tier(config: TierConfig, chunk_sizes: Sequence[int], num_shards: int) -> None:
    """Check options on the machine where the tier will be opened. Asks no server; ``open_tier`` does.

    Args:
        config: the tier's options.
        chunk_sizes: bytes of a chunk of each group on one worker.
        num_shards: number of workers that share the limits in ``config``.

    Raises:
        ConfigError: the medium cannot be used like this, there is no key for encryption, or a package is not installed.
    """
    require_packages(config)
    config.require_sizes(max(chunk_sizes), num_shards)
    check_place_here(config)


def open_tier(
    config: TierConfig,
    namespace: Namespace,
    chunk_sizes: Sequence[int],
    num_shards: int = 1,
    *,
    share: float = 1.0,
    request_s: float = REQUEST_S,
    number_types: Sequence[str] = (),
) -> Tier:
    """Open one worker's shard of a tier.

    Args:
        config: the tier's options.
        namespace: what the chunks' bytes depend on. Each worker has its own: they differ in ``split``.
        chunk_sizes, num_shards, share, request_s, number_types: see ``Opening``.

    Raises:
        ConfigError: the medium cannot be used with these options, there is no key for encryption, or a package is not
            installed. A store that does not answer is no error: it may come back.
    """
    config.require_sizes(max(chunk_sizes), num_shards)
    opening = Opening(
        codec=_codec(config, namespace, number_types if config.packs else ()),
        chunk_sizes=chunk_sizes,
        num_shards=num_shards,
        share=share,
        request_s=request_s,
        number_types=number_types,
    )
    return at_medium(config, lambda: config.open(opening), undo=lambda tier: tier.close())


def at_medium(
    config: TierConfig,
    work: Callable[[], T],
    limit_s: float | None = None,
    undo: Callable[[T], object] = lambda _: None,
) -> T:
    """Do work on a tier's medium, which may hang, in a thread of its own: else not even Ctrl-C would end the start.

    Args:
        config: the tier's options.
        work: what to do.
        limit_s: seconds after which it is not awaited any more; ``None`` for work that may take long.
        undo: called with what has come of work that was not awaited to its end, because of Ctrl-C or the limit.

    Raises:
        ConfigError: it has taken longer.
    """
    done: Future[T] = Future()
    try:
        threading.Thread(target=_do, args=(work, done), name=f"cargohold-{config.kind}-start", daemon=True).start()
        _await(done, config, limit_s)
    except BaseException:
        done.add_done_callback(lambda late: late.exception() or undo(late.result()))
        raise
    return done.result()


def _await(done: Future[T], config: TierConfig, limit_s: float | None) -> None:
    silent_s = _SILENT_S if limit_s is None else min(_SILENT_S, limit_s)
    if wait([done], silent_s).done:
        return
    logger.warning("tier %s: the start has waited %g s for %s", config.kind, silent_s, config.describe())
    if wait([done], None if limit_s is None else limit_s - silent_s).not_done:
        used = config.used_directory
        key, value = ("kind", config.kind) if used is None else (used.option, str(used.path))
        raise ConfigError(key, value, f"it has not answered for {limit_s:g} s; does its disk or mount hang?")


def _do(work: Callable[[], T], done: Future[T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001  # is raised where it is awaited
        done.set_exception(error)


def namespace_in(config: TierConfig, namespace: Namespace) -> Namespace:
    """Return the namespace of chunks in a tier: the given one, with the id of the tier's encryption key."""
    return _codec(config, namespace).namespace


def _codec(config: TierConfig, namespace: Namespace, number_types: Sequence[str] = ()) -> ChunkCodec:
    key = None if config.encryption_key is None else read_key(config.encryption_key)
    return ChunkCodec(namespace, key, time.time_ns, number_types)
