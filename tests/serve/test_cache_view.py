"""What the server tells of its cache: in JSON, to Prometheus, and to whom."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cargohold import DiskTierConfig, OffloadConfig
from cargohold.cache.policies import ReplacementPolicy
from cargohold.serve.server import Server
from cargohold.serve.settings import ServeConfig, with_shares
from tests.serve.running import Reply, call, running, settle, wait_until

PROMPT = "The ship sails on. " * 40


def complete(server: Server, prompt: str = PROMPT, key: str | None = None, **fields: Any) -> Reply:
    body = {"model": "chat", "prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    return call(server, "/v1/completions", body, keyed(key))


def keyed(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def samples(server: Server) -> dict[tuple[str, ...], float]:
    text = call(server, "/metrics").body.decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def tiered(chat_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a disk, whose device holds less than two prompts."""
    disk = DiskTierConfig(directory=tmp_path_factory.mktemp("disk"), max_bytes="64MiB", reserve_bytes=0)
    offload = OffloadConfig(host_bytes="1MiB", tiers=[disk], restore="always")
    with running(chat_model, offload=offload, num_device_blocks=30, max_model_len=350) as server:
        for prompt in ("First. ", "Second. ") * 2:
            assert complete(server, prompt + PROMPT).status == 200
        yield server


def test_vessels_fill(tiered: Server) -> None:
    wait_until(lambda: call(tiered, "/cache").json["tiers"][2]["held_bytes"])
    shown = call(tiered, "/cache").json
    device, host, disk = shown["tiers"]
    assert [place["name"] for place in (device, host, disk)] == ["device", "host", "disk"]
    for place in (device, host, disk):
        assert 0 < place["held_bytes"] <= place["capacity_bytes"], place
    assert 0.99 * 64 * 2**20 < disk["capacity_bytes"] <= 64 * 2**20, "whole chunks, as in /metrics"
    assert host["in_bytes"] > 0 and host["out_bytes"] > 0 and disk["in_bytes"] > 0
    assert (disk["suspended"], disk["is_off"]) == (0, False)
    assert (shown["model"], shown["state"]) == ("chat", "serving")


def test_a_request_is_explained_where_its_prompt_came_from(tiered: Server) -> None:
    request_id = complete(tiered, "First. " + PROMPT).json["id"]
    told = call(tiered, f"/cache/explain/{request_id}").json
    assert sum(told["sources"].values()) == told["prompt_tokens"]
    assert told["sources"]["device"] + told["sources"].get("host", 0) + told["sources"].get("disk", 0) > 100
    assert told["notes"] and told["answers"][0]["notes"] == told["notes"]
    assert told["state"] == "finished" and told["ttft_s"] > 0
    assert request_id == call(tiered, "/cache").json["requests"][0]["id"]
    missing = call(tiered, "/cache/explain/nobody")
    assert (missing.status, missing.json["error"]["code"]) == (404, "request_not_found")


def test_a_response_explains_where_its_prompt_came_from_as_inside_vllm(tiered: Server) -> None:
    wishes = {"cargohold_explain": True}
    answer = complete(tiered, "Explain. " + PROMPT, kv_transfer_params=wishes).json
    notes = call(tiered, f"/cache/explain/{answer['id']}").json["notes"]
    assert answer["kv_transfer_params"] == {"cargohold_explain": {"restored_tokens": {}, "notes": notes}}
    assert notes and "kv_transfer_params" not in complete(tiered, "Explain. " + PROMPT).json


def test_history_adds_up_to_the_requests(tiered: Server) -> None:
    settle(tiered)
    shown = call(tiered, "/cache").json
    requests = [request for request in shown["requests"] if request["state"] == "finished"]
    assert sum(bucket["requests"] for bucket in shown["history"]) == len(requests)
    tokens = [sum(bucket["tokens"].values()) for bucket in shown["history"]]
    assert sum(tokens) == sum(request["prompt_tokens"] for request in requests)


def test_history_adds_up_to_the_bytes_that_were_moved(tiered: Server) -> None:
    def moved_down() -> float:
        shown = call(tiered, "/cache").json
        below, history = shown["tiers"][1:], shown["history"]
        assert sum(place["out_bytes"] for place in below) == sum(bucket["up_bytes"] for bucket in history) > 0
        assert sum(place["in_bytes"] for place in below) == sum(bucket["down_bytes"] for bucket in history) > 0
        assert below[0]["evicted_chunks"] == sum(bucket["evicted_chunks"] for bucket in history)
        return float(sum(bucket["down_bytes"] for bucket in history))

    settle(tiered)
    before = moved_down()
    assert complete(tiered, "Moved. " + PROMPT).status == 200
    settle(tiered)
    assert moved_down() > before


def test_prometheus_reads_the_same(tiered: Server) -> None:
    before = samples(tiered)
    answer = complete(tiered, "Third. ").json
    settle(tiered)
    after = samples(tiered)

    def grown(*name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("cargohold_requests_total", "/v1/completions", "finished") == 1
    assert grown("cargohold_generated_tokens_total") == 2
    assert grown("cargohold_prompt_tokens_total", "computed") == answer["usage"]["prompt_tokens"]
    assert grown("cargohold_time_to_first_token_seconds_count", "miss") == 1
    assert after["cargohold_up",] == 1 and after["cargohold_engine_requests", "running"] == 0
    assert after["cargohold_tier_ready_bytes", "disk"] == call(tiered, "/cache").json["tiers"][2]["held_bytes"]
    assert after["cargohold_stored_chunks_total", "host"] > 0
    assert after["cargohold_connector_level", "num_ready_chunks"] > 0


def test_no_prompt_and_no_answer_is_told(tiered: Server) -> None:
    text = complete(tiered, "A secret harbour. ").json["choices"][0]["text"]
    shown = call(tiered, "/cache").body.decode() + call(tiered, "/metrics").body.decode()
    assert "harbour" not in shown and text not in shown


def test_the_log_tells_what_is_suspended_and_why(tiered: Server) -> None:
    logging.getLogger("cargohold.tiers").warning("tier %s: loads are suspended: %s", "disk", "cable unplugged")
    (line,) = call(tiered, "/cache").json["log"][:1]
    assert (line["level"], line["text"]) == ("WARNING", "tier disk: loads are suspended: cable unplugged")


def test_tenants_see_their_own_requests_and_only_the_admin_resets(chat_model: str) -> None:
    config = ServeConfig(port=0, api_keys=("one", "two"), admin_key="all")
    with running(chat_model, config) as server:
        ids = {key: complete(server, key=key).json["id"] for key in ("one", "two")}

        def seen(key: str) -> set[str]:
            return {request["id"] for request in call(server, "/cache", headers=keyed(key)).json["requests"]}

        assert (seen("one"), seen("two"), seen("all")) == ({ids["one"]}, {ids["two"]}, set(ids.values()))
        whose = {one["id"]: one["tenant"] for one in call(server, "/cache", headers=keyed("all")).json["requests"]}
        assert whose == {ids["one"]: "key/1", ids["two"]: "key/2"}, "the admin is told whose each is"
        assert call(server, f"/cache/explain/{ids['two']}", headers=keyed("all")).json["tenant"] == "key/2"
        assert call(server, "/cache", headers=keyed("one")).json["history"] is None
        assert call(server, f"/cache/explain/{ids['two']}", headers=keyed("one")).status == 404
        assert call(server, f"/cache/explain/{ids['two']}", headers=keyed("all")).status == 200
        assert call(server, "/cache").status == 401
        assert call(server, "/metrics").status == 200

        refused = call(server, "/cache/reset", headers=keyed("one"), method="POST")
        assert (refused.status, refused.json["error"]["code"]) == (403, "admin_only")
        assert call(server, "/cache", headers=keyed("all")).json["tiers"][0]["held_bytes"] > 0
        wait_until(lambda: call(server, "/cache/reset", headers=keyed("all"), method="POST").status == 200)
        assert call(server, "/cache", headers=keyed("all")).json["tiers"][0]["held_bytes"] == 0


def test_without_an_admin_key_nobody_resets(server: Server) -> None:
    assert call(server, "/cache/reset", method="POST").status == 403


# --- what is kept, by tenant and prefix, and what is pinned -----------------------------------------------------------


def test_what_is_kept_is_told_by_tenant_and_prefix_and_each_sees_its_own(chat_model: str) -> None:
    config = ServeConfig(port=0, api_keys=("one", "two"), admin_key="all")
    offload = with_shares(OffloadConfig(host_bytes="16MiB"), config)
    with running(chat_model, config, offload=offload) as server:
        asked = {"one": "A secret harbour. " + PROMPT, "two": "Two. " + PROMPT}
        tokens = {key: complete(server, prompt, key).json["usage"]["prompt_tokens"] for key, prompt in asked.items()}
        assert complete(server, asked["one"], "one").status == 200

        def seen(key: str, what: str) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = call(server, "/cache", headers=keyed(key)).json[what]
            return found

        wait_until(lambda: len(seen("all", "prefixes")) == 2)
        wait_until(lambda: min(prefix["num_tokens"] for prefix in seen("all", "prefixes")) > 100)
        for key, num_uses in (("one", 2), ("two", 1)):
            (prefix,) = seen(key, "prefixes")
            assert tokens[key] - 16 <= prefix["num_tokens"] <= tokens[key] + 2, "all whole chunks of it"
            assert (prefix["tier"], prefix["num_uses"]) == ("host", num_uses)
            (tenant,) = seen(key, "tenants")
            assert tenant["tenant"] == prefix["tenant"] and tenant["num_chunks"] > 0 < tenant["num_bytes"]
        held = call(server, "/cache", headers=keyed("all")).json["tiers"][1]["held_bytes"]
        assert sum(tenant["num_bytes"] for tenant in seen("all", "tenants")) == held
        assert {tenant["tenant"] for tenant in seen("all", "tenants")} == {"key/1", "key/2", "others"}
        assert b"harbour" not in call(server, "/cache", headers=keyed("all")).body


def test_pins_are_told_with_their_budget_and_each_sees_its_own(chat_model: str) -> None:
    config = ServeConfig(port=0, api_keys=("one", "two"), admin_key="all")
    with running(chat_model, config) as server:
        hint = [{"action_type": "pin", "payload": {"lease": "agent 7", "ttl_s": 60}}]
        assert complete(server, key="one", cargohold_hints=hint).status == 200

        def told(key: str) -> Any:
            return call(server, "/cache/pins", headers=keyed(key)).json

        (pin,) = told("one")["pins"]
        assert (pin["tier"], pin["lease"]) == ("host", "agent 7")
        assert pin["num_chunks"] > 0 and pin["num_tokens"] > 100 and 0 < pin["left_s"] <= 60
        (own,), (everybodys,) = told("one")["budgets"], told("all")["budgets"]
        assert own["num_chunks"] == everybodys["num_chunks"] == pin["num_chunks"]
        assert 0 < own["max_chunks"] < everybodys["max_chunks"]
        (foreign,) = told("two")["budgets"]
        assert (told("two")["pins"], foreign["num_chunks"]) == ([], 0)
        (seen,) = told("all")["pins"]
        assert seen["tenant"] == pin["tenant"] == "key/1"
        assert call(server, "/cache", headers=keyed("two")).json["pins"] == []
        assert call(server, "/cache", headers=keyed("one")).json["pins"][0]["lease"] == "agent 7"
        assert call(server, "/cache/pins").status == 401
        assert call(server, "/cache/pins/agent%207", headers=keyed("one"), method="DELETE").status == 200
        assert told("all") == {"pins": [], "budgets": [{**everybodys, "num_chunks": 0}]}


def test_without_offloading_there_is_nothing_to_tell(chat_model: str) -> None:
    with running(chat_model, offload=None) as server:
        assert call(server, "/cache/pins").json == {"pins": [], "budgets": []}
        shown = call(server, "/cache").json
        assert shown["pins"] == shown["tenants"] == shown["prefixes"] == []


@pytest.mark.parametrize(
    ("options", "num_keys", "num_counted"),
    [({}, 2, 2), ({}, 4, 0), ({"policy": "tests.serve.test_cache_view:OwnOrder"}, 2, 0)],
)
def test_keys_are_counted_where_the_policy_and_their_number_allow_it(
    options: dict[str, Any], num_keys: int, num_counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cargohold.connector.tenants.MAX_SHARES", 4)  # a key takes a twentieth of a second
    config = ServeConfig(api_keys=tuple(map(str, range(num_keys))))
    offload = with_shares(OffloadConfig(host_bytes="16MiB", **options), config)
    assert offload is not None and len(offload.quotas) == num_counted


class OwnOrder(ReplacementPolicy):
    """A policy that knows nothing of shares; never made."""

    name = "own order"
    make_room = add = touch = drop = clear = check = None  # type: ignore[assignment]  # none is called
