"""Options from an untyped mapping: all of them can be given, and nothing else."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cargohold import HintConfig, OffloadConfig, TenantQuota
from cargohold.connector.factory import Offload, connector_factory
from cargohold.connector.options import parse_offload
from cargohold.errors import ConfigError
from cargohold.tiers import DiskTierConfig, SharedTierConfig


def test_the_default_is_eager() -> None:
    assert parse_offload({"host_bytes": "8MiB"}) == OffloadConfig(host_bytes="8MiB")


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_every_option_can_be_given(mode: str) -> None:
    config = OffloadConfig(mode=mode, host_bytes="8MiB")
    options = {field.name: getattr(config, field.name) for field in fields(OffloadConfig)}
    assert parse_offload(options) == config


def test_several_connectors_are_composed() -> None:
    children = [{"host_bytes": 10000}, {"mode": "lazy", "host_bytes": "8MiB", "lookahead_blocks": 3}]
    assert parse_offload({"mode": "multi", "connectors": children}) == [
        OffloadConfig(host_bytes=10000),
        OffloadConfig(mode="lazy", host_bytes="8MiB", lookahead_blocks=3),
    ]


def test_tiers_are_told_apart_by_their_kind() -> None:
    disk = {
        "kind": "disk",
        "directory": "/var/kv",
        "max_bytes": "9GiB",
        "admission": "reused",
        "max_daily_bytes": "1TB",
    }
    shared = {"kind": "shared", "url": "s3://bucket/kv", "write": "back"}
    assert parse_offload({"host_bytes": "8MiB", "tiers": [disk, shared], "restore": "always"}) == OffloadConfig(
        host_bytes="8MiB",
        tiers=(
            DiskTierConfig(directory="/var/kv", max_bytes="9GiB", admission="reused", max_daily_bytes="1TB"),
            SharedTierConfig(url="s3://bucket/kv", write="back"),
        ),
        restore="always",
    )


def test_hints_and_quotas_are_objects_of_their_own() -> None:
    hints = {"allow": "retain", "pin_fraction": 0.1, "allow_of": {"eve": "off"}}
    quota = {"tenant": "acme", "reserved": "10%", "hard": "1MiB"}
    assert parse_offload({"host_bytes": "8MiB", "hints": hints, "quotas": [quota]}) == OffloadConfig(
        host_bytes="8MiB",
        hints=HintConfig(allow="retain", pin_fraction=0.1, allow_of={"eve": "off"}),
        quotas=[TenantQuota(tenant="acme", reserved="10%", hard="1MiB")],
    )


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"host_bytes": "8MiB", "hints": {"allow": "some"}}, "hints.allow"),
        ({"host_bytes": "8MiB", "hints": {"pin_fraction": 2}}, "hints.pin_fraction"),
        ({"host_bytes": "8MiB", "hints": "all"}, "hints"),
        ({"host_bytes": "8MiB", "quotas": [{"tenant": "acme", "reserved": "200%"}]}, "quotas[0].reserved"),
        ({"host_bytes": "8MiB", "quotas": [{"reserved": "20%"}]}, "quotas[0].tenant"),
        ({"host_bytes": "8MiB", "quotas": ["acme"]}, "quotas[0]"),
        ({"host_bytes": "8MiB", "restore": "maybe"}, "restore"),
        ({"host_bytes": "8MiB", "restore_timeout_s": 0}, "restore_timeout_s"),
        ({"host_bytes": "8MiB", "tiers": "disk"}, "tiers"),
        ({"host_bytes": "8MiB", "tiers": ["disk"]}, "tiers[0]"),
        ({"host_bytes": "8MiB", "tiers": [{"directory": "/var/kv"}]}, "tiers[0].kind"),
        ({"host_bytes": "8MiB", "tiers": [{"kind": "tape"}]}, "tiers[0].kind"),
        ({"host_bytes": "8MiB", "tiers": [{"kind": "disk", "directory": "/var/kv"}]}, "tiers[0].max_bytes"),
        (
            {
                "host_bytes": "8MiB",
                "tiers": [{"kind": "disk", "directory": "/var/kv", "max_bytes": "9GiB", "admission": "some"}],
            },
            "tiers[0].admission",
        ),
        ({"host_bytes": "8MiB", "tiers": [{"kind": "shared", "url": "s3://kv", "write": "twice"}]}, "tiers[0].write"),
        ({"host_bytes": "8MiB", "tiers": [{"kind": "shared", "url": "ftp://kv"}]}, "tiers[0].url"),
        ({"mode": "lazy", "host_bytes": "8MiB", "tiers": {}}, "tiers"),
        ({}, "host_bytes"),
        ({"host_bytes": "8MiB", "polcy": "lru"}, "polcy"),
        ({"host_bytes": "8MiB", "mode": "fast"}, "mode"),
        ({"host_bytes": "8MiB", "mode": ["lazy"]}, "mode"),
        ({"host_bytes": "much"}, "host_bytes"),
        ({"host_bytes": None}, "host_bytes"),
        ({"host_bytes": True}, "host_bytes"),
        ({"host_bytes": "8MiB", "policy": 3}, "policy"),
        ({"host_bytes": "8MiB", "policy": "best"}, "policy"),
        ({"host_bytes": "8MiB", "blocks_per_chunk": "2"}, "blocks_per_chunk"),
        ({"host_bytes": "8MiB", "blocks_per_chunk": 0}, "blocks_per_chunk"),
        ({"host_bytes": "8MiB", "max_inflight_fraction": "half"}, "max_inflight_fraction"),
        ({"host_bytes": "8MiB", "store_generated": "no"}, "store_generated"),
        ({"mode": "eager", "host_bytes": "8MiB", "lookahead_blocks": 3}, "lookahead_blocks"),
        ({"mode": "multi"}, "connectors"),
        ({"mode": "multi", "connectors": []}, "connectors"),
        ({"mode": "multi", "connectors": {"host_bytes": 10000}}, "connectors"),
        ({"mode": "multi", "connectors": ["lazy"]}, "connectors[0]"),
        ({"mode": "multi", "connectors": [{"host_bytes": 10000}], "host_bytes": 10000}, "host_bytes"),
        ({"mode": "multi", "connectors": [{"host_bytes": 10000}, {"mode": "multi"}]}, "connectors[1].mode"),
        ({"mode": "multi", "connectors": [{"host_bytes": 10000}, {"host_bytes": "x"}]}, "connectors[1].host_bytes"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_offload(options)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"host_byte": 1}, r"host_byte=1 .* did you mean host_bytes\?"),
        ({"if_unsuported": "refuse"}, r"did you mean if_unsupported\?"),
        ({"mode": "multi", "connectors": [{"host_bytes": 10000}], "recrod": "x"}, "did you mean record"),
        ({"colour": "red"}, "there are blocks_per_chunk, guests, hints, host_bytes, if_unsupported, .* mode, "),
        ({"mode": "eager", "host_bytes": 10000, "lookahead_blocks": 3}, "no option of mode=eager"),
        ({"mode": "lazy", "host_bytes": 10000, "blocks_per_chunk": 2}, "no option of mode=lazy"),
    ],
)
def test_the_refusal_says_what_there_is(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_offload(options, beside=["if_unsupported", "record"])


def test_two_tiers_in_the_same_files_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    def disk(directory: Path, **options: Any) -> DiskTierConfig:
        return DiskTierConfig(directory=directory, max_bytes="1GiB", **options)

    (tmp_path / "link").symlink_to(tmp_path / "kv")
    eager = OffloadConfig(host_bytes="1MiB", tiers=[disk(tmp_path / "kv")])
    refused: list[Offload | list[Offload]] = [
        OffloadConfig(host_bytes="1MiB", tiers=[disk(tmp_path / "kv"), disk(tmp_path / "link")]),
        [eager, OffloadConfig(mode="lazy", host_bytes="1MiB", tiers=[disk(tmp_path / "kv")])],
    ]
    for offload in refused:
        with pytest.raises(ConfigError, match=r"directory='.*kv' is not possible: 2 tiers of this engine would use it"):
            connector_factory(offload)
    connector_factory([eager, OffloadConfig(host_bytes="1MiB", blocks_per_chunk=2, tiers=[disk(tmp_path / "kv")])])
    connector_factory([eager, OffloadConfig(host_bytes="1MiB", tiers=[disk(tmp_path / "other")])])


@pytest.mark.parametrize(
    ("disk", "url", "is_refused"),
    [
        ("kv", "kv", True),
        ("kv", "link", True),
        ("link", "kv", True),
        ("kv", "there/../kv", True),
        ("there/../kv/", "kv/.", True),
        ("link/../kv", "elsewhere/kv", True),
        ("~/kv", "kv", True),
        ("kv", "%6Bv", True),
        ("kv", "kv/shared", True),
        ("kv", "link/" + "0" * 32, True),
        ("kv/" + "0" * 32, "kv", True),
        ("kv/" + "0" * 32 + "/ab", "kv", True),
        ("kv/disk", "kv", False),
        ("kv", "kv2", False),
        ("kv/disk", "kv/shared", False),
    ],
)
def test_a_disk_and_a_shared_tier_in_the_same_files_are_refused_before_anything_is_loaded(
    tmp_path: Path, disk: str, url: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by review: the disk tier took the shared store's chunks for its own, and deleted them to make room."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("kv", "there", "elsewhere/there"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere/there" if ".." in disk else tmp_path / "kv")
    directory = disk if disk.startswith("~") else tmp_path / disk
    below = DiskTierConfig(directory=directory, max_bytes="1GiB")
    shared = SharedTierConfig(url=f"FILE://{tmp_path}/{url}")
    engines: list[Offload | list[Offload]] = [
        OffloadConfig(host_bytes="1MiB", tiers=[below, shared]),
        OffloadConfig(mode="lazy", host_bytes="1MiB", tiers=[shared, below]),
        [
            OffloadConfig(host_bytes="1MiB", blocks_per_chunk=2, tiers=[shared]),
            OffloadConfig(mode="lazy", host_bytes="1MiB", tiers=[below]),
        ],
    ]
    for offload in engines:
        if is_refused:
            with pytest.raises(ConfigError, match=r"the shared tier of this engine in .* conflicts with it") as caught:
                connector_factory(offload)
            assert caught.value.key in ("tiers[0].directory", "tiers[1].directory", "connectors[1].tiers[0].directory")
        else:
            connector_factory(offload)
    remote = SharedTierConfig(url="redis://host:6379/0")
    connector_factory(OffloadConfig(host_bytes="1MiB", tiers=[below, remote]))


def test_the_home_directory_is_the_same_by_either_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tiers = [DiskTierConfig(directory=name, max_bytes="1GiB") for name in ("~/kv", tmp_path / "kv")]
    with pytest.raises(ConfigError, match="2 tiers of this engine would use it"):
        connector_factory(OffloadConfig(host_bytes="1MiB", tiers=tiers))
