"""``cargohold doctor`` says what is there, and what to set."""

from __future__ import annotations

import builtins
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cargohold.cli import doctor
from cargohold.cli.machine import Level, check_disk
from cargohold.errors import TierError
from tests.command import Command


def findings(cargohold: Command, *args: str) -> dict[str, list[dict[str, str]]]:
    result = cargohold("doctor", "--json", *args)
    assert result.status == 0, result.err
    by_area: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(result.out):
        by_area.setdefault(finding["area"], []).append(finding)
    return by_area


def test_it_speaks_of_all_that_matters(cargohold: Command, tmp_path: Path) -> None:
    areas = findings(cargohold, "--disk", str(tmp_path))
    assert {
        "system",
        "memory",
        "PyTorch",
        "GPU",
        "pinned memory",
        "open files",
        "disk",
        "vLLM",
        "extras",
    } <= areas.keys()
    (disk,) = areas["disk"]
    assert disk["level"] == "ok" and "GB/s" in disk["found"], disk
    assert list(tmp_path.iterdir()) == [], "what was written to measure is gone"


def test_for_people_it_is_a_table(cargohold: Command, tmp_path: Path) -> None:
    result = cargohold("doctor", "--quick", "--disk", str(tmp_path))
    assert result.status == 0
    assert "PyTorch" in result.out and str(tmp_path) in result.out and "GB/s" not in result.out


def test_a_directory_that_is_not_there_yet_is_judged_by_the_one_around_it(tmp_path: Path) -> None:
    speeds = {tmp_path: (2e9, 1e9)}
    finding = check_disk(tmp_path / "not" / "there", measure=speeds.__getitem__)
    assert finding.level is Level.NOTE and f"would be made in {tmp_path}: is a mount missing?" in finding.advice
    assert "writes 2.00 GB/s and reads 1.00 GB/s" in finding.found
    assert not (tmp_path / "not").exists()


def test_a_file_is_no_place_for_a_disk_tier(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert check_disk(tmp_path / "file" / "kv", measure=None).level is Level.SET


def test_a_directory_that_everybody_may_write_to_is_not_private(tmp_path: Path) -> None:
    place = tmp_path / "my kv"
    place.mkdir()
    place.chmod(0o777)
    finding = check_disk(place, measure=None)
    assert finding.level is Level.SET and finding.advice.endswith(f"chmod o-w '{place}'")


def test_a_place_where_no_file_can_be_kept_is_named() -> None:
    finding = check_disk(Path("/proc/kv"), measure=None)
    assert finding.level is Level.SET and "its file system, proc, keeps no files" in finding.found


INSIDE = """
import json, sys
from pathlib import Path
from cargohold.cli import machine
found = [*machine.findings(), *(machine.check_disk(Path(place), None) for place in sys.argv[1:])]
print(json.dumps([[one.area, one.level.value, f"{one.found}; {one.advice}"] for one in found]))
"""
SEALED = "mount -t tmpfs -o size=64m shm /dev/shm && mount -o remount,bind,ro / && exec"
LIMIT = 512 << 20


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group with a limit of memory, of version 1 or 2."""
    for place, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(place) / f"cargohold-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).exists():
                (group / limit).write_text(str(LIMIT), encoding="ascii")
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip("no control group can be made here")


@pytest.fixture
def in_namespace() -> list[str]:
    """What runs a command in namespaces of its own: a small ``/dev/shm``, a read-only root."""
    words = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*words, f"{SEALED} true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("no namespace of mounts can be made here")
    return words


def test_inside_a_container_its_limits_are_found_with_what_to_set_in_the_manifest(
    memory_group: Path, in_namespace: list[str]
) -> None:
    """In a real control group, a real read-only root, with the ``/dev/shm`` that container engines give."""
    inside = shlex.join([sys.executable, "-c", INSIDE, "/nvme/kv", "/dev/shm/kv"])
    joined = f"echo $$ > {memory_group}/cgroup.procs; exec {shlex.join([*in_namespace, f'{SEALED} {inside}'])}"
    done = subprocess.run(["sh", "-c", joined], capture_output=True, text=True, timeout=60, check=True)
    said = {(area, level): text for area, level, text in json.loads(done.stdout)}
    assert "512 MiB for this process by its control group" in said["memory", "ok"]
    assert "resources.limits.memory" in said["memory", "ok"]
    assert "the root is read-only; /tmp" in said["user", "set"] and "an emptyDir on /tmp" in said["user", "set"]
    assert "medium: Memory on /dev/shm" in next(text for _, _, text in json.loads(done.stdout) if "64 MiB free" in text)
    assert "/ is read-only" in said["disk", "set"] and "securityContext.fsGroup" in said["disk", "set"]
    assert "tmpfs" in said["disk", "note"] and "counts towards the container's limit" in said["disk", "note"]


def test_a_disk_that_fails_is_a_finding_and_no_traceback(tmp_path: Path) -> None:
    def fail(place: Path) -> tuple[float, float]:
        raise TierError("disk", "Input/output error")

    finding = check_disk(tmp_path, measure=fail)
    assert finding.level is Level.SET and "Input/output error" in finding.advice


def test_without_torch_it_says_so_and_goes_on(cargohold: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_torch(name: str, *args: Any, **options: Any) -> Any:
        if name == "torch":
            raise ImportError("No module named 'torch'")
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    areas = findings(cargohold, "--quick")
    assert areas["PyTorch"][0]["level"] == "set" and "No module named 'torch'" in areas["PyTorch"][0]["found"]
    assert "GPU" not in areas and "disk" in areas


def test_low_limits_come_with_the_command_that_raises_them(cargohold: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_MEMLOCK: (8 << 20, 8 << 20), resource.RLIMIT_NOFILE: (256, 65536)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    areas = findings(cargohold, "--quick")
    assert "ulimit -l unlimited" in areas["pinned memory"][0]["advice"]
    assert areas["open files"][0]["level"] == "set" and "ulimit -n 65536" in areas["open files"][0]["advice"]


@pytest.mark.parametrize(
    ("release", "level"), [("0.32.0", "ok"), ("0.28.1", "ok"), ("0.27.3", "note"), ("1.0.0", "note")]
)
def test_the_version_of_vllm_is_compared_with_the_tested_ones(
    release: str, level: str, cargohold: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"vllm": release}
    monkeypatch.setattr(doctor, "installed_version", versions.get)
    monkeypatch.setattr(doctor, "entry_points", lambda group: [])
    first, *others = findings(cargohold, "--quick")["vLLM"]
    assert (first["found"], first["level"]) == (f"vllm {release}", level)
    assert [finding["found"] for finding in others] == ["does not know CargoholdConnector"]


def test_extras_that_are_missing_or_too_old_are_named(cargohold: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["numpy>=2", 'redis>=6.0; extra == "redis"', 'pyzmq>=26; extra == "events"', 'ray>=2.40; extra == "ray"']
    monkeypatch.setattr(doctor, "requires", lambda name: needs)
    monkeypatch.setattr(doctor, "installed_version", {"redis": "7.0", "ray": "2.1"}.get)
    said = {finding["found"]: finding["level"] for finding in findings(cargohold, "--quick")["extras"]}
    assert said == {"redis: redis": "ok", "ray: ray 2.1 is not >=2.40": "set", "not installed: events": "note"}
    assert "cargohold[events]" in cargohold("doctor", "--quick").out, "brackets are no markup"


def test_inside_vllms_environment_extras_of_other_engines_are_not_asked_for(
    cargohold: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their packages have vLLM's versions there, and installing ours would replace them."""
    needs = [f"{extra}-package; extra == '{extra}'" for extra in ("serve", "redis", "packing", "mooncake")]
    monkeypatch.setattr(doctor, "requires", lambda name: needs)
    monkeypatch.setattr(doctor, "installed_version", {"vllm": "0.32.0", "redis-package": "7.0"}.get)
    found = [one["found"] for one in findings(cargohold, "--quick")["extras"]]
    assert found == ["redis: redis-package", "not installed: mooncake, packing"]


def test_a_source_tree_that_is_not_installed_is_no_error(cargohold: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "requires", not_installed)
    assert findings(cargohold, "--quick")["extras"][0]["level"] == "note"


def test_a_gpu_that_torch_can_use_is_shown(cargohold: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch  # noqa: PLC0415  # tests of the command line itself run without it

    facts = SimpleNamespace(name="Some GPU", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: facts)
    gpus = [finding["found"] for finding in findings(cargohold, "--quick")["GPU"]]
    assert [gpu.partition(",")[0] for gpu in gpus] == ["0: Some GPU", "1: Some GPU"]


def test_whether_it_pays_is_measured_where_it_runs(cargohold: Command, chat_model: str, tmp_path: Path) -> None:
    areas = findings(cargohold, "--model", chat_model, "--disk", str(tmp_path))
    assert "a GiB holds" in areas["KV"][0]["found"] and "computed from the configuration" in areas["KV"][0]["found"]
    assert "measured, in Cargohold's engine" in areas["prefill"][0]["found"]
    of_host, of_disk, last = areas["does it pay"]
    assert "from host memory" in of_host["found"] and f"from disk {tmp_path}" in of_disk["found"]
    assert "cargohold plan" in last["advice"]


def test_a_card_that_computes_faster_than_it_loads_is_told(cargohold: Command, chat_model: str, tmp_path: Path) -> None:
    args = ["--model", chat_model, "--disk", str(tmp_path), "--prefill-tokens-per-s", "1e12"]
    of_host = findings(cargohold, *args)["does it pay"][0]
    assert of_host["level"] == "note" and "it does not pay" in of_host["found"]
    assert findings(cargohold, "--model", chat_model, "--quick")["does it pay"][0]["found"] == "not measured"


@pytest.mark.parametrize(
    ("config", "level", "said"),
    [
        ({}, "ok", "served, as all its layers are of kinds that are kept: "),
        ({"layer_types": ["full_attention", "linear_attention"]}, "ok", "--mamba-cache-mode align"),
        ({"layer_types": ["full_attention", "memory_palace"]}, "note", "the startup log says whether it is supported"),
        ({"is_encoder_decoder": True}, "set", "not supported inside vLLM"),
    ],
    ids=["attention", "states", "unknown", "encoder"],
)
def test_a_model_that_no_page_names_is_judged_by_its_layers(
    config: dict[str, Any], level: str, said: str, cargohold: Command, tmp_path: Path
) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128}
    written = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **sizes, **config}
    (tmp_path / "config.json").write_text(json.dumps(written), encoding="utf-8")
    (found,) = findings(cargohold, "--quick", "--model", str(tmp_path))["model"]
    assert found["level"] == level and said in f"{found['found']}; {found['advice']}"
