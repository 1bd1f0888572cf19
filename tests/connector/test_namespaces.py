"""Who may find chunks that outlive an engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cargohold.connector.offloading import OffloadConfig, OffloadingFactory
from cargohold.connector.offloading.factory import namespace_of, open_queues
from cargohold.errors import ConfigError
from cargohold.lab.simulation import VirtualClock, simulated_layout
from cargohold.protocol import (
    AttentionKind,
    KVCacheGroup,
    KVCacheLayout,
    SchedulerEnvironment,
    ServedModel,
    WorkerEnvironment,
)
from cargohold.tiers import DiskTierConfig


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


def test_a_configuration_is_read_as_utf8_whatever_the_locale_says(layout: KVCacheLayout) -> None:
    """Found by reading: elsewhere a model whose configuration is not all ASCII was refused tiers, or another's."""
    model = model_of(layout)
    (Path(model.path) / "config.json").write_text('{"label": "\N{SNOWMAN}"}', encoding="utf-8")
    code = (
        "from cargohold.tiers.namespace import digest_model; from cargohold.protocol import ServedModel; "
        f"print(ascii(digest_model(ServedModel('name', {model.path!r}, 'float32'))[1]))"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True, timeout=60
    )
    assert "\\u2603" in done.stdout


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


def test_existing_tiers_stay_valid(layout: KVCacheLayout) -> None:
    """The namespace of a model whose KV its weights and ``config.json`` decide on is what it was since format 2."""
    model = model_of(layout)
    directory = Path(model.path)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md", "modeling.py"):
        (directory / name).write_text("{}")
    group = KVCacheGroup(0, AttentionKind.FULL, 4, ("layer",))
    assert namespace_of(KVCacheLayout((group,), 10, 64, 4, 2, model), 0, 1).id == "9a1ffda3fa3dca6ce7d4114dacc6a4a7"


def test_what_several_workers_hold_has_one_name_for_each_way_to_split_the_model(layout: KVCacheLayout) -> None:
    def ids(world_size: int, num_replicas: int) -> list[str]:
        split = replace(layout, model=model_of(layout), world_size=world_size, num_replicas=num_replicas)
        return [namespace_of(split, rank, 1).id for rank in range(world_size)]

    assert len(set(ids(2, 2))) == len(set(ids(4, 4))) == 1
    first, same, second, also = ids(4, 2)
    assert (first, second) == (same, also)
    # Sums over more workers are rounded in another way.
    assert len({*ids(1, 1), *ids(2, 1), *ids(2, 2), *ids(4, 1), *ids(4, 2), *ids(4, 4)}) == 1 + 2 + 1 + 4 + 2 + 1


@pytest.mark.parametrize("name", ["modeling_own.py", "parts/attention.py"])
def test_code_that_the_engine_runs_makes_another_model(layout: KVCacheLayout, name: str) -> None:
    """Found by reading: a model whose code was changed, under the same weights, found the KV of before."""
    model = model_of(layout)
    trusting = replace(layout, model=replace(model, runs_code=True))
    file = Path(model.path) / name
    file.parent.mkdir(exist_ok=True)
    without = namespace_of(trusting, 0, 1).digest
    assert without == namespace_of(layout, 0, 1).digest
    file.write_text("def attend(): ...")
    before = namespace_of(trusting, 0, 1).digest
    file.write_text("def attend(): pass")
    assert len({without, before, namespace_of(trusting, 0, 1).digest}) == 3
    assert namespace_of(layout, 0, 1).digest == without, "nobody runs it"


@pytest.mark.parametrize(
    "name",
    [
        "adapter_config.json",
        "adapters/retrieval/adapter_config.json",
        "audio_tokenizer/config.json",
        "hf_quant_config.json",
        "params.json",
        "preprocessor_config.json",
        "processor_config.json",
        "quantize_config.json",
        "video_preprocessor_config.json",
    ],
)
def test_configuration_in_other_files_counts(layout: KVCacheLayout, name: str) -> None:
    """Found by reading: another quantization, or other sizes of pictures, under the same weights, found the KV of before."""
    file = Path(model_of(layout).path) / name
    file.parent.mkdir(parents=True, exist_ok=True)
    digests = {namespace_of(layout, 0, 1).digest}
    for contents in ('{"bits": 4}', '{"bits": 8}'):
        file.write_text(contents)
        digests.add(namespace_of(layout, 0, 1).digest)
    assert len(digests) == 3


def test_an_index_that_chooses_among_files_counts(layout: KVCacheLayout) -> None:
    index = Path(model_of(layout).path) / "model.safetensors.index.json"
    digests = {namespace_of(layout, 0, 1).digest}
    for file in ("one.safetensors", "two.safetensors"):
        index.write_text(json.dumps({"weight_map": {"a": file}}))
        digests.add(namespace_of(layout, 0, 1).digest)
    assert len(digests) == 3


def test_a_configuration_from_elsewhere_counts_by_what_it_says(layout: KVCacheLayout, tmp_path: Path) -> None:
    """Found by reading: of vLLM's ``--hf-config-path`` the name alone counted."""
    other = tmp_path / "config"
    other.mkdir()
    elsewhere = replace(layout, model=replace(model_of(layout), config_path=str(other), runs_code=True))
    digests = set()
    for name, contents in (("config.json", "{}"), ("config.json", '{"layers": 4}'), ("configuration_own.py", "")):
        (other / name).write_text(contents)
        digests.add(namespace_of(elsewhere, 0, 1).digest)
    assert len(digests) == 3
    (other / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json must be a local file"):
        namespace_of(elsewhere, 0, 1)


def test_code_of_another_repository_counts_or_the_tier_is_refused(
    layout: KVCacheLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    model = replace(model_of(layout), runs_code=True)
    directory = Path(model.path)
    references = {"AutoConfig": "configuration.Own", "AutoTokenizer": [None, "org/code--tokenization.Own"]}
    (directory / "config.json").write_text(json.dumps({"text": {"auto_map": references}}))
    namespace_of(layout, 0, 1)
    with pytest.raises(ConfigError, match="code must be in local files") as caught:
        namespace_of(replace(layout, model=model), 0, 1)
    assert caught.value.value == "org/code"
    for revision, commit in (("main", "1" * 40), ("dev", "2" * 40)):
        snapshot = hub / "models--org--code" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "modeling.py").write_text(revision)
        refs = hub / "models--org--code" / "refs"
        refs.mkdir(exist_ok=True)
        (refs / revision).write_text(commit)

    def digest_of(code_revision: str | None) -> bytes:
        return namespace_of(replace(layout, model=replace(model, code_revision=code_revision)), 0, 1).digest

    before = digest_of(None)
    assert before == namespace_of(replace(layout, model=model), 0, 1).digest != digest_of("dev")
    (hub / "models--org--code" / "snapshots" / ("1" * 40) / "modeling.py").write_text("changed")
    assert digest_of(None) != before


def test_an_adapter_on_the_hub_is_refused_for_nobody_knows_what_is_below_it(
    layout: KVCacheLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    snapshot = hub / "models--org--adapter" / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (hub / "models--org--adapter" / "refs").mkdir()
    (hub / "models--org--adapter" / "refs" / "main").write_text("1" * 40)
    (snapshot / "adapter_model.safetensors").write_bytes(b"a few weights")
    (snapshot / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="merge the adapter"):
        namespace_of(replace(layout, model=ServedModel("name", "org/adapter", "float32")), 0, 1)


def test_what_cannot_be_named_is_refused_by_name(layout: KVCacheLayout) -> None:
    unknown = replace(layout, model=replace(model_of(layout), obstacle="its weights come from elsewhere"))
    with pytest.raises(ConfigError, match="its weights come from elsewhere, so KV cannot outlive the engine"):
        namespace_of(unknown, 0, 1)


def test_tiers_are_closed_again_when_one_behind_them_cannot_be_opened(layout: KVCacheLayout, tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    good, bad = (DiskTierConfig(directory=str(tmp_path / name), max_bytes="8MiB") for name in ("good", "a file"))
    environment = WorkerEnvironment(layout, 0, VirtualClock())
    with pytest.raises(ConfigError, match="a file") as caught:
        open_queues(OffloadConfig(host_bytes="1MiB", tiers=[good, bad]), environment, namespace_of(layout, 0, 1))
    opened = open_queues(OffloadConfig(host_bytes="1MiB", tiers=[good]), environment, namespace_of(layout, 0, 1))
    opened["disk"].shutdown()
    del caught


def reading(layout: KVCacheLayout, path: Path) -> KVCacheLayout:
    """The same model at ``path``, for an engine that begins to read it now."""
    read = replace(layout, model=replace(model_of(layout), path=str(path), runs_code=True, read_after_s=time.time()))
    time.sleep(0.05)  # the clock of a file system ticks every few milliseconds
    return read


def replace_a_file(name: str) -> Callable[[Path], None]:
    """What puts another file, that is there already, in the place of one in ``latest``, which is then a directory."""

    def run(places: Path) -> None:
        (places / "other" / name).replace(places / "latest" / name)

    return run


def write_weights(places: Path) -> None:
    with (places / "latest" / "one.safetensors").open("r+b") as file:
        file.write(b"f")


def flip_the_link(places: Path) -> None:
    (places / "flipped").replace(places / "link")


def rename_directories(places: Path) -> None:
    (places / "latest").rename(places / "old")
    (places / "other").rename(places / "latest")


def rename_all(places: Path) -> None:
    places.rename(places.parent / "old")
    (places.parent / "staging").rename(places)


@pytest.mark.parametrize(
    ("change", "path", "named"),
    [
        (replace_a_file("one.safetensors"), "latest", "latest/one.safetensors"),
        (replace_a_file("config.json"), "latest", "latest/config.json"),
        (replace_a_file("adapter_config.json"), "latest", "latest/adapter_config.json"),
        (replace_a_file("modeling_own.py"), "latest", "latest/modeling_own.py"),
        (replace_a_file("two.safetensors"), "linked", "linked/../latest/two.safetensors"),
        (write_weights, "link", "link/one.safetensors"),
        (flip_the_link, "link", "link"),
        (rename_directories, "latest", "latest"),
        (rename_all, "latest", ""),
    ],
)
def test_a_model_that_was_replaced_while_the_engine_started_is_refused_tiers(
    layout: KVCacheLayout, tmp_path: Path, change: Callable[[Path], object], path: str, named: str
) -> None:
    """Found by reading: KV of the weights that were loaded was kept under the name of those that were there later."""
    places = tmp_path / "places"
    places.mkdir()
    for file in ("adapter_config.json", "modeling_own.py"):
        (Path(model_of(layout).path) / file).write_text("{}")
    for copy in ("latest", "other"):
        shutil.copytree(model_of(layout).path, places / copy)
    (places / "link").symlink_to("latest")
    (places / "flipped").symlink_to("other")
    (places / "linked").mkdir()
    for file in ("one.safetensors", "two.safetensors"):
        (places / "linked" / file).symlink_to(f"../latest/{file}")
    shutil.copytree(places, tmp_path / "staging", symlinks=True)
    read = reading(layout, places / path)
    namespace_of(read, 0, 1)
    change(places)
    with pytest.raises(ConfigError, match=r"changed or replaced while the engine started.* start again") as caught:
        namespace_of(read, 0, 1)
    assert caught.value.value == str(places / named)
    namespace_of(reading(layout, places / path), 0, 1)


def test_a_model_from_the_future_is_refused_tiers_for_that(
    layout: KVCacheLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by trying: a clock that was set back by two hours had somebody write to the model, at every start until then."""
    path = Path(model_of(layout).path)
    written_s = max(file.stat().st_ctime for file in path.iterdir())
    monkeypatch.setattr(time, "time", lambda: written_s - 7200.0)
    with pytest.raises(ConfigError, match=r"changed in the future, by this machine's clock.* touch it") as caught:
        namespace_of(reading(layout, path), 0, 1)
    assert Path(str(caught.value.value)).parent == path


def test_what_does_not_change_the_model_may_come_and_go_while_the_engine_starts(
    layout: KVCacheLayout, tmp_path: Path
) -> None:
    read = reading(layout, Path(model_of(layout).path))
    for name in ("tokenizer.json", "logs/today", "../another model/config.json"):
        file = Path(model_of(layout).path) / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}")
        namespace_of(read, 0, 1)
        file.unlink()
    assert namespace_of(read, 0, 1) == namespace_of(layout, 0, 1)


def test_the_engine_itself_may_download_the_model_while_it_starts(
    layout: KVCacheLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    read = reading(layout, Path("org/name"))
    place = tmp_path / "hub" / "models--org--name"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("1" * 40)
    Path(model_of(layout).path).rename(tmp_path / "downloaded")
    (place / "snapshots").mkdir()
    (tmp_path / "downloaded").rename(place / "snapshots" / ("1" * 40))
    assert namespace_of(read, 0, 1).weights
