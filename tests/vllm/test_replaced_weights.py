"""A model whose files are replaced while vLLM starts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.errors import ConfigError
from cargohold.integrations.vllm import compat, plugin
from cargohold.integrations.vllm.connector import CargoholdConnector
from tests.vllm.common import RESTARTED


def test_weights_that_were_replaced_after_vllm_loaded_them_are_refused_tiers(
    vllm_model: Callable[[str], str], start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: vLLM makes connectors when it has loaded the model, and what was there then counted as loaded."""
    model, trained = tmp_path / "model", tmp_path / "trained"
    shutil.copytree(vllm_model("llama"), model)
    shutil.copy(model / "model.safetensors", trained)
    tier = {"kind": "disk", "directory": str(tmp_path / "kv"), "max_bytes": "64MiB", "reserve_bytes": 0}
    # As in an engine's own process, in which vLLM has called ``register`` for the first time.
    monkeypatch.setattr(compat, "has_own_process", lambda: True)
    monkeypatch.setattr(plugin, "_ran_first_at_s", None)
    plugin.register()
    start(str(model), {**RESTARTED, "tiers": [tier]})
    made = CargoholdConnector.__init__

    def make_later(connector: Any, *options: Any) -> None:
        if trained.exists():
            trained.replace(model / "model.safetensors")
        made(connector, *options)

    monkeypatch.setattr(CargoholdConnector, "__init__", make_later)
    with pytest.raises(ConfigError, match=r"tiers='.*/model\.safetensors' is not possible: it was changed or replaced"):
        start(str(model), {**RESTARTED, "tiers": [tier]})
    monkeypatch.setattr(compat, "has_own_process", lambda: False)
    start(str(model), {**RESTARTED, "tiers": [tier]})


def test_an_engine_that_is_forked_counts_from_its_own_beginning() -> None:
    """A program may start engines one after the other, and save the model of the next one in between."""
    code = """
import os, sys
sys.modules["vllm"] = None  # nothing of it is needed, and it takes 12 s to be imported
from cargohold.integrations.vllm import plugin
times = [plugin.ran_first_at()]
for _ in range(2):
    plugin.register()
    times.append(plugin.ran_first_at())
if os.fork() == 0:
    plugin.register()
    times.append(plugin.ran_first_at())
    assert times[0] is None and times[1] == times[2] < times[3], times
    print("told", flush=True)
    os._exit(0)
os.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["told"]
