"""The adapter's options, from ``kv_connector_extra_config``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Self, TypeGuard

from cargohold.connector.config import OffloadConfig
from cargohold.connector.factory import Offload, check_apart, check_memory, connector_factory, load_timeout_s, tiers_of
from cargohold.connector.options import parse_offload
from cargohold.connector.recording import RecordingFactory
from cargohold.connector.tenants import Tenants
from cargohold.connector.tracing import TracingFactory
from cargohold.connector.tracing import require_packages as require_tracing
from cargohold.errors import option_path
from cargohold.options import Options, declared, made, one_of
from cargohold.process import ENGINE
from cargohold.protocol import AttentionKind, KVCacheGroup, KVConnectorFactory
from cargohold.tiers import check_place_here, require_packages

DISABLE: Final = "disable"
REFUSE: Final = "refuse"
RECOMPUTE: Final = "recompute"
FAIL: Final = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings(Options):
    """Options of the adapter itself; all others belong to the connectors.

    Attributes:
        if_unsupported: what to do where the model, vLLM's configuration or its version cannot be served: ``disable`` says so in
            one line and serves without offloading; ``refuse`` does not start.
        load_failure_policy: what vLLM does with a request whose load failed: ``recompute`` its tokens, or ``fail`` it. vLLM's
            own option of that kind is set to this value.
        kv_events_salted: whether KV events of this connector's tiers are published for requests with a ``cache_salt``, too;
            vLLM publishes its own of all requests.
        traces: whether to make OpenTelemetry spans of what is done for each request, in the trace that vLLM passes on.
        record: a new file for the block trace of all requests, for ``cargohold replay``: hashes only.
    """

    if_unsupported: Annotated[str, one_of(DISABLE, REFUSE)] = DISABLE
    load_failure_policy: Annotated[str, one_of(RECOMPUTE, FAIL)] = RECOMPUTE
    kv_events_salted: bool = False
    record: str | None = None
    traces: bool = False


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """All options that the user wrote.

    Attributes:
        adapter: options of the adapter.
        offload: the connectors and their options.
    """

    adapter: AdapterSettings
    offload: Offload | Sequence[Offload]

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any]) -> Self:
        """Read ``kv_connector_extra_config``. Raises ``ConfigError`` naming the key that is unknown or impossible."""
        own = declared(AdapterSettings).keys()
        with option_path("kv_connector_extra_config."):
            adapter = made(AdapterSettings, {key: extra_config[key] for key in own & extra_config.keys()})
            offload = parse_offload({key: value for key, value in extra_config.items() if key not in own}, beside=own)
            check_apart(offload)
        tenants = Tenants.of_environment()
        if isinstance(offload, Sequence):
            return cls(adapter, [_shared(child, tenants) for child in offload])
        return cls(adapter, _shared(offload, tenants))

    def of_replica(self, replica: int) -> Self:
        """The settings of one data-parallel replica, by its number from 0: disk tiers get a directory each."""
        if isinstance(self.offload, Sequence):
            return replace(self, offload=[_of_replica(child, replica) for child in self.offload])
        return replace(self, offload=_of_replica(self.offload, replica))

    def of_role(self, *, stores: bool) -> Self:
        """The settings of an engine in one of vLLM's roles: consumers store nothing."""
        return self if stores else self._with(read_only=True)

    def of_groups(self, groups: Sequence[KVCacheGroup]) -> Self:
        """The settings for a model: with recurrent states, chunks are single blocks.

        vLLM keeps a state where a step has ended with a block, and that is seldom where a chunk of several blocks ends.
        """
        is_whole = all(not _is_ours(child) or child.blocks_per_chunk == 1 for child in self._children)
        if is_whole or all(group.kind is not AttentionKind.RECURRENT for group in groups):
            return self
        return self._with(blocks_per_chunk=1)

    @property
    def load_timeout_s(self) -> float:
        """A connector is turned off if it has not ended a load after this time, or kept a request waiting for its answer."""
        return load_timeout_s(self.offload)

    @property
    def has_tiers(self) -> bool:
        """Whether something is kept that could outlive the server."""
        return any(True for _ in tiers_of(self.offload))

    @property
    def has_own_parts(self) -> bool:
        """Whether a custom connector, manager or transfers are used."""
        return any(not _is_ours(child) or child.manager or child.transfer for child in self._children)

    def require_packages(self) -> None:
        """Raise ``ConfigError`` where a package for a tier, or for traces, is not installed."""
        if self.adapter.traces:
            require_tracing()
        for path, tier, _ in tiers_of(self.offload):
            with option_path(f"kv_connector_extra_config.{path}"):
                require_packages(tier)

    def check_here(self, *, warns: bool) -> None:
        """Refuse what this machine has not, and files that cannot be written, without changing anything.

        Args:
            warns: whether to log a warning about host memory that is in use at the moment.

        Raises:
            ConfigError: naming the option.
        """
        with option_path("kv_connector_extra_config."):
            self.factory()
            check_memory(self.offload, warns=warns)
            for path, tier, _ in tiers_of(self.offload):
                with option_path(path):
                    check_place_here(tier)

    def require_unused(self, engine: str) -> None:
        """Raise ``ConfigError`` if an engine started with the same options uses a disk's files, and does not end in time.

        Args:
            engine: a digest of the options that decide which KV it is. Processes of this engine note it where they keep KV.
        """
        os.environ[ENGINE] = engine
        for path, tier, _ in tiers_of(self.offload):
            with option_path(f"kv_connector_extra_config.{path}"):
                tier.require_unused()

    def factory(self) -> KVConnectorFactory:
        """The factory that makes the connector. Raises ``ConfigError`` if the trace cannot be recorded."""
        factory = connector_factory(self.offload)
        if self.adapter.record is not None:
            factory = RecordingFactory(factory, self.adapter.record)
        return TracingFactory(factory) if self.adapter.traces else factory

    def _with(self, **options: Any) -> Self:
        children = [replace(child, **options) if _is_ours(child) else child for child in self._children]
        return replace(self, offload=children if isinstance(self.offload, Sequence) else children[0])

    @property
    def _children(self) -> Sequence[Offload]:
        return self.offload if isinstance(self.offload, Sequence) else [self.offload]


def _of_replica(offload: Offload, replica: int) -> Offload:
    if _is_ours(offload):
        return replace(offload, tiers=tuple(tier.of_replica(replica) for tier in offload.tiers))
    return offload


def _shared(offload: Offload, tenants: Tenants) -> Offload:
    """The options of a connector with the shares of the tenants that a front in vLLM's server keeps apart."""
    return tenants.shared(offload) if isinstance(offload, OffloadConfig) else offload


def _is_ours(offload: Offload) -> TypeGuard[OffloadConfig]:
    return isinstance(offload, OffloadConfig)
