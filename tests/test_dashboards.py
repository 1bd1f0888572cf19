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
from pathlib import Path
from typing import Any
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
