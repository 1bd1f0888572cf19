"""What ``cargohold vllm-flags`` prints, vLLM takes: its parser reads it, and an engine and a server run with it."""

from __future__ import annotations

import json
import shlex
import shutil
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.cli import vllm_flags
from examples.vllm_server import serving, why_turned_off
from tests.vllm.common import make_prompts, restored
from tests.vllm.models import save_tokenizer

HOST = ("--host", "64MiB")
DISK = ("--disk", "{place}/kv:256MiB")
SHARED = ("--shared", "file://{place}/shared")


def printed(args: tuple[str, ...], place: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints for these options, with a directory of the test's own in place of ``{place}``."""
    assert vllm_flags.main([word.replace("{place}", str(place)) for word in args]) == 0
    return capsys.readouterr().out


def parsed(words: list[str]) -> Any:
    """What vLLM's own parser makes of words behind ``vllm serve MODEL``."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415  # after the environment has been set
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415  # the same

    return AsyncEngineArgs.from_cli_args(AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(words))


@pytest.mark.parametrize(
    ("args", "restores"),
    [
        (HOST, True),
        ((*HOST, *DISK), True),
        ((*HOST, *SHARED, "--role", "producer"), True),
        ((*HOST, *SHARED, "--role", "consumer"), False),
        ((*HOST, "--lazy"), True),
    ],
    ids=["host", "disk", "producer", "consumer", "lazy"],
)
def test_an_engine_runs_with_each_common_case(
    args: tuple[str, ...],
    restores: bool,
    vllm_model: Callable[[str], str],
    start: Callable[..., Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],  # vLLM 0.28 asks for the number of the standard output
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = vllm_model("llama")
    options = parsed([*shlex.split(printed(args, tmp_path, capfd)), "--model", model])
    config = options.kv_transfer_config
    assert getattr(options, "shutdown_timeout", 0) == (10 if "tiers" in config.kv_connector_extra_config else 0)
    role = {"kv_role": config.kv_role}
    engine = start(model, config.kv_connector_extra_config, transfer=role, num_blocks=24, max_model_len=512)
    prompts = make_prompts(3, 330)
    first = [engine.ask([prompt], 2)[0] for prompt in prompts]
    # On a busy machine, copies may come too late for the first round of what is kept only shortly before it would be evicted.
    rounds = [[engine.ask([prompt], 2)[0] for prompt in prompts] for _ in range(3)]
    assert "offloading is off" not in caplog.text
    assert all([answer.tokens for answer in again] == [answer.tokens for answer in first] for again in rounds)
    assert any(restored(again) > 0 for again in rounds) == restores, (
        "a consumer alone stores nothing, so it finds nothing"
    )


@pytest.mark.long  # a server of its own: the engines above are in this process
def test_a_server_runs_with_what_is_printed_for_its_file(
    vllm_model: Callable[[str], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, log, file = tmp_path / "llama", tmp_path / "log", tmp_path / "serve.yaml"
    shutil.copytree(vllm_model("llama"), model)
    save_tokenizer(str(model))
    file.write_text(printed((*HOST, *DISK, "--format", "yaml"), tmp_path, capsys), encoding="utf-8")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    options = {
        "config": file,
        "served-model-name": "tiny",
        "dtype": "float32",
        "max-model-len": 1024,
        "block-size": 32,
        "num-gpu-blocks-override": 40,
        "enforce-eager": True,
    }
    with serving(str(model), log, options=options) as address:
        asked = {"model": "tiny", "prompt": make_prompts(1, 330)[0], "max_tokens": 2}
        request = urllib.request.Request(
            f"{address}/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 2
    said = log.read_text(encoding="utf-8")
    assert "exclusive: 64 MiB of host memory" in said and f"below it: {tmp_path}/kv, 256 MiB at most" in said
    assert why_turned_off(log) is None
