"""A shared tier on Mooncake at the start, without its package: what it needs, and which options it has."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cargohold.errors import ConfigError
from cargohold.tiers import SharedTierConfig, check_place_here, check_tier
from cargohold.tiers.kinds import open_inventory

URL = "mooncake://master:50051"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"url": "mooncake://master"}, "mooncake://master:50051"),
        ({"url": "mooncake://:50051"}, "mooncake://master:50051"),
        ({"url": "mooncake://master:50051/0"}, "mooncake://master:50051"),
        ({"url": "mooncake:master:50051"}, "mooncake://master:50051"),
        ({"url": URL, "ttl_s": 5}, "ttl_s"),
        ({"url": URL, "max_bytes": "1GiB"}, "memory that machines lend"),
        ({"url": URL, "protocol": "smoke"}, "tcp, rdma"),
        ({"url": URL, "lend_bytes": "much"}, "lend_bytes"),
        ({"url": "redis://host", "lend_bytes": "1GiB"}, "only mooncake"),
        ({"url": "s3://bucket", "devices": "mlx5_0"}, "only mooncake"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        SharedTierConfig(**options)


@pytest.mark.skipif(find_spec("mooncake") is not None, reason="the package is there")
def test_without_the_package_the_extra_is_named() -> None:
    for attempt in (
        lambda: check_place_here(SharedTierConfig(url=URL)),
        lambda: check_tier(SharedTierConfig(url=URL), [100], 1),
        lambda: open_inventory(URL),
    ):
        with pytest.raises(ConfigError, match=r"cargohold\[mooncake\]"):
            attempt()


@pytest.mark.parametrize(
    ("library", "remedy"),
    [
        ("libibverbs.so.1", "apt-get install libibverbs1"),
        ("libcurl.so.4", "apt-get install libcurl4"),
        ("libm.so", "libm.so"),
    ],
)
def test_a_missing_library_names_its_debian_package(
    library: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    text = f"{library}: cannot open shared object file: No such file or directory"
    (package / "store.py").write_text(f"raise ImportError({text!r})")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(ConfigError, match=remedy):
        check_place_here(SharedTierConfig(url=f"mooncake://{library}:50051"))
