"""What the command line of vLLM's server says is wrong with our options, before any process is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cargohold.deadlines import LOCK
from cargohold.errors import ConfigError
from cargohold.process import ENGINE

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.integrations.vllm import plugin
from cargohold.integrations.vllm.command import Command, check
from tests.tiers.common import disk_tier

PROGRAM = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]


def transfer(extra: object, **fields: object) -> dict[str, Any]:
    """A ``--kv-transfer-config`` with our connector."""
    return {
        "kv_connector": "CargoholdConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
        **fields,
    }


def words(config: object, *more: str) -> list[str]:
    """What a user types behind ``vllm``."""
    return ["serve", "a-model", "-tp", "2", "--max-model-len", "100", "--kv-transfer-config", json.dumps(config), *more]


def refusal(*args: Any) -> str:
    """How a command line is refused."""
    with pytest.raises(ConfigError) as caught:
        check(Command.read(words(*args)))
    return str(caught.value)


def test_a_server_with_a_wrong_option_ends_at_once_and_says_so_last(tmp_path: Path) -> None:
    """Found by use: the sentence stood 170 lines above the end of the log, behind the loading of the weights."""
    options = {"model": str(tmp_path), "kv-transfer-config": transfer({"host_byte": "8GiB"})}
    (tmp_path / "options.yaml").write_text(json.dumps(options), encoding="utf-8")  # JSON is YAML
    command = [*PROGRAM, "--config", str(tmp_path / "options.yaml")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("cargohold: kv_connector_extra_config.host_byte='8GiB' is not possible"), ended.stderr
    assert "did you mean host_bytes?" in last
    assert "Traceback" not in ended.stderr and "EngineCore" not in ended.stdout + ended.stderr


def test_every_way_to_write_an_option_is_understood(tmp_path: Path) -> None:
    dotted = ["--kv-transfer-config.kv_connector", "CargoholdConnector", "--kv_transfer_config.kv_role=kv_both"]
    wrong = "--kv-transfer-config.kv_connector_extra_config.host_byte"
    for given in (
        [*dotted, wrong, "8GiB"],
        [*dotted, f"{wrong}=8GiB"],
        [f"--kv_transfer_config={json.dumps(transfer({'host_byte': 1}))}"],
    ):
        with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.host_byte="):
            check(Command.read(["serve", "a-model", *given]))
    check(Command.read(words(transfer({"host_bytes": "1MiB", "tiers": []}))))
    check(Command.read(words({"kv_connector": "NixlConnector", "kv_role": "kv_both"})))
    check(Command.read(["serve", "a-model"]))


def test_an_option_is_named_by_its_whole_path() -> None:
    tiers = [{"kind": "disk", "directory": "/dev/null/kv", "max_bytes": "1MiB"}]
    ours = transfer({"mode": "multi", "connectors": [{"host_bytes": "1MiB", "tiers": tiers}]})
    said = refusal(ours)
    assert said.startswith("kv_connector_extra_config.connectors[0].tiers[0].directory='/dev/null/kv'")
    assert "Not a directory" in said
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [{}, ours]},
    }
    assert refusal(both).startswith(f"kv_connector_extra_config.connectors[1].{said.split('=')[0]}=")


def test_what_this_machine_has_not_is_refused_only_where_it_runs_the_engine(tmp_path: Path) -> None:
    disk = {"kind": "disk", "directory": str(tmp_path / "a/b"), "max_bytes": "1MiB", "reserve_bytes": 0}
    wrong: dict[str, dict[str, Any]] = {
        r"host_bytes='9000TiB' .* this machine allows": {"host_bytes": "9000TiB"},
        r"tiers\[0\]\.max_bytes='9000 TiB' .* the file system has": {"tiers": [{**disk, "max_bytes": "9000TiB"}]},
        r"tiers\[0\]\.url='file:///dev/null/kv' .* Not a directory": {
            "tiers": [{"kind": "shared", "url": "file:///dev/null/kv"}]
        },
        r"tiers\[0\]\.encryption_key=.*CARGOHOLD_NO_SUCH": {
            "tiers": [{**disk, "encryption_key": "env:CARGOHOLD_NO_SUCH"}]
        },
        r"record='/dev/null/kv' .* no such directory": {"record": "/dev/null/kv"},
    }
    for expected, extra in wrong.items():
        config = transfer({"host_bytes": "1MiB", **extra})
        with pytest.raises(ConfigError, match=rf"kv_connector_extra_config\.({expected})"):
            check(Command.read(words(config)))
        for elsewhere in (["-n", "2"], ["--data-parallel-size-local=0"]):
            check(Command.read(words(config, *elsewhere)))
    check(Command.read(words(transfer({"host_bytes": "1MiB", "tiers": [disk]}))))
    assert not list(tmp_path.iterdir()), "nothing is made by looking"


@pytest.mark.parametrize("option", ["--distributed-executor-backend", "--data-parallel-backend"])
def test_over_ray_the_engine_runs_here_unless_a_cluster_is_joined(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    over_ray = words(transfer({"host_bytes": "9000TiB"}), option, "ray")
    with pytest.raises(ConfigError, match="this machine allows"):
        check(Command.read(over_ray))
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    check(Command.read(over_ray))
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with pytest.raises(ConfigError, match="this machine allows"):
        check(Command.read(over_ray))
    monkeypatch.delenv("RAY_ADDRESS")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").touch()  # as `ray start` leaves it
    check(Command.read(over_ray))


def test_a_directory_in_use_is_refused_before_a_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by use: it was refused once the weights were loaded, in line 97 of 281."""
    monkeypatch.setattr("cargohold.tiers.disk.shard.LOCK", replace(LOCK, plus_s=0.25))
    monkeypatch.delenv(ENGINE, raising=False)
    disk = {"kind": "disk", "directory": str(tmp_path / "kv"), "max_bytes": "1MiB", "reserve_bytes": 0}
    ours = transfer({"host_bytes": "1MiB", "tiers": [disk]})
    check(Command.read(words(ours)))  # and notes for workers which engine they are
    worker = disk_tier(tmp_path / "kv")
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.directory=.*another tier uses it for the same model"):
        check(Command.read(words(ours, "--port", "1", "--max-num-seqs", "2")))
    assert "another process uses it; waiting 0.25 s for it to end" in caplog.text
    for other in (["--dtype", "half"], ["-pp", "2"], ["--kv-cache-dtype=fp8"]):
        check(Command.read(words(ours, *other)))  # it has files of its own there
    worker.close()
    check(Command.read(words(ours)))


@pytest.mark.parametrize(
    ("size", "is_told"),
    [
        (["--kv-offloading-size", "8"], True),
        (["--kv_offloading_size=8"], True),
        (["--kv-offloading-backend", "native"], False),
    ],
)
def test_kv_offloading_size_beside_our_connector_is_logged(
    size: list[str], is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by reading: vLLM puts its own connector in our place, and nobody says so."""
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["/bin/vllm", *words(transfer({"host_bytes": "1MiB"}), *size)])
    plugin.register()
    assert ("--kv-offloading-size makes vLLM use" in caplog.text) == is_told
    caplog.clear()
    monkeypatch.setattr(sys, "argv", ["/bin/vllm", "serve", "model", *size])
    plugin.register()
    assert "--kv-offloading-size" not in caplog.text


@pytest.mark.parametrize("program", ["/bin/train.py", "/bin/vllm"])
def test_only_vllms_own_programs_are_ended(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", [program, *words(transfer({"host_byte": "8GiB"}))])
    if program == "/bin/vllm":
        with pytest.raises(SystemExit, match="did you mean host_bytes"):
            plugin.register()
    else:
        plugin.register()
    monkeypatch.setattr(sys, "argv", [program, "serve", "--kv-transfer-config", "CargoholdConnector {"])
    plugin.register()
