"""Who may find chunks that outlive an engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cargohold.connector.offloading import OffloadConfig, OffloadingFactory
from cargohold.connector.offloading.namespaces import namespace_of
from cargohold.errors import ConfigError
from cargohold.offload.tier import DiskTierConfig
from cargohold.protocol import AttentionKind, KVCacheGroup, KVCacheLayout, SchedulerEnvironment, ServedModel
from cargohold.simulation import VirtualClock, simulated_layout


@pytest.fixture
def layout(tmp_path: Path) -> KVCacheLayout:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"layers": 2}))
    (directory / "one.safetensors").write_bytes(b"first half")
    (directory / "two.safetensors").write_bytes(b"second half")
    return replace(simulated_layout(10, world_size=2), model=ServedModel("name", str(directory), "float32"))


def model_of(layout: KVCacheLayout) -> ServedModel:
    assert layout.model is not None
    return layout.model


def test_the_same_files_elsewhere_under_another_name_are_the_same_model(layout: KVCacheLayout, tmp_path: Path) -> None:
    old = Path(model_of(layout).path)
    before = namespace_of(layout, 0, 1)
    new = old.rename(tmp_path / "elsewhere")
    moved = replace(layout, model=ServedModel("other name", str(new), "float32"), num_blocks=99)
    assert namespace_of(moved, 0, 1).digest == before.digest


def test_whatever_changes_the_bytes_changes_the_namespace(layout: KVCacheLayout) -> None:
    model, group = model_of(layout), layout.groups[0]
    window = KVCacheGroup(0, AttentionKind.SLIDING_WINDOW, group.block_tokens, group.layer_names, 8)
    digests = [
        namespace_of(layout, 0, 1).digest,
        namespace_of(layout, 1, 1).digest,
        namespace_of(layout, 0, 2).digest,
        namespace_of(replace(layout, world_size=4), 0, 1).digest,
        namespace_of(replace(layout, block_bytes=layout.block_bytes * 2), 0, 1).digest,
        namespace_of(replace(layout, hash_block_tokens=2), 0, 1).digest,
        namespace_of(replace(layout, groups=(window,)), 0, 1).digest,
        namespace_of(replace(layout, groups=(replace(group, layer_names=("a", "b")),)), 0, 1).digest,
        namespace_of(replace(layout, model=replace(model, dtype="bfloat16")), 0, 1).digest,
    ]
    for name, contents in (("two.safetensors", b"second hale"), ("config.json", b'{"layers": 3}')):
        (Path(model.path) / name).write_bytes(contents)
        digests.append(namespace_of(layout, 0, 1).digest)
    assert len(set(digests)) == len(digests)


def test_files_of_one_name_in_several_directories_all_count(layout: KVCacheLayout) -> None:
    """Found by reading: the one that came last hid the others, so weights were taken for what they were before training."""
    directory = Path(model_of(layout).path)
    (directory / "onward").mkdir()
    (directory / "onward" / "one.safetensors").write_bytes(b"a copy of long ago")
    before = namespace_of(layout, 0, 1).digest
    (directory / "one.safetensors").write_bytes(b"first hale")
    changed = namespace_of(layout, 0, 1).digest
    (directory / "onward" / "one.safetensors").write_bytes(b"a copy of today")
    assert len({before, changed, namespace_of(layout, 0, 1).digest}) == 3


def test_without_weights_in_local_files_there_is_no_namespace(layout: KVCacheLayout, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (str(tmp_path / "empty"), "nobody/has-this", "not a hub id"):
        with pytest.raises(ConfigError) as caught:
            namespace_of(replace(layout, model=ServedModel("name", path, "float32")), 0, 1)
        assert caught.value.key == "tiers"


def test_an_engine_that_does_not_say_what_it_serves_is_refused_tiers(tmp_path: Path) -> None:
    tiers = [DiskTierConfig(directory=str(tmp_path), max_bytes="64MiB")]
    factory = OffloadingFactory(OffloadConfig(host_bytes="1MiB", tiers=tiers))
    with pytest.raises(ConfigError) as caught:
        factory.make_scheduler_side(SchedulerEnvironment(simulated_layout(10), VirtualClock()))
    assert caught.value.key == "tiers"


def test_a_revision_on_the_hub_is_told_from_another(
    layout: KVCacheLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: the digest was that of the default branch, whichever revision was served."""
    place = tmp_path / "models--org--name"
    for revision, commit, weights in (("main", "1" * 40, b"old"), ("dev", "2" * 40, b"new")):
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "refs" / revision).write_text(commit)
        (place / "snapshots" / commit).mkdir(parents=True)
        (place / "snapshots" / commit / "model.safetensors").write_bytes(weights)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def digest_of(revision: str | None) -> bytes:
        model = ServedModel("name", "org/name", "float32", revision)
        return namespace_of(replace(layout, model=model), 0, 1).digest

    assert digest_of(None) == digest_of("main") != digest_of("dev")
    (place / "refs" / "dev").write_text("1" * 40)
    assert digest_of("dev") == digest_of("main"), "its contents count, not its name"
