"""Dashboard and alerts ask for metrics that there are, and a real Prometheus answers them from a real server."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml  # type: ignore[import-untyped]  # its types are a package of their own

from cargohold import DiskTierConfig, OffloadConfig
from tests.serve.running import call, running

DASHBOARDS = Path(__file__).parents[1] / "dashboards"
MANUAL = (DASHBOARDS.parent / "docs" / "operating.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((DASHBOARDS / "grafana.json").read_text(encoding="utf-8"))
RULES = [
    rule
    for group in yaml.safe_load((DASHBOARDS / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
QUERIES = {
    f"{panel['title']}, {target['refId']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
} | {rule["alert"]: rule["expr"] for rule in RULES}
EMPTY_WHERE_ALL_IS_WELL = (
    *(
        "What is out of use",
        "Cargohold",
        "Failures",
        "Chunks that did not",
        "How long chunks stay",
        "What requests wait",
    ),
)
"""Starts of the titles of panels and alerts that show nothing unless something fails, or takes its time."""


def listed() -> dict[str, set[str]]:
    """The labels of each sample in the manual's table."""
    found: dict[str, set[str]] = {}
    for names, labels, what in re.findall(r"(?m)^\| (`cargohold_.*?) \|(.*?)\|.*?\| \w+ \|(.*)\|$", MANUAL):
        for name in re.findall(r"`(\w+)`", names):
            own = set(re.findall(r"`(\w+)`", labels))
            ends = ("_bucket", "_sum", "_count") if "histogram" in what else ("",)
            found |= {f"{name}{end}": own | ({"le"} if end == "_bucket" else set()) for end in ends}
    return found


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_every_query_is_about_metrics_and_labels_that_there_are(query: str) -> None:
    samples = listed()
    asked = re.findall(r"(cargohold_\w+)(?:\{(.*?)\})?", query)
    assert asked and {name for name, _ in asked} <= samples.keys()
    labels = set.intersection(*(samples[name] for name, _ in asked)) | {"instance"}
    for name, selectors in asked:
        assert set(re.findall(r"(\w+)!?=", selectors)) <= samples[name] | {"instance"}
    for grouped in re.findall(r" by \((.*?)\)", query):
        assert set(re.findall(r"\w+", grouped)) <= labels


@pytest.mark.parametrize("panel", DASHBOARD["panels"], ids=lambda panel: panel["title"])
def test_legends_name_labels_that_the_query_keeps(panel: Any) -> None:
    for target in panel["targets"]:
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert re.search(rf" by \([^)]*\b{label}\b", target["expr"]), target["expr"]


def test_panels_do_not_lie_on_each_other() -> None:
    places = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for at in (panel["gridPos"],)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(places) == len(set(places)) and max(x for x, _ in places) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_manual_lists_the_alerts() -> None:
    table = MANUAL.split("## Four alerts")[1].split("\n## ")[0]
    assert re.findall(r"(?m)^\| `(\w+)` ", table) == [rule["alert"] for rule in RULES]
    assert len(RULES) == 4


# --- with Grafana's own types -----------------------------------------------------------------------------------------


def faults_in(dashboard: dict[str, Any]) -> list[str]:
    """What of a dashboard Grafana's types do not know, or take otherwise. Grafana itself is in no package registry."""
    reason = "Grafana's types are not installed: grafana-foundation-sdk"
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason=reason)
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins", reason=reason)
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder", reason=reason)
    plugins.register_default_plugins()
    read = models.Dashboard.from_json(dashboard)
    written = json.loads(encoder.JSONEncoder().encode(read))
    return [*lost(dashboard, written, "dashboard"), *misfits(read, type(read), "dashboard")]


def lost(given: Any, written: Any, path: str) -> Iterator[str]:
    """Fields that are no more there after reading and writing: the types have no such field."""
    if isinstance(given, dict) and isinstance(written, dict):
        for name, value in given.items():
            if name not in written:
                yield f"{path}.{name} is unknown"
            else:
                yield from lost(value, written[name], f"{path}.{name}")
    elif isinstance(given, list) and isinstance(written, list) and len(given) == len(written):
        for at, pair in enumerate(zip(given, written, strict=True)):
            yield from lost(*pair, f"{path}[{at}]")
    elif given != written:
        yield f"{path} is {written!r} after it was {given!r}"


def misfits(value: Any, kind: Any, path: str) -> Iterator[str]:
    """Values that are not of the types that are written beside them: reading checks no types."""
    if get_origin(kind) in (Union, UnionType):
        found = [list(misfits(value, one, path)) for one in get_args(kind)]
        yield from found[0] if all(found) else ()
        return
    if kind is object and hasattr(value, "to_json"):  # what panels of this kind have
        kind = type(value)
    if not is_one(value, kind):
        yield f"{path} is {value!r}"
        return
    for name, item, hint in parts(value, kind):
        yield from misfits(item, hint, f"{path}{name}")


def parts(value: Any, kind: Any) -> Iterator[tuple[str, Any, Any]]:
    """What a value consists of: name, value and type of each part."""
    if get_origin(kind) is list:
        yield from ((f"[{at}]", item, *get_args(kind)) for at, item in enumerate(value))
    elif get_origin(kind) is dict:
        yield from ((f".{name}", item, get_args(kind)[1]) for name, item in value.items())
    elif hasattr(kind, "from_json"):
        read = kind.from_json(value) if isinstance(value, dict) else value
        yield from ((f".{name}", getattr(read, name), hint) for name, hint in get_type_hints(type(read)).items())


def is_one(value: Any, kind: Any) -> bool:
    """Whether a value is of a type, or one of those that are listed; what it consists of may still be wrong."""
    if hasattr(kind, "from_json") and isinstance(value, dict):  # left as it is where there is a choice of types
        return True
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return value in [member.value for member in kind]
    if isinstance(value, bool):
        return kind in (bool, object)
    return isinstance(value, int | float if kind is float else get_origin(kind) or kind)


def test_grafanas_types_know_every_field_and_value_of_the_dashboard() -> None:
    assert not faults_in(DASHBOARD)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"refreshes": "10s"}, "dashboard.refreshes is unknown"),
        ({"graphTooltip": 7}, "dashboard.graph_tooltip is 7"),
        ({"panels": [{**DASHBOARD["panels"][0], "gridPos": {"x": 0, "y": 0, "w": "4", "h": 6}}]}, "grid_pos.w is '4'"),
        ({"panels": [{**DASHBOARD["panels"][0], "options": {"colorMode": "loud"}}]}, "color_mode is 'loud'"),
        (
            {"panels": [{**DASHBOARD["panels"][0], "targets": [{"refId": "A", "exp": "up"}]}]},
            "targets[0].exp is unknown",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_dashboard_that_grafana_would_not_take_is_noticed(change: dict[str, Any], fault: str) -> None:
    assert any(found.endswith(fault) for found in faults_in({**DASHBOARD, **change}))


# --- with a real Prometheus -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tools() -> dict[str, str]:
    """Paths of Prometheus's programs."""
    found = {name: shutil.which(name) for name in ("prometheus", "promtool")}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        pytest.skip(f"not installed here: {' and '.join(missing)} (apt-get install prometheus)")
    return {name: str(path) for name, path in found.items()}


def test_prometheus_takes_the_rules(tools: dict[str, str]) -> None:
    for check, file in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        checked = subprocess.run(
            [tools["promtool"], "check", check, DASHBOARDS / file], capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stderr


class Prometheus:
    """A real one, that scrapes an engine every half a second."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **query: str) -> Any:
        with urlopen(f"{self._url}{path}?{urlencode(query)}", timeout=10) as answer:
            return json.load(answer)["data"]

    def values(self, query: str) -> list[Any]:
        # What Grafana fills in.
        query = query.replace("$__rate_interval", "1m").replace("$instance", ".*")
        return self.ask("/api/v1/query", query=query)["result"]  # type: ignore[no-any-return]  # JSON

    def wait_for(self, query: str) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if self.values(query):
                    return
            except (URLError, ConnectionError):
                pass  # it starts
            time.sleep(0.1)
        pytest.fail(f"Prometheus has no answer to {query}")


@pytest.fixture(scope="module")
def prometheus(
    tools: dict[str, str], chat_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """Prometheus beside a server that has stored, evicted, fetched and loaded."""
    directory = tmp_path_factory.mktemp("prometheus")
    disk = DiskTierConfig(directory=tmp_path_factory.mktemp("disk"), max_bytes="64MiB", reserve_bytes=0)
    offload = OffloadConfig(host_bytes="512KiB", tiers=[disk], restore="always")
    with running(chat_model, offload=offload, num_device_blocks=30, max_model_len=350) as server:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        config = yaml.safe_load((DASHBOARDS / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
        config["rule_files"] = [os.fspath(DASHBOARDS / "alerts.yml")]
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.url.removeprefix("http://")]
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        arguments = [
            tools["prometheus"],
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with (directory / "log").open("w") as log, subprocess.Popen(arguments, stdout=log, stderr=log) as process:
            try:
                asked = Prometheus(f"http://127.0.0.1:{port}")
                asked.wait_for("cargohold_up")
                for at in [*range(8)] * 2:
                    body = {"model": "chat", "prompt": f"{at}. {'The ship sails on. ' * 40}", "max_tokens": 2}
                    assert call(server, "/v1/completions", body).status == 200
                asked.wait_for("cargohold_load_tokens_total > 0 and rate(cargohold_load_tokens_total[1m]) > 0")
                asked.wait_for("rate(cargohold_removed_chunks_total[1m]) > 0")
                asked.wait_for("rate(cargohold_load_seconds_sum[1m]) > 0")
                yield asked
            finally:
                process.terminate()
                process.wait(30)


@pytest.mark.parametrize("title", QUERIES)
def test_a_real_prometheus_answers_every_query(prometheus: Prometheus, title: str) -> None:
    values = prometheus.values(QUERIES[title])
    assert values or title.startswith(EMPTY_WHERE_ALL_IS_WELL)


def test_a_real_prometheus_evaluates_every_alert(prometheus: Prometheus) -> None:
    (group,) = prometheus.ask("/api/v1/rules")["groups"]
    assert [(rule["name"], rule["health"]) for rule in group["rules"]] == [(rule["alert"], "ok") for rule in RULES]
