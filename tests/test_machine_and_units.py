"""Sizes as people write them, and what a machine or its control group allows."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold import LLM, ConfigError, DiskTierConfig, OffloadConfig, SharedTierConfig, TenantQuota
from cargohold.engine.model.files import cache_dir
from cargohold.option_values import format_bytes, parse_bytes
from cargohold.process import allow_open_files, available_memory_bytes, memory_limit_bytes
from cargohold.tiers.kinds import open_inventory

TOTAL = psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (1000000, 1000000),
        ("1000000", 1000000),
        ("2GiB", 2 * 1024**3),
        ("512 MiB", 512 * 1024**2),
        ("1.5GB", 1_500_000_000),
        ("0.1KiB", 102),
        ("3kb", 3000),
        ("1TiB", 1024**4),
    ],
)
def test_sizes_as_people_write_them(written: int | str, expected: int) -> None:
    assert parse_bytes("host_bytes", written) == expected


@pytest.mark.parametrize(
    "written",
    [
        "lots",
        "",
        "2 apples",
        "-1GiB",
        "GiB",
        "1.2.3MB",
        -5,
        0,
        "0GiB",
        2.5,
        True,
        None,
        [1],
        "9" * 5000,
        f"{'9' * 5000}GiB",
    ],
)
def test_what_is_no_size_is_refused_with_an_example(written: Any) -> None:
    with pytest.raises(ConfigError, match=r"host_bytes=.* is not possible: .* such as 2GiB") as raised:
        parse_bytes("host_bytes", written)
    assert raised.value.key == "host_bytes" and raised.value.value == written


@pytest.mark.parametrize("written", ["2G", "1PiB", "10 M"])
def test_units_that_there_are_not_are_told_of_those_that_there_are(written: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_bytes("host_bytes", written)
    assert "the units are B, KB, MB, GB, TB (1000 bytes and so on) and KiB, MiB, GiB, TiB" in raised.value.expected


@pytest.mark.parametrize(
    ("make", "key", "meant"),
    [
        (lambda: OffloadConfig(host_bytes="8"), "host_bytes", "8GiB"),
        (lambda: OffloadConfig(host_bytes=8), "host_bytes", "8GiB"),
        (lambda: OffloadConfig(host_bytes="1.5 B"), "host_bytes", "1.5GiB"),
        (lambda: DiskTierConfig(directory="/kv", max_bytes=200), "max_bytes", "200GiB"),
        (lambda: DiskTierConfig(directory="/kv", max_bytes="1GiB", reserve_bytes=10), "reserve_bytes", "10GiB"),
        (lambda: DiskTierConfig(directory="/kv", max_bytes="1GiB", max_daily_bytes=500), "max_daily_bytes", "500GiB"),
        (lambda: SharedTierConfig(url="file:///kv", max_bytes="500"), "max_bytes", "500GiB"),
        (lambda: TenantQuota(tenant="ann", reserved=4), "reserved", "4GiB"),
    ],
)
def test_a_size_that_holds_no_chunk_is_refused_with_the_unit_that_was_meant(
    make: Callable[[], object], key: str, meant: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{key}=.* that is smaller than any chunk of KV; did you mean {meant}\?"
    ) as raised:
        make()
    assert raised.value.key == key


def test_a_size_with_a_unit_is_refused_without_a_guess() -> None:
    with pytest.raises(ConfigError, match=r"that is smaller than any chunk of KV$"):
        OffloadConfig(host_bytes="3KiB")


def test_a_unit_that_is_cut_short_is_told_in_full() -> None:
    with pytest.raises(ConfigError, match=r"host_bytes='8G' .* write 8GiB or 8GB"):
        parse_bytes("host_bytes", "8G")


@given(st.integers(1, 2**60))
def test_formatted_sizes_are_near_what_they_mean(num_bytes: int) -> None:
    assert parse_bytes("x", format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.051)


def system(root: Path, cgroup: str, limits: dict[str, str]) -> Path:
    """A file system that says which control group this process is in, and what the groups allow."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup, encoding="utf-8")
    for path, text in limits.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")
    return root


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected"),
    [
        ("0::/\n", {}, TOTAL),
        ("0::/\n", {"memory.max": "1000000\n"}, 1000000),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "2000000\n"}, 2000000),
        ("0::/a/b\n", {"a/b/memory.max": "3000000\n", "a/memory.max": "2000000\n"}, 2000000),
        ("0::/a/b\n", {"a/b/memory.max": f"{TOTAL * 2}\n"}, TOTAL),
        ("4:cpu:/x\n9:memory:/docker/abc\n", {"memory/docker/abc/memory.limit_in_bytes": "4000000\n"}, 4000000),
        ("4:cpu,memory:/x\n", {"memory/memory.limit_in_bytes": "5000000\n"}, 5000000),
        ("4:cpu:/x\n", {"memory/x/memory.limit_in_bytes": "5000000\n"}, TOTAL),
    ],
)
def test_the_lowest_limit_of_all_control_groups_counts(
    cgroup: str, limits: dict[str, str], expected: int, tmp_path: Path
) -> None:
    assert memory_limit_bytes(system(tmp_path, cgroup, limits)) == expected


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        (
            "0::/a\n",
            {"memory.max": "9000", "memory.current": "8000", "memory.stat": "active_file 30\ninactive_file 4\n"},
            1034,
        ),
        (
            "0::/a\n",
            {"memory.max": "max", "memory.current": "8000", "memory.stat": "active_file 3\ninactive_file 4\n"},
            None,
        ),
        (
            "9:memory:/a\n",
            {
                "memory.limit_in_bytes": "9000",
                "memory.usage_in_bytes": "9500",
                "memory.stat": "active_file 1\ntotal_active_file 30\ntotal_inactive_file 4\n",
            },
            0,
        ),
    ],
)
def test_what_is_free_is_what_the_narrowest_group_leaves(
    cgroup: str, files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    """What only caches files counts as free: the weights that an engine has just read fill a container with such files."""
    folder = "memory/a" if cgroup.startswith("9") else "a"
    root = system(tmp_path, cgroup, {f"{folder}/{name}": text for name, text in files.items()})
    free = available_memory_bytes(root)
    assert free == expected if expected is not None else 9000 < free <= TOTAL


def test_where_there_are_no_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert memory_limit_bytes(tmp_path) == TOTAL


def test_more_than_the_control_group_allows_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, chat_model: str
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("weights were loaded before the error was found")

    monkeypatch.setattr("cargohold.engine.model.hf_runner.load_model", load)
    for module in ("cargohold.connector.offloading.factory", "cargohold.engine.config"):
        monkeypatch.setattr(f"{module}.memory_limit_bytes", lambda: 64 * 1024**2)
    with pytest.raises(ConfigError, match=r"host_bytes='1GiB' .* this machine allows 64 MiB in all"):
        LLM(chat_model, offload=OffloadConfig(host_bytes="1GiB"))
    with pytest.raises(
        ConfigError, match=r"num_device_blocks=50000 .* this machine allows 64 MiB in all; use at most \d+"
    ):
        LLM(chat_model, num_device_blocks=50000)


def test_a_user_without_a_home_is_told_what_to_set(chat_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by running it as a user whom the system does not know, as containers do."""

    def unknown(_uid: int) -> NoReturn:
        raise KeyError

    for name in ("HOME", "XDG_CACHE_HOME", "CARGOHOLD_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    disk = OffloadConfig(host_bytes="1MiB", tiers=[DiskTierConfig(directory="~/kv", max_bytes="1MiB")])
    places: dict[str, Callable[[], object]] = {
        "CARGOHOLD_CACHE_DIR='~'": cache_dir,
        "model='~/model'": lambda: LLM("~/model"),
        r"tiers\[0\].directory='~/kv'": lambda: LLM(chat_model, num_device_blocks=8, offload=disk),
        "PLACE='~/kv'": lambda: open_inventory("~/kv"),
    }
    for place, use in places.items():
        with pytest.raises(ConfigError, match=f"{place} .* set HOME"):
            use()
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_dir() == Path("/cache/cargohold")


@pytest.mark.parametrize(
    ("soft", "hard", "allowed", "then"),
    [
        (1024, 4096, 2000, 2000),
        (1024, 1500, 1500, 1500),
        (1024, resource.RLIM_INFINITY, 2000, 2000),
        (4096, 4096, 2000, 4096),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 2000, resource.RLIM_INFINITY),
    ],
)
def test_as_many_files_may_be_open_as_the_system_allows(
    soft: int, hard: int, allowed: int, then: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the usual limit of 1,024 files, 1,024 connections leave none, and nobody is let in any more."""
    limits = [soft, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(None), new))
    assert allow_open_files(2000) == allowed
    assert limits == [then, hard]
