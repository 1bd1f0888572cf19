"""Write what commands print of ``deploy``, and check all of it against published schemas: ``python tools/manifests.py``.

* A file whose first line is ``# cargohold vllm-flags ...`` is what that command prints.
* ``prometheusrule.yaml`` holds the alerts of ``dashboards/alerts.yml``.
* Where a comment further down names that command, the file has the value of ``--kv-transfer-config`` that it prints.

``--check`` writes nothing. Overlays are built as ``kubectl apply -k`` builds them, and every object is checked against the
schema of Kubernetes or of the Prometheus operator; files of Compose and workflows of CI against theirs. Exits with 1 if
something differs. Asks no network.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from cloudcoil.models.prometheus_operator import v1 as prometheus_operator

from cargohold.cli import vllm_flags

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
RULE = DEPLOY / "kubernetes" / "monitoring" / "prometheusrule.yaml"
ALERTS = ROOT / "dashboards" / "alerts.yml"
BIN = Path(sys.executable).parent
KUBERNETES = "1.37"
COMMAND = re.compile(r"(?m)^# +cargohold vllm-flags (.*)$")
UNCHECKED = DEPLOY / "examples"
"""Resources whose schemas no package has."""


def main() -> int:
    """Write, or check; returns the exit status."""
    is_check = "--check" in sys.argv
    problems = []
    for file, text in made():
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            problems.append(f"{file.relative_to(ROOT)} is old; run python tools/manifests.py")
            if not is_check:
                file.write_text(text, encoding="utf-8")
    problems = [*(problems if is_check else ()), *foreign_arguments(), *wrong_objects(), *wrong_files()]
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    return 1 if problems else 0


def made() -> Iterator[tuple[Path, str]]:
    """Files that commands print, and what is to stand in them."""
    for file in DEPLOY.rglob("cargohold.yaml"):
        command = COMMAND.match(file.read_text(encoding="utf-8"))
        assert command is not None, f"{file} does not begin with the command that prints it"
        yield file, printed(command[1])
    alerts = ALERTS.read_text(encoding="utf-8")
    groups = "".join(f"  {line}" for line in alerts[alerts.index("groups:") :].splitlines(keepends=True))
    head = "apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  name: cargohold\nspec:\n"
    yield RULE, f"# Made by tools/manifests.py of dashboards/alerts.yml.\n{head}{groups}"


def printed(words: str) -> str:
    """What ``cargohold vllm-flags`` prints."""
    out = StringIO()
    with redirect_stdout(out), redirect_stderr(StringIO()):
        assert vllm_flags.main(shlex.split(words)) == 0, words
    return out.getvalue()


def foreign_arguments() -> Iterator[str]:
    """Examples without the configuration that the command prints, which they name."""
    for file in UNCHECKED.glob("*.yaml"):
        text = file.read_text(encoding="utf-8")
        command = COMMAND.search(text)
        config = re.search(r"\{.*\}", printed(command[1])) if command else None
        if config is None or not any(config[0] in value for value in texts(yaml.safe_load(text))):
            yield f"{file.relative_to(ROOT)}: it has not the --kv-transfer-config that its command prints"


def texts(value: Any) -> Iterator[str]:
    """All texts in a value."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts(item)
    elif isinstance(value, str):
        yield value


def wrong_objects() -> Iterator[str]:
    """Overlays that cannot be built, and objects in them that are not as their schemas say."""
    places = sorted(file.parent for file in DEPLOY.rglob("kustomization.yaml"))
    with ThreadPoolExecutor() as threads:
        built = list(threads.map(lambda place: run("kubectl", "kustomize", str(place)), places))
    for place, (text, error) in zip(places, built, strict=True):
        name = place.relative_to(ROOT)
        if error:
            yield f"{name}: {error}"
            continue
        for each in yaml.safe_load_all(text):
            if problem := wrong(each):
                yield f"{name}, {each['kind']} {each['metadata']['name']}: {problem}"


def wrong(resource: dict[str, Any]) -> str:
    """What is wrong with an object; empty if nothing."""
    if resource["apiVersion"].startswith("monitoring.coreos.com/"):
        try:
            read = getattr(prometheus_operator, resource["kind"]).model_validate(resource)
        except ValueError as error:
            return str(error)
        # Its classes pass over names that they do not know.
        known = read.model_dump(by_alias=True, exclude_unset=True, mode="json")
        return "" if known == resource else f"unknown names beside {json.dumps(known)}"
    try:
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        return f"Kubernetes {KUBERNETES} has no {resource['kind']} in {resource['apiVersion']}"
    except kubernetes_validate.ValidationError as error:
        return str(error)
    return ""


def wrong_files() -> Iterator[str]:
    """Files of Compose and workflows of CI that are not as their schemas say."""
    for schema, files in (
        ("vendor.compose-spec", DEPLOY.glob("compose/*.yaml")),
        ("vendor.github-workflows", ROOT.glob(".github/workflows/*.yml")),
    ):
        text, error = run("check-jsonschema", "--builtin-schema", schema, *map(str, files))
        if error is not None:
            yield f"{text}{error}"


def run(program: str, *words: str) -> tuple[str, str | None]:
    """The output of a program of this environment, and, if it failed, what it said of it."""
    done = subprocess.run([BIN / program, *words], capture_output=True, text=True, check=False)  # noqa: S603  # our own
    return done.stdout, done.stderr if done.returncode else None


if __name__ == "__main__":
    sys.exit(main())
