"""Names in options: those that other systems use, and those of somebody else's connectors and tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cargohold import LLM, OffloadConfig
from cargohold.connector.offloading import OffloadConfig as EagerConfig
from cargohold.connector.options import parse_offload
from cargohold.errors import ConfigError
from cargohold.tiers import DiskTierConfig, SharedTierConfig
from examples.own_connector import shelf
from examples.own_tier.folder import FolderConfig
from tests.connector.strangers import ShelfFactory

HERE = "tests.connector.strangers"
TIER = {"kind": "disk", "directory": "/nvme/kv", "max_bytes": "200GiB"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"cpu_bytes_to_use": 10**10}, "cpu_bytes_to_use=10000000000 is not possible: here that is host_bytes, "),
        ({"cpu_bytes_to_use_per_rank": 10**9}, "host_bytes, for all workers together"),
        ({"host_bytes": 10000, "eviction_policy": "lru"}, "eviction_policy='lru' .* here that is policy, one of arc, "),
        (
            {"host_bytes": 10000, "block_size": 256},
            "blocks_per_chunk, which counts blocks of the device pool, not tokens",
        ),
        ({"host_bytes": 10000, "lazy_offload": True}, "here that is mode=lazy"),
        ({"host_bytes": 10000, "secondary_tiers": [{"type": "fs", "root_dir": "/kv"}]}, 'tiers=.*"kind": "disk"'),
        ({"host_bytes": 10000, "store_threshold": 2}, "admission=reused of a tier"),
        ({"host_bytes": 10000, "offload_prompt_only": False}, "store_generated, inverted"),
        (
            {"host_bytes": 10000, "spec_name": "TieringOffloadingSpec"},
            "connector=MODULE:FACTORY .* leave it out for ours",
        ),
        ({"lmcache.chunk_size": 256}, "lmcache.chunk_size=256 .* blocks_per_chunk"),
        ({"max_local_cpu_size": 5.0}, "host_bytes, .* not GB"),
        ({"mode": "multi", "connectors": [{"cpu_bytes_to_use": 1}]}, r"^connectors\[0\].cpu_bytes_to_use=1 "),
        ({"mode": "multi", "cpu_bytes_to_use": 1}, "^cpu_bytes_to_use=1 .* host_bytes"),
        (
            {"host_bytes": 10000, "tiers": [{"type": "fs"}]},
            r"^tiers\[0\].type='fs' .* here that is kind, one of disk, shared",
        ),
        (
            {"host_bytes": 10000, "tiers": [{"kind": "disk", "dir": "/kv"}]},
            r"^tiers\[0\].dir='/kv' .* directory of kind=disk",
        ),
        (
            {"host_bytes": 10000, "tiers": [{"kind": "disk", "path": "/kv"}]},
            r"^tiers\[0\].path='/kv' .* directory of kind",
        ),
        (
            {"host_bytes": 10000, "tiers": [{"kind": "shared", "url": "/mnt/kv"}]},
            r"^tiers\[0\].url='/mnt/kv' .* is written file:///mnt/kv",
        ),
        ({"host_bytes": 10000, "tiers": [{**TIER, "n_read_threads": 9}]}, "n_read_threads=9 .* num_threads"),
        (
            {"cpu_bytes_to_use": 1, "block_size": 64, "eviction_policy": "arc"},
            "^cpu_bytes_to_use=1 .*; block_size is blocks_per_chunk, .*; eviction_policy is policy, ",
        ),
    ],
)
def test_a_name_of_vllm_or_lmcache_is_refused_with_the_name_here(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_offload(options)


def test_secrets_below_a_name_from_elsewhere_are_not_shown() -> None:
    store = {"type": "obj", "store_config": {"secret_key": "hunter2"}}
    for options in ({"secondary_tiers": [store]}, {"host_bytes": 10000, "tiers": [{"store_config": store}]}):
        with pytest.raises(ConfigError, match="here that is") as raised:
            parse_offload(options)
        assert "hunter2" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"remote_url='redis://host:6379'"):
        parse_offload({"remote_url": "redis://:hunter2@host:6379"})


def test_no_option_of_ours_counts_as_a_name_from_elsewhere() -> None:
    ours = {field.name for field in fields(OffloadConfig)}
    assert ours.isdisjoint(OffloadConfig.names_elsewhere)
    for kind in (DiskTierConfig, SharedTierConfig):
        assert kind.names_elsewhere and {field.name for field in fields(kind)}.isdisjoint(kind.names_elsewhere)


def test_a_connector_of_ones_own_is_named_with_its_options() -> None:
    assert parse_offload({"connector": f"{HERE}:FACTORY"}) is shelf.FACTORY
    assert parse_offload({"connector": f"{HERE}:ShelfFactory"}) == ShelfFactory()
    assert parse_offload({"connector": f"{HERE}:ShelfFactory", "places": 9}) == ShelfFactory(places=9)
    made = parse_offload({"connector": f"{HERE}:make_shelf", "width": 80})
    assert not isinstance(made, Sequence) and hasattr(made, "make_scheduler_side")
    several = {
        "mode": "multi",
        "connectors": [{"host_bytes": 10000}, {"connector": f"{HERE}:ShelfFactory", "places": 2}],
    }
    assert parse_offload(several) == [EagerConfig(host_bytes=10000), ShelfFactory(places=2)]


def test_a_tier_of_ones_own_is_named_with_its_options() -> None:
    tier = {"kind": f"{HERE}:FolderConfig", "path": "/kv", "admission": "reused"}
    expected = OffloadConfig(host_bytes=10000, tiers=(FolderConfig(path="/kv", admission="reused"),))
    assert parse_offload({"host_bytes": 10000, "tiers": [tier]}) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"connector": 3}, "^connector=3 .* it must be MODULE:FACTORY"),
        ({"connector": "shelf"}, "^connector='shelf' .* it must be MODULE:FACTORY"),
        ({"connector": "no.such:Thing"}, "No module named 'no'.* installed or in PYTHONPATH"),
        ({"connector": f"{HERE}:Missing"}, "^connector='.*:Missing' .* has no attribute 'Missing'"),
        ({"connector": f"{HERE}:NUMBER"}, "it must be a KVConnectorFactory, or a callable that takes options"),
        ({"connector": f"{HERE}:make_nothing"}, "returned is of type int"),
        ({"connector": f"{HERE}:FACTORY", "places": 3}, "^places=3 .* takes no options"),
        ({"connector": f"{HERE}:ShelfFactory", "place": 3}, "^place=3 .* did you mean places"),
        ({"connector": f"{HERE}:ShelfFactory", "places": "3"}, "^places='3' .* an integer"),
        ({"connector": f"{HERE}:ShelfFactory", "places": 0}, "^places=0 .* from 1"),
        ({"connector": f"{HERE}:ShelfFactory", "label": ""}, r"^connector=.* \(ValueError: a shelf without a label\)"),
        ({"connector": f"{HERE}:make_shelf"}, "^connector=.* missing a required (keyword-only )?argument: 'width'"),
        ({"connector": f"{HERE}:make_shelf", "width": 1, "depth": 2}, "unexpected keyword argument 'depth'"),
        ({"connector": f"{HERE}:make_shelf", "width": 1, "colour": "pink"}, "RuntimeError: no such paint"),
        (
            {"mode": "multi", "connectors": [{"connector": f"{HERE}:ShelfFactory", "places": 0}]},
            r"^connectors\[0\].places=0 ",
        ),
        ({"host_bytes": 10000, "tiers": [{"kind": "no.such:Tier"}]}, r"^tiers\[0\].kind='no.such:Tier' .* PYTHONPATH"),
        (
            {"host_bytes": 10000, "tiers": [{"kind": f"{HERE}:ShelfFactory"}]},
            "derived from cargohold.tiers.TierConfig",
        ),
        ({"host_bytes": 10000, "tiers": [{"kind": "cargohold.tiers:TierConfig"}]}, "the class lacks open"),
        ({"host_bytes": 10000, "tiers": [{"kind": f"{HERE}:FolderConfig"}]}, r"^tiers\[0\].path=None .* must be given"),
        (
            {"host_bytes": 10000, "tiers": [{"kind": f"{HERE}:FolderConfig", "path": "x", "num_threads": 0}]},
            r"^tiers\[0\].num_threads=0 ",
        ),
        ({"host_bytes": 10000, "tiers": [{"kind": "tape"}]}, "one of disk, shared, or MODULE:CLASS"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_with_the_reason(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_offload(options)


def test_a_named_connector_and_a_named_tier_serve_the_embedded_engine(chat_model: str, tmp_path: Path) -> None:
    options = {
        "mode": "multi",
        "connectors": [
            {"connector": f"{HERE}:ShelfFactory", "places": 4},
            {"host_bytes": "4MiB", "tiers": [{"kind": f"{HERE}:FolderConfig", "path": str(tmp_path)}]},
        ],
    }
    with LLM(chat_model, offload=parse_offload(options), num_device_blocks=40) as llm:
        (output,) = llm.generate([list(range(3, 80))])
        names = llm.stats()
    assert output.error is None
    assert any("folder" in str(name) for name in names)
