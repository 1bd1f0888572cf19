"""Options are refused by the name under which the user wrote them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cargohold.connector.config import HINTS_OFF, HintConfig
from cargohold.connector.offloading import OffloadConfig
from cargohold.connector.tenants import UNKNOWN
from cargohold.errors import ConfigError
from cargohold.integrations.vllm.settings import VllmSettings
from cargohold.tiers import DiskTierConfig, SharedTierConfig


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ({}, "host_bytes"),
        ({"host_bytes": "1GiB", "polcy": "lru"}, "polcy"),
        ({"host_bytes": "1GiB", "policy": "mru"}, "policy"),
        ({"host_bytes": "a lot"}, "host_bytes"),
        ({"host_bytes": "1GiB", "blocks_per_chunk": "2"}, "blocks_per_chunk"),
        ({"host_bytes": "1GiB", "if_unsupported": "shrug"}, "if_unsupported"),
        ({"host_bytes": "1GiB", "load_failure_policy": "retry"}, "load_failure_policy"),
        ({"host_bytes": "1GiB", "load_timeout_s": 5}, "load_timeout_s"),
        ({"host_bytes": "1GiB", "follow_weights": "check"}, "follow_weights"),
        ({"host_bytes": "1GiB", "follow_resets": False}, "follow_resets"),
        ({"mode": "multi", "connectors": [{"host_bytes": "1GiB", "lookahead": 3}]}, "connectors[0].lookahead"),
    ],
)
def test_what_cannot_be_is_refused_by_name(extra: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        VllmSettings.parse(extra)
    assert caught.value.key == f"kv_connector_extra_config.{key}"


@pytest.mark.parametrize(
    ("tier", "module", "extra"),
    [
        ({"kind": "shared", "url": "redis://localhost"}, "cargohold.tiers.stores.redis", "redis"),
        ({"kind": "shared", "url": "s3://bucket/kv"}, "cargohold.tiers.stores.objects", "objects"),
        (
            {"kind": "disk", "directory": "/not/made", "max_bytes": "1GiB", "encryption_key": "env:NOT_SET_HERE"},
            "cryptography.hazmat.primitives.ciphers.aead",
            "encryption",
        ),
    ],
)
def test_a_package_that_is_missing_is_told_without_touching_a_medium(
    tier: dict[str, Any], module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: inside vLLM, workers told it, once they had loaded the model."""
    options: dict[str, Any] = {"host_bytes": "1GiB", "tiers": [tier]}
    for given in (options, {"mode": "multi", "connectors": [{**options, "mode": "lazy"}]}):
        settings = VllmSettings.parse(given)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)  # its import fails
            with pytest.raises(ConfigError, match=rf"pip install 'cargohold\[{extra}\]'"):
                settings.require_packages()
    VllmSettings.parse({"host_bytes": "1GiB"}).require_packages()


def test_data_parallel_replicas_have_disks_of_their_own() -> None:
    """Found by trying: the second replica found the first one's directory locked, and the server did not start."""
    disk = {"kind": "disk", "directory": "/var/kv", "max_bytes": "1GiB"}
    shared = {"kind": "shared", "url": "redis://localhost"}
    for extra in (
        {"host_bytes": "1GiB", "tiers": [disk, shared]},
        {"mode": "multi", "connectors": [{"mode": "lazy", "host_bytes": "1GiB", "tiers": [disk, shared]}]},
    ):
        first = VllmSettings.parse(extra)
        assert first.has_tiers
        assert first.of_replica(0) == first, "existing directories stay valid"
        offload = first.of_replica(2).offload
        config = offload[0] if isinstance(offload, Sequence) else offload
        assert isinstance(config, OffloadConfig)
        own, common = config.tiers
        assert isinstance(own, DiskTierConfig)
        assert own.directory == Path("/var/kv/replica-2")
        assert isinstance(common, SharedTierConfig)
        assert common.url == "redis://localhost"
    assert not VllmSettings.parse({"host_bytes": "1GiB"}).has_tiers


def test_options_of_adapter_and_connector_lie_side_by_side() -> None:
    settings = VllmSettings.parse({"host_bytes": "1GiB", "if_unsupported": "refuse", "blocks_per_chunk": 4})
    assert settings.adapter.if_unsupported == "refuse"
    of_strangers = HintConfig(allow_of={UNKNOWN: HINTS_OFF})  # tenants of a front that this server does not know
    assert settings.offload == OffloadConfig(host_bytes="1GiB", blocks_per_chunk=4, hints=of_strangers)
