"""Versions of vLLM that lack something, or want it otherwise: faked by changing the one that is here, or without any."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cargohold.integrations.vllm import plugin

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **names: object) -> None:
    """Make a module of vLLM that has these names and no others."""
    module = ModuleType(name)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, name, module)


def import_compat() -> Any:
    """The names that the adapter has from the vLLM that is faked, besides those that it has."""
    spec = importlib.util.find_spec("cargohold.integrations.vllm.compat")
    assert spec is not None and spec.loader is not None
    compat = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compat)
    return compat


class TestWithoutVLLM:
    """Fakes of everything, so that these run wherever our own tests do."""

    def test_what_cannot_be_imported_is_noted_and_replaced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake(monkeypatch, "vllm", __version__="0.99.0")
        fake(monkeypatch, f"{V1}.base", KVConnectorBase_V1=object, KVConnectorRole=object, SupportsHMA=int)
        for name in (f"{V1}.metrics", "vllm.distributed.kv_events", "vllm.v1.core.sched.output", "vllm.v1.outputs"):
            fake(monkeypatch, name)
        fake(monkeypatch, "vllm.distributed.kv_transfer")
        compat = import_compat()
        assert compat.SupportsHMA is int
        assert f"vLLM has no {V1}.base.KVConnectorMetadata" in compat.MISSING
        assert "vLLM has no vllm.distributed.kv_events.BlockStored" in compat.MISSING
        assert len(compat.MISSING) == 11
        assert isinstance(compat.KVConnectorStats(), compat.KVConnectorStats)
        assert compat.TransferResults is None

    @pytest.mark.parametrize("knows_it", [True, False, None])
    def test_a_prefix_cache_that_looks_for_no_shared_prefix_is_noticed(
        self, knows_it: bool | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Knows:
            def cache_blocks(self, request: Any) -> object:
                return request.shared_prefix_boundary

        class DoesNot:
            def cache_blocks(self, request: Any) -> object:
                return request.num_tokens

        fake(monkeypatch, "vllm", __version__="0.99.0")
        fake(monkeypatch, f"{V1}.base", KVConnectorBase_V1=object, KVConnectorRole=object)
        names = {} if knows_it is None else {"SingleTypeKVCacheManager": Knows if knows_it else DoesNot}
        fake(monkeypatch, "vllm.v1.core.single_type_kv_cache_manager", **names)
        assert import_compat().KEEPS_SHARED_PREFIXES is bool(knows_it)

    def test_functions_that_want_other_arguments_are_noted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Found by reading: the events' helpers were not compared, and one that had changed ended the engine at its start."""
        fake(monkeypatch, "vllm", __version__="0.99.0")
        fake(monkeypatch, f"{V1}.base", KVConnectorBase_V1=object, KVConnectorRole=object)
        fake(monkeypatch, "vllm.v1.core.kv_cache_utils", maybe_convert_block_hash=lambda digest: digest)
        fake(monkeypatch, "vllm.v1.kv_cache_interface", get_kv_cache_spec_kind=lambda spec, config: spec)
        compat = import_compat()
        assert [sentence for sentence in compat.MISSING if "arguments" in sentence] == [
            "vLLM's get_kv_cache_spec_kind wants other arguments: missing a required argument: 'config'"
        ]

    @pytest.mark.parametrize(
        "known", [{}, {"KVConnectorFactory": SimpleNamespace(register_connector=lambda _cls: None)}]
    )
    def test_a_factory_that_takes_no_names_does_not_end_servers_that_want_no_connector(
        self, known: dict[str, object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        fake(monkeypatch, FACTORY, **known)
        plugin.register()
        (line,) = [record.message for record in caplog.records]
        assert line.startswith(
            "cargohold: this vLLM takes no connectors by name, so it does not know CargoholdConnector: "
        )

    def test_the_connector_is_registered_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        registered: dict[str, tuple[str, str]] = {}

        def register_connector(name: str, module: str, class_name: str) -> None:
            if name in registered:
                raise ValueError(name)
            registered[name] = (module, class_name)

        fake(monkeypatch, FACTORY, KVConnectorFactory=SimpleNamespace(register_connector=register_connector))
        plugin.register()
        plugin.register()
        assert registered == {plugin.NAME: (plugin.MODULE, plugin.NAME)}


@pytest.fixture
def missing() -> Callable[[], list[str]]:
    """What the connector lacks in the vLLM that is here."""
    pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
    from cargohold.integrations.vllm import compat, connector  # noqa: PLC0415  # import vLLM

    return lambda: compat.missing_from_vllm(connector.CargoholdConnector)


@pytest.fixture
def compat(missing: object) -> Any:
    """The names that the adapter has from vLLM."""
    from cargohold.integrations.vllm import compat  # noqa: PLC0415  # imports vLLM

    return compat


def test_nothing_is_missing_from_this_vllm(missing: Callable[[], list[str]]) -> None:
    assert missing() == []


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        ("0.28.0", None),
        ("0.32.1rc1+cpu", None),
        ("0.33.0", None),
        ("0.27.9", "vLLM 0.27.9 is outside the range that was tested, 0.28 to 0.33"),
        ("dev", "vLLM dev is outside the range that was tested, 0.28 to 0.33"),
    ],
)
def test_versions_that_were_not_tested_are_told(
    version: str, sentence: str | None, compat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "VLLM_VERSION", version)
    assert compat.version_warning() == sentence


def test_a_hook_that_has_changed_is_told(
    missing: Callable[[], list[str]], compat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_finished(self: object, finished_req_ids: set[str], step: int) -> None: ...

    monkeypatch.setattr(compat.KVConnectorBase_V1, "get_finished", get_finished)
    assert missing() == ["vLLM's hook get_finished has a parameter step at place 2"]


def test_a_pool_that_is_never_handed_over_is_told(
    missing: Callable[[], list[str]], compat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bind_kv_cache_manager", "bind_gpu_block_pool"):
        monkeypatch.delattr(compat.KVConnectorBase_V1, name, raising=False)
    assert missing() == ["vLLM has none of the hooks bind_kv_cache_manager, bind_gpu_block_pool"]


def test_messages_that_have_changed_are_told(
    missing: Callable[[], list[str]], compat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "AllBlocksCleared", make_dataclass("AllBlocksCleared", ["medium"]))
    monkeypatch.setattr(
        compat, "SchedulerOutput", make_dataclass("SchedulerOutput", ["finished_req_ids", "preempted_req_ids"])
    )
    assert missing() == [
        "vLLM's AllBlocksCleared wants other arguments: missing a required argument: 'medium'",
        "vLLM's SchedulerOutput has no num_scheduled_tokens",
    ]


def test_sources_of_hits_that_have_changed_are_told(
    missing: Callable[[], list[str]], compat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_external_cache_hit_sources(self: object, request: object, num_external_tokens: int) -> None: ...

    monkeypatch.setattr(
        compat.KVConnectorBase_V1, "get_external_cache_hit_sources", get_external_cache_hit_sources, raising=False
    )
    for sources, lacks in ((SimpleNamespace(HOST=1), 1), (None, 2)):
        monkeypatch.setattr(compat, "CacheHitSource", sources)
        names = ["EXTERNAL_UNSPECIFIED", "HOST"][:lacks]
        assert missing() == [f"vLLM's CacheHitSource has no {name}" for name in names]


def test_a_block_pool_that_has_changed_is_told(compat: Any) -> None:
    block = SimpleNamespace(block_hash=None, block_id=0, is_null=False, next_free_block=None, ref_cnt=0)
    queue = SimpleNamespace(fake_free_list_head=block, fake_free_list_tail=block, prepend_n=lambda blocks: None)
    names: dict[str, Any] = {
        "blocks": [block],
        "cached_block_hash_to_block": {},
        "free_block_queue": queue,
        "hash_block_size": 16,
        "touch": lambda blocks: None,
        "free_blocks": lambda ordered_blocks: None,
        "get_num_free_blocks": lambda: 1,
    }
    assert compat.missing_from_pool(SimpleNamespace(**names)) == []
    changed = names | {"touch": lambda blocks, request: None}
    assert compat.missing_from_pool(SimpleNamespace(**changed)) == [
        "its block pool's touch wants other arguments: missing a required argument: 'request'"
    ]
    del names["free_blocks"], names["get_num_free_blocks"]
    assert compat.missing_from_pool(SimpleNamespace(**names)) == [
        "its block pool has no free_blocks",
        "its block pool has no get_num_free_blocks",
    ]
    del block.ref_cnt
    assert compat.missing_from_pool(SimpleNamespace(**changed | {"touch": lambda blocks: None})) == [
        "a block has no ref_cnt"
    ]


def test_a_manager_that_has_changed_is_told(compat: Any) -> None:
    manager = SimpleNamespace(block_pool=None, get_blocks=lambda request_id: None)
    assert compat.missing_from_manager(manager) == []
    del manager.block_pool
    assert compat.missing_from_manager(manager) == ["its KV-cache manager has no block_pool"]
    assert compat.missing_from_manager(SimpleNamespace(block_pool=None, get_blocks=lambda: None)) == [
        "its KV-cache manager's get_blocks wants other arguments: too many positional arguments"
    ]
