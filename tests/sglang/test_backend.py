"""What SGLang may ask of a storage, of its options, and of its ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.plugins.hook_registry import HookRegistry

from cargohold.errors import ConfigError
from cargohold.integrations.sglang import plugin
from cargohold.integrations.sglang.backend import CargoholdStorage
from cargohold.integrations.sglang.identity import Identity
from cargohold.integrations.sglang.pages import FlatPages, MarkerPages, RangePages, pages_of
from cargohold.tiers.kinds import open_inventory
from tests.sglang.host import (
    Host,
    configured,
    disk,
    extra_config,
    with_backend,
    write_model,
)

Start = Callable[..., Host]
KEYS = [f"{number:064x}" for number in range(1, 9)]


def a_config(**options: Any) -> HiCacheStorageConfig:
    usual: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": False,
        "model_name": "a model",
    }
    return HiCacheStorageConfig(**{**usual, **options})


@contextmanager
def storage_on(
    pools: dict[str, Any], config: HiCacheStorageConfig, *tiers: dict[str, Any], **options: Any
) -> Iterator[CargoholdStorage]:
    """A storage that was registered as SGLang does it."""
    extra = {key: value for key, value in extra_config(*tiers, **options).items() if "prefetch" not in key}
    extra.pop("hicache_storage_pass_prefix_keys")
    storage = StorageBackendFactory.create_backend("dynamic", replace(config, extra_config=extra), None)
    assert isinstance(storage, CargoholdStorage)
    storage.register_mem_pool_host(pools["kv"])
    for name, pool in pools.items():
        storage.register_mem_host_pool_v2(pool, PoolName(name))
    storage.on_host_pools_registered()
    try:
        yield storage
    finally:
        storage.close()


class StatePool:
    """A pool of states, one slot per page."""

    layout, page_size, size, dtype = "page_first_direct", 1, 64, torch.uint8

    def __init__(self) -> None:
        self.states = torch.zeros(self.size, 96, dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        return [self.states[index].data_ptr() for index in indices.tolist()], [96] * len(indices)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(96, dtype=torch.uint8)


@pytest.fixture
def host(start: Start) -> Host:
    return start()


@pytest.fixture
def pools(host: Host) -> dict[str, Any]:
    return {"kv": host.cache.cache_controller.storage_host_pool, "mamba": StatePool()}


def fill(pools: dict[str, Any], keys: list[str]) -> torch.Tensor:
    """Put something into the pages of attention that stand for keys; return their slots."""
    pools["kv"].kv_buffer.copy_(torch.randn(pools["kv"].kv_buffer.shape))
    return torch.arange(4 * len(keys))


def test_pages_are_found_from_the_first_on_and_come_back_in_place(pools: dict[str, Any], tmp_path: Path) -> None:
    with storage_on(pools, a_config(), disk(tmp_path / "a")) as storage:
        slots = fill(pools, KEYS)
        assert storage.batch_set_v1(KEYS[:5], slots[:20]) == [True] * 5
        assert storage.batch_exists(KEYS) == 5 and storage.batch_exists(KEYS[4:]) == 1
        assert storage.exists(KEYS[0]) and not storage.exists(KEYS[6])
        expected = [pools["kv"].get_data_page(4 * page) for page in range(5)]
        pools["kv"].kv_buffer.zero_()
        assert storage.batch_get_v1(KEYS[:6], slots[:24]) == [True] * 5 + [False]
        assert all(torch.equal(pools["kv"].get_data_page(4 * page), expected[page]) for page in range(5))
        assert storage.batch_get_v1(KEYS[:2], slots[:7]) == [False] * 2  # not whole pages
        stats = storage.get_stats()
        assert stats is not None and (stats.backup_pgs, stats.prefetch_pgs) == ([5], [5])
        assert stats.backup_bandwidth[0] > 0
        later = storage.get_stats()
        assert later is not None and later.prefetch_pgs == []


def test_a_prefix_is_restorable_where_every_pool_has_its_part(pools: dict[str, Any], tmp_path: Path) -> None:
    with storage_on(pools, a_config(), disk(tmp_path / "a")) as storage:
        slots = fill(pools, KEYS)
        storage.batch_set_v1(KEYS[:6], slots[:24])
        at = torch.tensor([3, 4])
        pools["mamba"].states[at] = torch.arange(2, dtype=torch.uint8)[:, None] + 1
        states = PoolTransfer(PoolName.MAMBA, at, keys=[KEYS[1], KEYS[4]])
        assert storage.batch_set_v2([states]) == {PoolName.MAMBA: [True, True]}
        wanted = PoolTransfer(PoolName.MAMBA, keys=KEYS[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        result = storage.batch_exists_v2(KEYS, [wanted])
        assert (result.kv_hit_pages, result.restorable_prefix_pages) == (5, [2, 5])
        assert result.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.MAMBA: 5}
        window = replace(wanted, keys=KEYS[-2:])
        assert storage.batch_exists_v2(KEYS, [window]).kv_hit_pages == 0
        whole = PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.ALL_PAGES)
        assert storage.batch_exists_v2(KEYS, [whole]).restorable_prefix_pages == []
        assert storage.batch_exists_v2(KEYS).restorable_prefix_pages == [1, 2, 3, 4, 5, 6]
        unknown = PoolTransfer(PoolName.DRAFT, hit_policy=PoolHitPolicy.ALL_PAGES)
        assert storage.batch_exists_v2(KEYS, [unknown]).kv_hit_pages == 0
        groups = PoolTransfer(PoolName.DRAFT, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
        assert storage.batch_exists_v2(KEYS, [groups]).kv_hit_pages == 6
        pools["mamba"].states.zero_()
        into = PoolTransfer(PoolName.MAMBA, torch.tensor([7]), keys=[KEYS[4]])
        assert storage.batch_get_v2([into]) == {PoolName.MAMBA: [True]}
        assert pools["mamba"].states[7].tolist() == [2] * 96


def test_a_pool_that_is_registered_later_has_its_place(pools: dict[str, Any], tmp_path: Path) -> None:
    with storage_on({"kv": pools["kv"]}, a_config(), disk(tmp_path / "a")) as storage:
        storage.register_mem_host_pool_v2(pools["mamba"], PoolName.MAMBA)
        assert storage.batch_set_v2([PoolTransfer(PoolName.MAMBA, torch.tensor([1]), keys=KEYS[:1])]) == {
            "mamba": [True]
        }


def test_clearing_deletes_what_the_engine_may_find_and_nothing_else(pools: dict[str, Any], tmp_path: Path) -> None:
    places = (disk(tmp_path / "a"), {"kind": "shared", "url": f"file://{tmp_path}/b"})
    slots = fill(pools, KEYS)
    with storage_on(pools, a_config(model_name="other", tp_size=2), *places) as other:
        other.batch_set_v1(KEYS, slots)
    with storage_on(pools, a_config(), *places) as storage:
        storage.batch_set_v1(KEYS, slots)
        storage.clear()
        assert storage.batch_exists(KEYS) == 0
        assert storage.batch_set_v1(KEYS, slots) == [True] * 8 and storage.batch_exists(KEYS) == 8
        for place in (str(tmp_path / "a"), f"file://{tmp_path}/b"):
            kept = [holding for holding in open_inventory(place).holdings() if holding.num_chunks]
            assert sorted(holding.facts.get("label", "") for holding in kept) == ["a model", "other"]
    with storage_on(pools, a_config(model_name="other", tp_size=2), *places) as other:
        assert other.batch_exists(KEYS) == 8


def test_the_second_tier_is_asked_for_what_the_first_has_lost(pools: dict[str, Any], tmp_path: Path) -> None:
    first, second = disk(tmp_path / "a"), {"kind": "shared", "url": f"file://{tmp_path}/b"}
    slots = fill(pools, KEYS)
    with storage_on(pools, a_config(), first, second) as storage:
        assert storage.batch_set_v1(KEYS, slots) == [True] * 8
    with storage_on(pools, a_config(), disk(tmp_path / "c"), second) as storage:
        assert storage.batch_exists(KEYS) == 8
        expected = pools["kv"].kv_buffer.clone()
        pools["kv"].kv_buffer[:, :8] = 0
        assert storage.batch_get_v1(KEYS, slots) == [True] * 8
        assert torch.equal(pools["kv"].kv_buffer, expected)


def test_code_of_models_from_elsewhere_counts(
    pools: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: a model of a package of the user's that was mended found what it had computed before."""
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "models_of_ours")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "models_of_ours").mkdir()
    pages, ids = pages_of("kv", pools["kv"]), set()
    for contents in ("", "pass"):
        (tmp_path / "models_of_ours" / "model.py").write_text(contents)
        ids.add(Identity(a_config()).namespace("kv", pages).id)
    assert len(ids) == 2


def test_scales_of_a_quantized_cache_count_by_their_contents(group: None, tmp_path: Path) -> None:
    """Found by reading: the file's name counted, and other scales under it had KV of the former ones restored."""
    scales, ids = tmp_path / "scales.json", set()
    for contents in ("{}", '{"changed": 1}'):
        scales.write_text(contents)
        extra = with_backend("dynamic", extra_config(disk(tmp_path / "kv")))
        with configured(write_model(tmp_path / "model"), quantization_param_path=str(scales), **extra) as args:
            host = Host("attention", args)
            pages = pages_of("kv", host.cache.cache_controller.storage_host_pool)
            ids.add(Identity(a_config()).namespace("kv", pages).id)
            host.close()
    assert len(ids) == 2


def test_what_is_kept_is_listed_and_verified_by_the_inventory(pools: dict[str, Any], tmp_path: Path) -> None:
    with storage_on(pools, a_config(), disk(tmp_path / "a")) as storage:
        storage.batch_set_v1(KEYS, fill(pools, KEYS))
    of_pools = {
        holding.facts["layout"].split(":")[0]: holding for holding in open_inventory(str(tmp_path / "a")).holdings()
    }
    assert {name: holding.num_chunks for name, holding in of_pools.items()} == {"pool kv": 8, "pool mamba": 0}
    assert of_pools["pool kv"].facts["label"] == "a model"


# --- forms of pages ---------------------------------------------------------------------------------------------------


def test_a_pool_that_does_not_tell_where_its_bytes_are_is_kept_by_flat_pages(
    pools: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(pages_of("kv", pools["kv"]), RangePages)

    def unsupported(indices: torch.Tensor) -> None:
        raise NotImplementedError

    monkeypatch.setattr(pools["kv"], "get_page_buffer_meta", unsupported)
    assert isinstance(pages_of("kv", pools["kv"]), FlatPages)
    with storage_on(pools, a_config(), disk(tmp_path / "a")) as storage:
        slots = fill(pools, KEYS)
        assert all(storage.batch_set_v1(KEYS, slots))
        expected = pools["kv"].kv_buffer.clone()
        pools["kv"].kv_buffer[:, :8] = 0
        assert all(storage.batch_get_v1(KEYS, slots)) and torch.equal(pools["kv"].kv_buffer, expected)


def test_pages_in_another_form_are_other_pages(pools: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    in_ranges = Identity(a_config()).namespace("kv", pages_of("kv", pools["kv"]))
    monkeypatch.setattr(pools["kv"], "get_page_buffer_meta", lambda indices: None)
    flat = Identity(a_config()).namespace("kv", pages_of("kv", pools["kv"]))
    assert in_ranges.id != flat.id


def test_ranges_that_leave_out_a_part_of_the_page_are_not_used(
    pools: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pools["kv"].get_page_buffer_meta(torch.arange(4))
    monkeypatch.setattr(pools["kv"], "get_page_buffer_meta", lambda indices: (whole[0][:1], whole[1][:1]))
    assert isinstance(pages_of("kv", pools["kv"]), FlatPages)


def test_an_anchor_without_bytes_is_marked_and_a_pool_that_offers_nothing_is_refused(pools: dict[str, Any]) -> None:
    class Anchor(StatePool):
        def get_dummy_flat_data_page(self) -> torch.Tensor:
            return torch.empty(0, dtype=torch.uint8)

    class Closed(StatePool):
        def get_dummy_flat_data_page(self) -> torch.Tensor:
            raise NotImplementedError

        def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
            raise ValueError

    assert isinstance(pages_of("kv", Anchor()), MarkerPages)
    with pytest.raises(ConfigError, match="--hicache-mem-layout"):
        pages_of("kv", Closed())


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_every_rank_has_pages_of_its_own_and_latent_attention_one_for_all(pools: dict[str, Any]) -> None:
    pages = pages_of("kv", pools["kv"])

    def ids(name: str = "kv", **options: Any) -> set[str]:
        ranks = [{"tp_rank": tp, "pp_rank": pp, "attn_cp_rank": cp} for tp in (0, 1) for pp in (0, 1) for cp in (0, 1)]
        sizes = {"tp_size": 2, "pp_size": 2, "attn_cp_size": 2}
        return {Identity(a_config(**rank, **sizes, **options)).namespace(name, pages).id for rank in ranks}

    assert len(ids()) == 8
    assert len(ids(is_mla_model=True)) == 4
    assert len(ids("mamba", is_mla_model=True)) == 8
    assert ids().isdisjoint(ids(is_mla_model=True))
    assert not ids() & {Identity(a_config()).namespace("kv", pages).id}


def test_one_rank_writes_latent_attention_and_all_read_it_from_a_shared_tier(
    pools: dict[str, Any], tmp_path: Path
) -> None:
    shared = {"kind": "shared", "url": f"file://{tmp_path}/b"}
    first, second = (a_config(is_mla_model=True, tp_size=2, tp_rank=rank) for rank in (0, 1))
    slots = fill(pools, KEYS)
    with storage_on(pools, first, shared) as writer, storage_on(pools, second, shared) as reader:
        writer.batch_set_v1(KEYS, slots)
        assert reader.batch_exists(KEYS) == 8 and all(reader.batch_get_v1(KEYS, slots))
        state = PoolTransfer(PoolName.MAMBA, torch.tensor([1]), keys=KEYS[:1])
        writer.batch_set_v2([state])
        assert reader.batch_get_v2([state]) == {"mamba": [False]}
    with (
        pytest.raises(ConfigError, match="serves one process only; use a shared tier"),
        storage_on(pools, second, disk(tmp_path / "a")),
    ):
        pass


# --- options and obstacles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"tiers": []}, "tiers"),
        ({"tires": []}, "tires"),
        ({"interface_v1": 0}, "interface_v1"),
        ({"load_timeout_s": 0}, "load_timeout_s"),
        ({"store_timeout_s": 60}, "store_timeout_s"),
        ({"tiers": [disk(Path("/kv"), admission="reused")]}, "tiers[0].admission"),
        ({"tiers": [disk(Path("/kv"), max_daily_bytes="1GiB")]}, "tiers[0].max_daily_bytes"),
        ({"tiers": [disk(Path("/kv"), polciy="lru")]}, "tiers[0].polciy"),
    ],
)
def test_options_that_cannot_work_are_named(options: dict[str, Any], key: str) -> None:
    extra = {**extra_config(disk(Path("/kv"))), **options}
    for of_sglang in ("hicache_storage_pass_prefix_keys", "prefetch_threshold"):
        extra.pop(of_sglang)
    with pytest.raises(ConfigError) as refused:
        CargoholdStorage(a_config(extra_config=extra))
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"enable_lora": True}, "LoRA"),
        ({"load_format": "remote"}, "--load-format remote"),
        ({"custom_weight_loader": ["a.b"]}, "--custom-weight-loader"),
    ],
)
def test_what_could_be_another_model_after_a_restart_is_refused_for_that_reason(
    pools: dict[str, Any], tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    from sglang.srt.runtime_context import get_context  # noqa: PLC0415  # after the stand-ins

    get_context().override("test", **changes)
    with pytest.raises(ConfigError, match=reason), storage_on(pools, a_config(), disk(tmp_path / "a")):
        pass


def watched_since() -> float | None:
    return plugin.watch.began_s


def test_weights_that_are_changed_in_place_end_the_use_of_what_is_stored(
    pools: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SchedulerWeightUpdaterManager:
        def update(self, request: str) -> str:
            return f"{request} done"

        update_weights_from_disk = update_weights_from_distributed = update_weights_from_tensor = update
        update_weights_from_ipc = update

    updaters = ModuleType("sglang.srt.managers.scheduler_components.weight_updater")
    updaters.SchedulerWeightUpdaterManager = SchedulerWeightUpdaterManager  # type: ignore[attr-defined]  # a stand-in
    monkeypatch.setitem(sys.modules, updaters.__name__, updaters)
    monkeypatch.setattr(
        sys.modules["sglang.srt.managers"], "scheduler_components", ModuleType("components"), raising=False
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler_components", ModuleType("components"))
    sys.modules["sglang.srt.managers.scheduler_components"].weight_updater = updaters  # type: ignore[attr-defined]  # see above
    with storage_on(pools, a_config(), disk(tmp_path / "a")) as storage:
        slots = fill(pools, KEYS)
        storage.batch_set_v1(KEYS, slots)
        monkeypatch.setattr(plugin.watch, "began_s", None)
        plugin.register()
        assert watched_since() is None  # no scheduler is in this process
        monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", ModuleType("scheduler"))
        plugin.register()
        HookRegistry.apply_hooks()
        try:
            assert watched_since() is not None and storage.batch_exists(KEYS) == 8
            assert SchedulerWeightUpdaterManager().update_weights_from_tensor("it") == "it done"
            assert storage.batch_exists(KEYS) == 0
            assert storage.batch_get_v1(KEYS, slots) == storage.batch_set_v1(KEYS, slots) == [False] * 8
        finally:
            HookRegistry.reset()
    with (
        pytest.raises(ConfigError, match="update_weights_from_tensor"),
        storage_on(pools, a_config(), disk(tmp_path / "a")),
    ):
        pass


def test_without_the_plugin_nothing_is_kept(
    pools: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin.watch, "began_s", None)
    with pytest.raises(ConfigError, match="SGLANG_PLUGINS"), storage_on(pools, a_config(), disk(tmp_path / "a")):
        pass


def test_what_sglang_chose_and_what_the_user_asked_for_is_part_of_the_identity(group: None, tmp_path: Path) -> None:
    ids = set()
    for options in ({}, {"kv_cache_dtype": "fp8_e5m2"}, {"context_length": 4096}):
        extra = with_backend("dynamic", extra_config(disk(tmp_path / "kv")))
        with configured(write_model(tmp_path / "model"), page_size=4, **extra, **options) as args:
            host = Host("attention", args)
            namespace = Identity(a_config()).namespace(
                "kv", pages_of("kv", host.cache.cache_controller.storage_host_pool)
            )
            ids.add(namespace.id)
            host.close()
    assert len(ids) == 3
