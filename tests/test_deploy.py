"""What is in ``deploy``: images, manifests, examples. ``make check`` compares manifests with commands and published schemas."""

from __future__ import annotations

import copy
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # its types are a package of their own

from tests.command import Command

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"

pytestmark = pytest.mark.skipif(not DEPLOY.is_dir(), reason="not in a source tree")


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def test_kserves_start_script_reads_the_arguments_as_they_are_printed(cargohold: Command) -> None:
    """It puts them behind ``vllm serve`` through ``eval``."""
    (service,) = documents("examples/kserve.yaml")
    (given,) = service["spec"]["template"]["containers"][0]["env"]
    script = "eval \"printf '%s\\n' ${VLLM_ADDITIONAL_ARGS}\""
    read = subprocess.run(["bash", "-c", script], env={given["name"]: given["value"]}, capture_output=True, check=True)
    args = ["--elsewhere", "--host", "64GiB", "--disk", "/nvme/kv:500GiB"]
    assert read.stdout.decode().splitlines() == shlex.split(cargohold("vllm-flags", *args).out)


def test_images_pin_every_package_that_they_add() -> None:
    """The image over vLLM's adds only these, and changes nothing of vLLM's."""
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    (added,) = re.findall(r'(?m)^ARG PACKAGES="(.*)"$', text)
    pinned = set(re.findall(r"(?m)^([\w-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8")))
    assert set(added.split()) <= pinned and "--no-deps --constraint" in text
    for name in ("Containerfile", "Containerfile.cpu"):
        text = (DEPLOY / name).read_text(encoding="utf-8")
        assert re.search(r"(?m)^USER \d+:0$", text) and re.search(r'(?m)^ENTRYPOINT \["', text)


def test_pods_may_take_longer_to_end_than_their_writes_do() -> None:
    (_, stateful) = documents("kubernetes/base/vllm.yaml")
    pod = stateful["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    for file in (DEPLOY / "kubernetes").rglob("cargohold.yaml"):
        (patch,) = yaml.safe_load_all(file.read_text(encoding="utf-8"))
        args = patch["spec"]["template"]["spec"]["containers"][0]["args"]
        if "--shutdown-timeout" in args:
            timeout = int(args[args.index("--shutdown-timeout") + 1])
            assert pod["terminationGracePeriodSeconds"] >= pause + timeout + 20, file


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "replicaz"), 2),
        (("spec", "replicas"), "two"),
        (("spec", "template", "spec", "containers", 0, "securityContext", "readOnlyRoot"), True),
        (("apiVersion",), "apps/v9"),
    ],
)
def test_an_object_that_is_not_as_its_schema_says_is_found(path: tuple[Any, ...], value: Any) -> None:
    manifests = pytest.importorskip("tools.manifests", reason="its schemas come with the development tools alone")
    (_, good) = documents("kubernetes/base/vllm.yaml")
    assert manifests.wrong(good) == ""
    bad = copy.deepcopy(good)
    place = bad
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert manifests.wrong(bad)


def test_a_monitor_with_an_unknown_name_is_found() -> None:
    manifests = pytest.importorskip("tools.manifests", reason="its schemas come with the development tools alone")
    (good,) = documents("kubernetes/monitoring/podmonitor.yaml")
    assert manifests.wrong(good) == ""
    assert "unknown names" in manifests.wrong(json.loads(json.dumps(good).replace('"path"', '"pfad"')))


def test_the_page_is_short() -> None:
    assert len((ROOT / "docs" / "deploy.md").read_text(encoding="utf-8").split()) <= 900
