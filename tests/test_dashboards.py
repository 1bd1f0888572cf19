"""Dashboard and alerts ask for metrics that there are, and a real Prometheus answers them from a real server."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml  # type: ignore[import-untyped]  # its types are a package of their own

from cargohold import DiskTierConfig, OffloadConfig
from cargohold.connector.tenants import Tenant
from cargohold.serve.scrape import metrics_url, scrape
from cargohold.serve.settings import ServeConfig, with_shares
from tests.serve.running import call, running, settle, wait_until

DASHBOARDS = Path(__file__).parents[1] / "dashboards"
MANUAL = (DASHBOARDS.parent / "docs" / "operating.md").read_text(encoding="utf-8")
METRICS = (DASHBOARDS.parent / "docs" / "api" / "metrics.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((DASHBOARDS / "grafana.json").read_text(encoding="utf-8"))
RULES = [
    rule
    for group in yaml.safe_load((DASHBOARDS / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
SHOWN = {
    f"{panel['title']}, {target['refId']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
}
QUERIES = SHOWN | {rule["alert"]: rule["expr"] for rule in RULES}
EMPTY_WHERE_ALL_IS_WELL = {"What is out of use, and why, A"}
"""Panels that show nothing unless something fails."""


def listed() -> dict[str, set[str]]:
    """The labels of each sample in the manual's table."""
    found: dict[str, set[str]] = {}
    for names, labels, what in re.findall(r"(?m)^\| (`cargohold_.*?) \|(.*?)\|.*?\| \w+ \|(.*)\|$", METRICS):
        for name in re.findall(r"`(\w+)`", names):
            own = set(re.findall(r"`(\w+)`", labels))
            ends = ("_bucket", "_sum", "_count") if "histogram" in what else ("",)
            found |= {f"{name}{end}": own | ({"le"} if end == "_bucket" else set()) for end in ends}
    return found


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_every_query_is_about_metrics_and_labels_that_there_are(query: str) -> None:
    samples = listed()
    asked = re.findall(r"(cargohold_\w+)(?:\{(.*?)\})?", query)
    assert asked
    assert {name for name, _ in asked} <= samples.keys()
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
    table = MANUAL.split("## Alerts")[1].split("\n## ")[0]
    assert re.findall(r"(?m)^\| `(\w+)` ", table) == [rule["alert"] for rule in RULES]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_no_alert_begins_anew_when_a_labels_text_changes(rule: Any) -> None:
    """A reason, or what is out of use, changes while the fault goes on."""
    samples, texts = listed(), {"what", "reason", "counter"}
    for name in re.findall(r"(cargohold_\w+)", rule["expr"]):
        kept = re.findall(rf" by \(([^)]*)\) \((?:rate\()?{name}", rule["expr"]) or [", ".join(samples[name])]
        assert not set(re.findall(r"\w+", " ".join(kept))) & texts


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


Series = Mapping[str, Sequence[float | None]]
"""Values by time series, at one scrape after the other; ``None`` where it was not there."""
INTERVAL_S = 15
METRICS_KEY = "for metrics"


def evaluated(tools: dict[str, str], series: Series, **wanted: Any) -> str:
    """What Prometheus's own evaluation has to say about ``wanted``, given what was scraped when; empty if it holds.

    No server, no clock: the scrapes fall where the test puts them.
    """
    inputs = [
        {"series": name, "values": " ".join("_" if value is None else repr(value) for value in values)}
        for name, values in series.items()
    ]
    test = {"interval": f"{INTERVAL_S}s", "input_series": inputs, **wanted}
    rules = {"rule_files": [os.fspath(DASHBOARDS / "alerts.yml")], "evaluation_interval": "15s", "tests": [test]}
    with NamedTemporaryFile("w", suffix=".yml") as file:
        yaml.safe_dump(rules, file)
        file.flush()
        told = subprocess.run(
            [tools["promtool"], "test", "rules", file.name], capture_output=True, text=True, check=False
        )
    return told.stdout + told.stderr if told.returncode else ""


@pytest.fixture(scope="module")
def scraped(chat_model: str, tmp_path_factory: pytest.TempPathFactory) -> Series:
    """What Prometheus would scrape of a server that stores, evicts, fetches and loads: before, and after each round."""
    disk = DiskTierConfig(directory=tmp_path_factory.mktemp("disk"), max_bytes="64MiB", reserve_bytes=0)
    config = ServeConfig(port=0, tenants=(Tenant(name="acme", key="acme", hard="90%"),), metrics_key=METRICS_KEY)
    offload = with_shares(OffloadConfig(host_bytes="512KiB", tiers=[disk], restore="always"), config)
    scrapes = []
    with running(chat_model, config, offload=offload, num_device_blocks=30, max_model_len=350) as server:
        for _ in range(3):
            settle(server)
            scrapes.append(scrape(metrics_url(server.url), METRICS_KEY).samples)
            for at in range(8):
                body = {"model": "chat", "prompt": f"{at}. {'The ship sails on. ' * 40}", "max_tokens": 2}
                assert call(server, "/v1/completions", body, {"x-api-key": "acme"}).status == 200
    found: dict[str, list[float | None]] = {'up{instance="engine"}': [1.0, 1.0, 1.0]}
    for name, labels in {(name, labels) for samples in scrapes for name, of in samples.items() for labels in of}:
        told = ", ".join(f"{label}={json.dumps(value)}" for label, value in sorted({*labels, ("instance", "engine")}))
        found[f"{name}{{{told}}}"] = [samples.get(name, {}).get(labels) for samples in scrapes]
    return found


@pytest.mark.parametrize("title", SHOWN)
def test_a_real_prometheus_answers_every_query(tools: dict[str, str], scraped: Series, title: str) -> None:
    # What Grafana fills in.
    query = SHOWN[title].replace("$__rate_interval", "1m").replace("$instance", ".*")
    expected = [] if title in EMPTY_WHERE_ALL_IS_WELL else [{"labels": "{}", "value": 1}]
    wanted = {"expr": f"count({query}) > bool 0", "eval_time": "30s", "exp_samples": expected}
    fault = evaluated(tools, scraped, promql_expr_test=[wanted])
    assert not fault, fault


def test_what_the_device_still_had_is_not_shown_as_restored(tools: dict[str, str]) -> None:
    found = {"device": 600.0, "host": 100.0, "computed": 300.0}
    series = {
        f'cargohold_prompt_tokens_total{{instance="a",tier="{tier}"}}': [0.0, tokens, 2 * tokens]
        for tier, tokens in found.items()
    }
    headline, beside = (
        query.replace("$__rate_interval", "1m").replace("$instance", ".*")
        for title, query in SHOWN.items()
        if title in ("Prompt tokens restored from tiers, A", "Prompt tokens still on the device, A")
    )
    wanted = [
        {"expr": f"round(100 * {query})", "eval_time": "30s", "exp_samples": [{"labels": "{}", "value": part}]}
        for query, part in ((headline, 10), (beside, 60))
    ]
    assert not evaluated(tools, series, promql_expr_test=wanted)


Alerts = list[tuple[str, str, dict[str, str]]]
SINCE = "cargohold_outage_since_timestamp_seconds"
TENANT = 'instance="a",tier="host",tenant="acme"'
ENGINE = {"instance": "a"}


def restoring(load_s: float) -> Series:
    """Two blocks restored in ``load_s`` seconds, and 1,000 tokens computed in 1 s, in each step of the series."""
    grown = {"load_tokens_total": 32, "load_seconds_sum": load_s, "wait_seconds_sum": 0}
    grown |= {"prefill_tokens_total": 1000, "prefill_seconds_total": 1}
    return {f'cargohold_{name}{{instance="a"}}': [at * each for at in range(200)] for name, each in grown.items()}


SCENES: dict[str, tuple[Series, Alerts]] = {
    "restoring costs more time than it saves": (
        restoring(2.0),
        [("50m", "CargoholdRestoringSlowerThanComputing", ENGINE)],
    ),
    "a few blocks were restored slowly, which costs next to nothing": (restoring(0.1), []),
    "a reason whose text changes is one outage": (
        {
            f'{SINCE}{{instance="a",tier="disk",what="writes",reason="full"}}': [9.0] * 30 + [0.0] * 30,
            f'{SINCE}{{instance="a",tier="disk",what="loads and writes",reason="error 5"}}': [None] * 30 + [9.0] * 30,
        },
        [("11m", "CargoholdTierOutOfUse", {**ENGINE, "tier": "disk"})],
    ),
    "the first damaged load of an engine": (
        {'cargohold_failures_total{instance="a",kind="load"}': [0.0] * 20 + [float(at) for at in range(1, 61)]},
        [("16m", "CargoholdLoadsFail", ENGINE)],
    ),
    "a server that is down": (
        {
            'up{instance="a",job="any"}': [1.0] * 4 + [0.0] * 40,
            'up{instance="of somebody else",job="any"}': [0.0] * 44,
            'cargohold_prompt_tokens_total{instance="a",job="any",tier="computed"}': [5.0] * 4 + [None] * 40,
        },
        [("8m", "CargoholdDown", {**ENGINE, "job": "any"})],
    ),
    "an engine that has stopped behind a server": (
        {'up{instance="a"}': [1.0] * 44, 'cargohold_up{instance="a"}': [1.0] * 4 + [0.0] * 40},
        [("8m", "CargoholdDown", ENGINE)],
    ),
    "a queue that is full": (
        {'cargohold_refused_requests_total{instance="a"}': [0.0] * 4 + [float(at) for at in range(40)]},
        [("8m", "CargoholdQueueFull", ENGINE)],
    ),
    "a tenant at its quota": (
        {
            f"cargohold_tenant_bytes{{{TENANT}}}": [99.0] * 200,
            f'cargohold_tenant_quota_bytes{{{TENANT},limit="hard"}}': [100.0] * 200,
            f'cargohold_tenant_quota_bytes{{{TENANT},limit="reserved"}}': [10.0] * 200,
        },
        [("40m", "CargoholdQuotaReached", {**ENGINE, "tier": "host", "tenant": "acme"})],
    ),
    "the first chunk that lies": (
        {
            f'cargohold_verified_chunks_total{{instance="a",tier="host",outcome="{outcome}"}}': [0.0] * 20 + [last] * 60
            for outcome, last in (("equal", 9.0), ("different", 1.0))
        },
        [("16m", "CargoholdKeptIsDifferent", {**ENGINE, "tier": "host"})],
    ),
    "all is well": (
        {
            'up{instance="a"}': [1.0] * 200,
            'cargohold_up{instance="a"}': [1.0] * 200,
            'cargohold_refused_requests_total{instance="a"}': [3.0] * 200,
            f"cargohold_tenant_bytes{{{TENANT}}}": [50.0] * 200,
            f'cargohold_tenant_quota_bytes{{{TENANT},limit="hard"}}': [100.0] * 200,
        },
        [],
    ),
}


@pytest.mark.parametrize("scene", SCENES)
def test_alerts_come_when_they_should_and_only_then(tools: dict[str, str], scene: str) -> None:
    series, expected = SCENES[scene]
    times = {at for at, _, _ in expected} or {"40m"}
    count = "count by (alertname, instance, job, tier, tenant) (ALERTS{alertstate='firing'})"
    samples = [
        {
            "labels": "{"
            + ", ".join(f'{name}="{value}"' for name, value in labels.items())
            + f', alertname="{alert}"}}',
            "value": 1,
        }
        for _, alert, labels in expected
    ]
    wanted = [{"expr": count, "eval_time": at, "exp_samples": samples} for at in times]
    fault = evaluated(tools, series, promql_expr_test=wanted)
    assert not fault, fault


def test_what_is_out_of_use_and_why_is_in_the_text_of_the_alert(tools: dict[str, str]) -> None:
    series, _ = SCENES["a reason whose text changes is one outage"]
    why = "loads and writes: error 5. Requests are served, and compute what they cannot load."
    alert = {
        "exp_labels": {**ENGINE, "tier": "disk", "severity": "warning"},
        "exp_annotations": {"summary": "disk of a is out of use", "description": why},
    }
    wanted = [{"eval_time": "11m", "alertname": "CargoholdTierOutOfUse", "exp_alerts": [alert]}]
    assert not evaluated(tools, series, alert_rule_test=wanted)


def test_a_real_prometheus_scrapes_a_server_and_evaluates_every_alert(
    tools: dict[str, str], chat_model: str, tmp_path: Path
) -> None:
    with running(chat_model, ServeConfig(port=0, metrics_key=METRICS_KEY)) as server, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        config = yaml.safe_load((DASHBOARDS / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
        config["rule_files"] = [os.fspath(DASHBOARDS / "alerts.yml")]
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.url.removeprefix("http://")]
        config["scrape_configs"][0]["authorization"] = {"credentials": METRICS_KEY}
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        arguments = [
            tools["prometheus"],
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with (tmp_path / "log").open("w") as log, subprocess.Popen(arguments, stdout=log, stderr=log) as process:
            try:
                wait_until(lambda: asked(port, "query", query="cargohold_up == 1 and on (instance) up == 1"))
                wait_until(lambda: {rule["health"] for rule in rules_of(port)} == {"ok"})
                assert [rule["name"] for rule in rules_of(port)] == [rule["alert"] for rule in RULES]
            finally:
                process.terminate()
                process.wait(30)


def asked(port: int, what: str, **query: str) -> Any:
    """What Prometheus answers; ``None`` while it starts."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/api/v1/{what}?{urlencode(query)}", timeout=10) as answer:
            data = json.load(answer)["data"]
    except (URLError, ConnectionError):
        return None
    return data.get("result", data)


def rules_of(port: int) -> list[dict[str, Any]]:
    return [rule for group in (asked(port, "rules") or {}).get("groups", []) for rule in group["rules"]]
