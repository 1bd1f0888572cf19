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
import yaml  # type: ignore[import-untyped]  # its types are a package of their own

from cargohold.cli import vllm_flags
from tests.command import Command
from tests.servers import capacity, free_port, key_value_server, metrics_server

ODD = '50% of it\'s $HOME \\ "x"'
"""A directory's name with all that shells and service managers look at."""


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment with vLLM, in which what cannot work is refused."""
    monkeypatch.setattr(vllm_flags, "installed_version", {"vllm": "0.32.0"}.get)


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


def test_several_disks_and_stores_are_several_tiers(cargohold: Command, tmp_path: Path) -> None:
    """The last of two won, silently."""
    disks = [f"{tmp_path}/{name}:1GiB" for name in "ab"]
    stores = [f"file://{tmp_path}/{name}" for name in "cd"]
    args = [
        word for name, each in (("--disk", disks), ("--shared", stores)) for value in each for word in (name, value)
    ]
    tiers = transfer(cargohold("vllm-flags", "--host", "1MiB", *args).out)["kv_connector_extra_config"]["tiers"]
    assert [tier.get("directory", tier.get("url")) for tier in tiers] == [f"{tmp_path}/a", f"{tmp_path}/b", *stores]


@pytest.mark.usefixtures("vllm")
def test_a_store_is_tried_out_and_nothing_stays_there(cargohold: Command, caplog: pytest.LogCaptureFixture) -> None:
    import redis  # noqa: PLC0415  # an extra

    with key_value_server("valkey") as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        result = cargohold("vllm-flags", "--host", "1MiB", "--shared", url)
        assert (result.status, caplog.text) == (0, "")
        client = redis.Redis.from_url(url)
        assert client.info("commandstats")["cmdstat_set"]["calls"] == 1, "it was asked"
        assert not list(client.scan_iter())
        client.close()


@pytest.mark.usefixtures("vllm")
def test_a_store_that_nobody_answers_for_is_printed_with_a_warning(
    cargohold: Command, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine starts without it, too."""
    result = cargohold("vllm-flags", "--host", "1MiB", "--shared", f"redis://127.0.0.1:{free_port()}/0")
    assert result.status == 0 and "does not answer yet" in caplog.text


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--host", "9000TiB"], "--host='9000TiB' is not possible: this machine allows"),
        (["--host", "8Gigs"], "--host='8Gigs' is not possible"),
        (["--host", "1MiB", "--disk", "/nvme/kv"], "add its maximum size, such as /nvme/kv:200GiB"),
        (["--host", "1MiB", "--disk", "/dev/null/kv:1GiB"], "--disk='/dev/null/kv' is not possible"),
        (["--host", "1MiB", "--disk", "/proc/kv:1GiB"], "--disk='/proc/kv' is not possible"),
        (["--host", "1MiB", "--shared", "ftp://host/kv"], "--shared='ftp://host/kv' is not possible"),
        (["--host", "1MiB", "--role", "producer"], "add --shared URL"),
    ],
)
def test_what_cannot_work_is_refused_by_the_name_it_has_here(args: list[str], said: str, cargohold: Command) -> None:
    result = cargohold("vllm-flags", *args)
    assert (result.status, result.out) == (2, "")
    assert said in result.err and "kv_connector_extra_config" not in result.err


def test_where_vllm_is_not_nothing_is_refused_and_what_is_printed_is_called_unchecked(cargohold: Command) -> None:
    result = cargohold("vllm-flags", "--host", "9000TiB")
    assert result.status == 0 and transfer(result.out)["kv_connector_extra_config"] == {"host_bytes": "9000TiB"}
    unchecked, refused = result.err.splitlines()
    assert "so the output is unchecked" in unchecked and "--host='9000TiB' is not possible" in refused


@pytest.mark.parametrize(
    ("host", "warns"), [("49GiB", False), ("5GiB", False), ("4GiB", True)], ids=["as much again", "a tenth", "less"]
)
def test_device_pool_and_host_memory_are_counted_together(host: str, warns: bool, cargohold: Command) -> None:
    result = cargohold("vllm-flags", "--host", host, "--device", "49GiB", "--elsewhere")
    assert ("device pool 49 GiB, host memory " in result.err and ": together 5" in result.err) or not warns
    assert ("adds less than a tenth" in result.err) == warns


WORDS = ["--host", "1GiB", "--disk", "/kv/$(POD_NAME):2GiB", "--engine", "7GiB", "--elsewhere"]


def test_for_kubernetes_it_is_a_patch_with_arguments_memory_and_volumes(cargohold: Command) -> None:
    args = [*WORDS, "--shared", "s3://bucket/kv", "--shared", "file:///mnt/kv", "--", "meta/model", "--port", "80"]
    patch = yaml.safe_load(cargohold("vllm-flags", "--format", "kubernetes", *args).out)
    pod = patch["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"] == shlex.split(cargohold("vllm-flags", *args).out), "as in a shell"
    assert container["args"][:3] == ["meta/model", "--port", "80"]
    assert container["resources"] == {"requests": {"memory": "8Gi"}, "limits": {"memory": "8Gi"}}
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {"kv-0": "/kv", "kv-shared-0": "/mnt/kv"}, "a directory per pod is made inside the volume"
    assert {volume["name"] for volume in pod["volumes"]} == mounted.keys()
    assert [env["name"] for env in container["env"]] == ["POD_NAME"]
    assert container["envFrom"] == [{"secretRef": {"name": "kv-store"}}]
    assert pod["terminationGracePeriodSeconds"] > vllm_flags.SHUTDOWN_TIMEOUT_S


def test_for_compose_it_is_a_file_to_merge(cargohold: Command) -> None:
    args = ["--host", "1GiB", "--disk", f"/{ODD}:2GiB", "--elsewhere", "--", "meta/model"]
    service = yaml.safe_load(cargohold("vllm-flags", "--format", "compose", *args).out)["services"]["vllm"]
    assert [word.replace("$$", "$") for word in service["command"]] == shlex.split(cargohold("vllm-flags", *args).out)
    assert (service["mem_limit"], service["volumes"][0]["target"]) == ("17g", f"/{ODD}".replace("$", "$$"))


def test_what_is_printed_says_how_to_print_it_again(cargohold: Command) -> None:
    args = ["--format", "kubernetes", *WORDS]
    first = cargohold("vllm-flags", *args).out
    command = first.splitlines()[0].removeprefix("# cargohold ")
    assert cargohold(*shlex.split(command)).out == first


def test_another_machine_may_have_what_this_one_has_not(cargohold: Command) -> None:
    result = cargohold("vllm-flags", "--host", "9000TiB", "--disk", "/dev/null/kv:1GiB", "--elsewhere")
    assert result.status == 0 and result.err == ""


def test_it_needs_no_package_of_the_terminal(cargohold: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside vLLM's environment, Cargohold comes without them."""
    lacking = {"typer", "rich", "packaging", "torch", "transformers"}
    imported = builtins.__import__

    def refuse(name: str, *rest: Any, **named: Any) -> Any:
        if name.partition(".")[0] in lacking:
            raise ImportError(name)
        return imported(name, *rest, **named)

    for name in [name for name in sys.modules if name.startswith("cargohold.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)
    assert cargohold("vllm-flags", "--host", "1MiB").status == 0
    monkeypatch.setattr("cargohold.cli.find_spec", lambda _: None)
    refused = cargohold("--version")
    assert (refused.status, refused.err) == (
        2,
        "cargohold: all commands but vllm-flags and vllm-bench need packaging, rich, typer: pip install 'cargohold[cli]'\n",
    )


def test_they_are_among_the_commands(cargohold: Command) -> None:
    assert {"vllm-flags", "vllm-bench"} <= set(cargohold("--help").out.split())


# --- a benchmark as large as the caches -------------------------------------------------------------------------------


def test_a_benchmark_has_more_prefixes_than_the_pool_holds_and_fewer_than_both(cargohold: Command) -> None:
    sizes = [("device", 0, 200_000), ("host", 0, 100_000), ("device", 1, 200_000), ("host", 1, 100_000), ("disk", 0, 9)]
    with metrics_server(*(capacity(*each) for each in sizes)) as address:
        result = cargohold("vllm-bench", address)
    words = shlex.split(result.out)
    asked = {
        name: words[words.index(f"--{name}") + 1] for name in ("model", "num-prompts", "prefix-repetition-num-prefixes")
    }
    prefixes = int(asked["prefix-repetition-num-prefixes"])
    assert 400_000 < prefixes * 2112 < 600_000, "together with both engines"
    assert (asked["model"], int(asked["num-prompts"])) == ("my model", 4 * prefixes)


def test_a_benchmark_needs_a_server_with_cargohold(cargohold: Command) -> None:
    with metrics_server('vllm:num_requests_running{engine="0"} 0.0\n') as address:
        refused = cargohold("vllm-bench", address)
    assert (refused.status, refused.out) == (1, "") and "start it with the output of vllm-flags" in refused.err
    nobody = cargohold("vllm-bench", f"http://127.0.0.1:{free_port()}")
    assert nobody.status == 1 and "/metrics cannot be read" in nobody.err


# --- the pages --------------------------------------------------------------------------------------------------------


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
