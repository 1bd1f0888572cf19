"""What clients say of the future of their prompts, in the words of each interface, and what tenants may have of host memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cargohold import ConfigError, DiskTierConfig, OffloadConfig
from cargohold.connector.tenants import Tenant
from cargohold.serve.server import Server
from cargohold.serve.settings import ServeConfig, with_shares
from tests.serve import clients
from tests.serve.running import Reply, call, running, wait_until

TEXT = "The ship sails on. " * 40
MARK: Any = {"type": "ephemeral"}
SMALL: Any = {"num_device_blocks": 30, "max_model_len": 400}
"""A device pool that holds one prompt."""


def keyed(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def envelope(*actions: dict[str, Any]) -> dict[str, Any]:
    return {"protocol_version": "1", "message_id": "m", "actions": list(actions)}


def notes(server: Server, request_id: str) -> list[str]:
    told: list[str] = call(server, f"/cache/explain/{request_id}").json["notes"]
    return told


@pytest.fixture
def small(chat_model: str) -> Iterator[Server]:
    """A server whose host memory holds a few prompts."""
    offload = OffloadConfig(host_bytes="256KiB", restore="always", policy="lru")
    with running(chat_model, offload=offload, **SMALL) as server:
        yield server


@pytest.mark.parametrize("mark", [None, MARK, {**MARK, "ttl": "1h"}], ids=["unmarked", "marked", "for an hour"])
def test_what_anthropics_client_marks_stays_when_others_come(small: Server, mark: Any) -> None:
    block: Any = {"type": "text", "text": f"Marked. {TEXT}"}
    conversation: Any = [{"role": "user", "content": [block if mark is None else {**block, "cache_control": mark}]}]
    with clients.anthropic.Anthropic(base_url=small.url, api_key="none", max_retries=0) as client:
        client.messages.create(model="chat", max_tokens=2, messages=conversation)
        for number in range(6):
            other = {"model": "chat", "prompt": f"Other {number}. {TEXT}", "max_tokens": 2}
            assert call(small, "/v1/completions", other).status == 200
        again = client.messages.create(model="chat", max_tokens=2, messages=conversation)
    sources = call(small, f"/cache/explain/{again.id}").json["sources"]
    assert (sources.get("host", 0) > 100) == (mark is not None)


@pytest.mark.parametrize("is_over", [False, True], ids=["silent", "over"])
def test_sessions_that_say_that_they_are_over_take_no_place_from_others(small: Server, is_over: bool) -> None:
    body = {"model": "chat", "prompt": f"Waiting. {TEXT}", "max_tokens": 2}
    assert call(small, "/v1/completions", body).status == 200
    for number in range(6):
        headers = {"X-Session-ID": str(number), "X-Dynamo-Session-Final": str(is_over)}
        other = {**body, "prompt": f"Other {number}. {TEXT}"}
        assert call(small, "/v1/completions", other, headers).status == 200
    again = call(small, "/v1/completions", body).json
    sources = call(small, f"/cache/explain/{again['id']}").json["sources"]
    assert (sources.get("host", 0) > 100) == is_over


def test_each_mark_reaches_as_far_as_its_block(server: Server) -> None:
    body = {
        "model": "chat",
        "max_tokens": 1,
        "system": [{"type": "text", "text": TEXT, "cache_control": MARK}, {"type": "text", "text": TEXT}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": TEXT, "cache_control": {**MARK, "ttl": "1h"}}]},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": [{"type": "text", "text": "And?", "cache_control": MARK}]},
        ],
    }
    assert call(server, "/v1/messages", body).status == 200  # hints act on what there is
    reply = call(server, "/v1/messages", body)
    told = [note for note in notes(server, reply.json["id"]) if "cache_control" in note]
    assert [note.split(":")[0] for note in told] == [f"hint cache_control-{number}" for number in (1, 2, 3)]
    assert all("accepted" in note for note in told), told


@pytest.mark.parametrize(
    ("mark", "times", "message"),
    [({"type": "eternal"}, 1, "ephemeral"), ({**MARK, "ttl": "2h"}, 1, "5m or 1h"), (MARK, 5, "at most 4")],
)
def test_impossible_marks_are_refused(server: Server, mark: Any, times: int, message: str) -> None:
    blocks = [{"type": "text", "text": "Hello", "cache_control": mark}] * times
    body = {"model": "chat", "max_tokens": 1, "messages": [{"role": "user", "content": blocks}]}
    reply = call(server, "/v1/messages", body)
    assert (reply.status, message in reply.json["error"]["message"]) == (400, True)


def test_openais_client_keeps_a_prompt_for_long(server: Server) -> None:
    with clients.openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": "chat", "messages": [{"role": "user", "content": f"Kept. {TEXT}"}], "max_tokens": 1}
        answer = client.chat.completions.create(**asked, prompt_cache_retention="24h", prompt_cache_key="me")
    (told,) = (note for note in notes(server, answer.id) if "prompt_cache_retention" in note)
    assert "clipped" in told, "hints may not last for a day here"


@pytest.mark.parametrize("stream", [False, True])
def test_hints_by_name_are_answered_by_name(server: Server, stream: bool) -> None:
    pin = {"action_id": "mine", "action_type": "pin", "payload": {"ttl_s": 5}}
    wrong = {"action_id": "wrong", "action_type": "sink"}
    body = {"model": "chat", "prompt": f"Hinted. {TEXT}", "max_tokens": 1, "cargohold_hints": envelope(pin, wrong)}
    reply = call(server, "/v1/completions", {**body, "stream": stream})
    assert reply.status == 200
    if stream:
        events = [json.loads(line[6:]) for line in reply.body.decode().split("\n\n") if line.startswith("data: {")]
        (told,) = (event["cargohold_hints"] for event in events if "cargohold_hints" in event)
    else:
        told = reply.json["cargohold_hints"]
    assert {one["action_id"]: one["status"] for one in told} == {"mine": "accepted", "wrong": "rejected"}


def test_prompts_are_pinned_and_released_by_their_tenants_alone(chat_model: str) -> None:
    with running(chat_model, ServeConfig(port=0, api_keys=("one", "two"))) as server:

        def ask(path: str, body: Any, key: str = "one", method: str | None = None) -> Reply:
            return call(server, path, body, keyed(key), method)

        def status(reply: Reply) -> str:
            (outcome,) = reply.json["outcomes"]
            return str(outcome["status"])

        assert ask("/v1/completions", {"model": "chat", "prompt": TEXT, "max_tokens": 1}).status == 200
        wait_until(lambda: status(ask("/cache/pins", {"prompt": TEXT, "lease": "mine", "ttl_s": 60})) == "accepted")
        assert status(ask("/cache/pins/mine", None, "two", "DELETE")) == "missing"
        assert status(ask("/cache/pins/mine", None, "one", "DELETE")) == "accepted"
        assert status(ask("/cache/pins/mine", None, "one", "DELETE")) == "missing"
        assert status(ask("/cache/pins", {"prompt": TEXT, "lease": "agents/7 %", "ttl_s": 60})) == "accepted"
        assert status(ask("/cache/pins/agents%2F7%20%25", None, "one", "DELETE")) == "accepted"
        conversation = {"messages": [{"role": "user", "content": "Hello"}], "hints": [{"action_type": "retain"}]}
        assert ask("/cache/hints", conversation).status == 200
        assert call(server, "/cache/hints", conversation).status == 401
        assert ask("/cache/pins", {"prompt": TEXT}).json["error"]["param"] == "lease"


def test_what_cannot_be_brought_up_is_told(server: Server) -> None:
    (outcome,) = call(server, "/cache/prefetch", {"prompt": TEXT, "deadline_s": 60}).json["outcomes"]
    assert (outcome["status"], outcome["reason"]) == ("rejected", "there is no tier below host memory")


def test_a_prompt_is_brought_up_from_the_disk_of_an_earlier_server(chat_model: str, tmp_path: Path) -> None:
    offload = OffloadConfig(
        host_bytes="16MiB", tiers=[DiskTierConfig(directory=tmp_path, max_bytes="64MiB", reserve_bytes=0)]
    )
    asked = {"model": "chat", "prompt": TEXT, "max_tokens": 1}
    with running(chat_model, ServeConfig(port=0), offload=offload) as server:
        assert call(server, "/v1/completions", asked).status == 200
    with running(chat_model, ServeConfig(port=0), offload=offload) as server:

        def held_by_host() -> int:
            return int(call(server, "/cache").json["tiers"][1]["held_bytes"])

        assert not held_by_host()
        (outcome,) = call(server, "/cache/prefetch", {"prompt": TEXT, "deadline_s": 60}).json["outcomes"]
        assert outcome["status"] == "deferred", outcome
        wait_until(held_by_host)
        usage = call(server, "/v1/completions", asked).json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0


# --- tenants ----------------------------------------------------------------------------------------------------------


def write(path: Path, tenants: object) -> str:
    path.write_text(tenants if isinstance(tenants, str) else json.dumps(tenants), encoding="utf-8")
    path.chmod(0o600)
    return str(path)


def test_tenants_have_their_shares_and_hints(chat_model: str, tmp_path: Path) -> None:
    shares = {"acme": {"key": "one", "hard": "64KiB", "hints": "off"}, "zebra": {"key": "two", "reserved": "10%"}}
    tenants = Tenant.read(write(tmp_path / "tenants.json", shares))
    config = ServeConfig(port=0, tenants=tenants)
    offload = with_shares(OffloadConfig(host_bytes="16MiB"), config)
    with running(chat_model, config, offload=offload) as server:
        stored = {}
        for key in ("one", "two"):
            before = call(server, "/cache", headers=keyed(key)).json["tiers"][1]["held_bytes"]
            for number in range(3):
                body = {"model": "chat", "prompt": f"{number}. {TEXT}", "max_tokens": 1}
                hinted = {**body, "cargohold_hints": [{"action_type": "retain"}]}
                reply = call(server, "/v1/completions", hinted, keyed(key))
                assert reply.json["cargohold_hints"][0]["status"] == ("rejected" if key == "one" else "accepted")
            wait_until(lambda: call(server, "/cache", headers=keyed("two")).json["engine"]["running"] == 0)
            stored[key] = call(server, "/cache", headers=keyed(key)).json["tiers"][1]["held_bytes"] - before
        assert stored["one"] <= 64 * 2**10 < stored["two"]


@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        ([], "it must be an object"),
        ({"acme": {}}, "there are key, reserved"),
        ({"acme": {"key": "a", "hrad": 1}}, "there are key, reserved"),
        ({"acme": {"key": 1}}, "its key must be text"),
        ({"a/b": {"key": "a"}}, "without a slash"),
        ({"acme": {"key": "a", "hard": "200%"}}, r"^acme\.hard='200%' .* from 0% to 100%"),
        ({"acme": {"key": "a", "soft": "50%", "hard": "10%"}}, r"^acme\.soft='50%' .* at most hard, which is 10%"),
        ({"acme": {"key": "a", "reserved": "2GiB", "hard": "1GiB"}}, r"^acme\.reserved='2GiB' .* at most hard"),
        (
            {name: {"key": name, "reserved": "60%"} for name in ("acme", "zebra")},
            "reserved={'acme': '60%', 'zebra': '60%'} .* 100% at most",
        ),
        ('{"acme": {"key": "a"}, "acme": {"key": "b"}}', "'acme' stands in it twice"),
        ('{"acme": {"key": "a", "hard": "1%", "hard": "100%"}}', "'hard' stands in it twice"),
        ({"acme": {"key": " a"}}, "^--tenants='acme' .* without spaces around it"),
        ({"acme": {"key": "a", "hints": "some"}}, "one of all, retain, off"),
        ({"acme": {"key": "a"}, "zebra": {"key": "a"}}, "must not be given twice"),
        ({"acme": {"key": "all"}}, "differ from all other keys"),
    ],
    ids=str,
)
def test_impossible_tenants_are_refused_at_the_start(tmp_path: Path, tenants: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeConfig(tenants=Tenant.read(write(tmp_path / "tenants.json", tenants)), admin_key="all")


def test_shares_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="need --host-bytes"):
        with_shares(None, ServeConfig(tenants=(Tenant(name="acme", key="a"),)))
