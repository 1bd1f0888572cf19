"""``cargohold vllm-flags`` prints options that can be pasted, or says why they cannot work here."""

from __future__ import annotations

import builtins
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command import Command

ODD = '50% of it\'s $HOME \\ "x"'
"""A directory's name with all that shells and service managers look at."""


def transfer(line: str) -> dict[str, Any]:
    """What a shell makes of a printed line: the configuration of the connector."""
    words = shlex.split(line)
    config: dict[str, Any] = json.loads(words[words.index("--kv-transfer-config") + 1])
    return config


def test_host_memory_alone(cargohold: Command) -> None:
    result = cargohold("vllm-flags", "--host", "1MiB")
    assert result.status == 0, result.err
    assert result.out == (
        '--kv-transfer-config \'{"kv_connector": "CargoholdConnector", "kv_role": "kv_both", '
        '"kv_connector_extra_config": {"host_bytes": "1MiB"}}\'\n'
    )


def test_tiers_come_the_fastest_first_and_a_stop_waits_for_their_writes(cargohold: Command, tmp_path: Path) -> None:
    args = ["--host", "1MiB", "--shared", f"file://{tmp_path}/shared", "--disk", f"{tmp_path}/kv:2GiB", "--lazy"]
    result = cargohold("vllm-flags", *args, "--role", "consumer")
    assert result.status == 0, result.err
    config = transfer(result.out)
    assert config["kv_role"] == "kv_consumer"
    assert config["kv_connector_extra_config"] == {
        "mode": "lazy",
        "host_bytes": "1MiB",
        "tiers": [
            {"kind": "disk", "directory": f"{tmp_path}/kv", "max_bytes": "2GiB"},
            {"kind": "shared", "url": f"file://{tmp_path}/shared"},
        ],
    }
    assert result.out.endswith("--shutdown-timeout 10\n")
    assert not list(tmp_path.iterdir()), "nothing is made by looking"


def test_every_format_keeps_odd_names(cargohold: Command, tmp_path: Path) -> None:
    args = ["vllm-flags", "--host", "1MiB", "--disk", f"{tmp_path / ODD}:2GiB"]
    wanted = transfer(cargohold(*args).out)
    assert wanted["kv_connector_extra_config"]["tiers"][0]["directory"] == str(tmp_path / ODD)
    in_yaml = cargohold(*args, "--format", "yaml").out.splitlines()[0]
    assert json.loads(in_yaml.removeprefix("kv-transfer-config: ")) == wanted, "JSON is YAML"
    for_systemd = cargohold(*args, "--format", "systemd").out
    quoted = for_systemd.removeprefix("--kv-transfer-config '").partition("' --")[0]
    assert "'" not in quoted
    # As systemd.service(5) and systemd.syntax(7) read it: %% and $$ are one each, and backslashes begin escapes of C.
    read = quoted.replace("%%", "%").replace("$$", "$").replace("\\x27", "'").replace("\\\\", "\\")
    assert json.loads(read) == wanted


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--host", "9000TiB"], "--host='9000TiB' is not possible: this machine allows"),
        (["--host", "8Gigs"], "--host='8Gigs' is not possible"),
        (["--host", "1MiB", "--disk", "/nvme/kv"], "say how much it may take, such as /nvme/kv:200GiB"),
        (["--host", "1MiB", "--disk", "/dev/null/kv:1GiB"], "--disk='/dev/null/kv' is not possible"),
        (["--host", "1MiB", "--shared", "ftp://host/kv"], "--shared='ftp://host/kv' is not possible"),
        (["--host", "1MiB", "--role", "producer"], "give --shared URL too"),
    ],
)
def test_what_cannot_work_is_refused_by_the_name_it_has_here(args: list[str], said: str, cargohold: Command) -> None:
    result = cargohold("vllm-flags", *args)
    assert (result.status, result.out) == (2, "")
    assert said in result.err and "kv_connector_extra_config" not in result.err


def test_another_machine_may_have_what_this_one_has_not(cargohold: Command) -> None:
    result = cargohold("vllm-flags", "--host", "9000TiB", "--disk", "/dev/null/kv:1GiB", "--elsewhere")
    assert result.status == 0 and result.err == ""


def test_it_needs_no_package_of_the_terminal(cargohold: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside vLLM's environment, Cargohold comes without them."""
    lacking = {"typer", "rich", "packaging", "torch", "transformers"}
    imported = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] in lacking:
            raise ImportError(name)
        return imported(name, *rest)

    for name in [name for name in sys.modules if name.startswith("cargohold.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)
    assert cargohold("vllm-flags", "--host", "1MiB").status == 0
    monkeypatch.setattr("cargohold.cli.find_spec", lambda _: None)
    refused = cargohold("--version")
    assert (refused.status, refused.err) == (
        2,
        "cargohold: all commands but vllm-flags need packaging, rich, typer: pip install 'cargohold[cli]'\n",
    )


def test_it_is_among_the_commands(cargohold: Command) -> None:
    assert "vllm-flags" in cargohold("--help").out


DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"(?m)^\| [^|]+ \| `(--host [^`]+)` \| (.*) \|$")
SHOWN = re.compile(r"(?m)^\$ cargohold (vllm-flags .*)\n((?:(?!```).*\n)*)")


@pytest.mark.parametrize(("args", "shown"), ROW.findall((DOCS / "vllm.md").read_text(encoding="utf-8")))
def test_the_page_shows_what_is_printed(args: str, shown: str, cargohold: Command) -> None:
    result = cargohold("vllm-flags", *args.replace("URL", "s3://bucket/kv").split(), "--elsewhere")
    assert result.status == 0, result.err
    for part in re.findall(r"`([^`]+)`", shown):
        assert part in result.out


def test_the_short_answer_shows_what_is_printed(cargohold: Command) -> None:
    ((command, shown),) = SHOWN.findall((DOCS / "how-to.md").read_text(encoding="utf-8"))
    assert cargohold(*command.split(), "--elsewhere").out.split() == shown.split()  # shown in lines that fit the page
