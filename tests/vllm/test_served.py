"""vLLM's own server with our connector, as users run it: each call that vLLM documents, in processes of their own."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.deadlines import LOCK
from cargohold.errors import ConfigError
from cargohold.integrations.vllm.command import Command, check
from cargohold.process import ENGINE
from cargohold.tiers.kinds import open_inventory
from tests.vllm.common import make_prompts
from tests.vllm.models import PICTURE_SIZE, save_adapter, save_model, save_tokenizer
from tests.vllm.served import (
    EXTRA,
    LONG,
    RESTORED,
    Server,
    answer_of,
    command_line,
    completion,
    serve,
    stop,
)

PROMPT, OTHER, THIRD = make_prompts(3, LONG, seed=1)
WORDS = " ".join(f"w{token}" for token in make_prompts(1, LONG, seed=2)[0])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def model(directory: Path) -> str:
    path = save_model("llama", directory)
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def server(model: str, directory: Path) -> Iterator[Server]:
    """With what vLLM starts by itself: an engine core and a worker, each in a process of its own."""
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with serve(model, directory, environment=environment, enable_lora=True, max_lora_rank=8) as running:
        yield running


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_completion_is_restored_and_explained(server: Server) -> None:
    assert server.metric("cargohold_prompt_tokens_total", tier="host") == 0
    again = server.ask_twice(PROMPT)
    assert again.restored == RESTORED
    assert any("on the device" in note for note in again.notes)
    assert server.metric("cargohold_prompt_tokens_total", tier="host") == RESTORED


def test_a_chat_and_its_stream_say_the_same_however_much_is_restored(server: Server) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": WORDS}], "max_tokens": 6, "temperature": 0}
    body |= {"ignore_eos": True, "kv_transfer_params": {"cargohold_explain": True}}
    first = server.post("/v1/chat/completions", body)
    server.forget()
    with server.streaming("/v1/chat/completions", body) as events:
        text = "".join(one["choices"][0]["delta"].get("content") or "" for one in events if one["choices"])
    server.forget()
    last = server.post("/v1/chat/completions", body)
    assert text == first["choices"][0]["message"]["content"] == last["choices"][0]["message"]["content"]
    assert answer_of(first).restored == 0 and answer_of(last).restored >= RESTORED


def test_a_stream_of_tokens_is_that_of_the_whole_answer(server: Server) -> None:
    whole = server.ask(OTHER)
    server.forget()
    with server.streaming("/v1/completions", completion(OTHER)) as events:
        tokens = [token for one in events for choice in one["choices"] for token in choice.get("token_ids") or ()]
    assert tuple(tokens) == whole.tokens


def test_clients_that_leave_hold_nothing(server: Server) -> None:
    expected = server.ask(THIRD).tokens
    for _ in range(3):
        server.forget()
        with server.streaming("/v1/completions", completion(THIRD, max_tokens=600)) as events:
            next(iter(events))
    assert server.ask(THIRD).tokens == expected
    assert server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0


# --- operators --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("running", ["", "reset_running_requests=true"])
@pytest.mark.parametrize("external", ["", "reset_external=true"])
def test_a_reset_with_each_flag(server: Server, running: str, external: str) -> None:
    """Requests go on, or start over; none fails. Where copies are in flight, vLLM may refuse."""
    expected = server.ask(PROMPT, max_tokens=60).tokens
    path = "/reset_prefix_cache?" + "&".join(filter(None, [running, external]))
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(server.ask, PROMPT, max_tokens=60) for _ in range(2)]
        status, said = server.call(path, {}, method="POST")
        assert status in {200, 500}, said
        assert [one.result().tokens for one in asked] == [expected] * 2
    for _ in range(20):  # copies end within some steps
        if server.call(path, {}, method="POST") in ((200, ""), (200, {"success": True})):
            break
    answer = server.ask(PROMPT, max_tokens=60)
    assert answer.tokens == expected and answer.cached == 0
    assert server.ask_twice(OTHER).restored == RESTORED, "what was asked since is kept again"


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_and_what_comes_after_it(server: Server, mode: str) -> None:
    """The request is under way: vLLM 0.33 refuses one that comes while it waits for others to end (503)."""
    expected = server.ask(PROMPT, max_tokens=60).tokens
    with server.streaming("/v1/completions", completion(PROMPT, max_tokens=60)) as events:
        said = [next(events)]
        server.post(f"/pause?mode={mode}")
        assert server.call("/is_paused")[1] == {"is_paused": True}
        server.post("/resume")
        said += events
    tokens = tuple(token for one in said for choice in one["choices"] for token in choice.get("token_ids") or ())
    assert tokens == (expected[: len(tokens)] if mode == "abort" else expected)
    assert server.ask_twice(PROMPT, max_tokens=60).tokens == expected


def test_sleep_and_waking_up(server: Server) -> None:
    """On a CPU the workers do not, but engine and connector go the same way."""
    expected = server.ask_twice(PROMPT).tokens
    server.post("/sleep?level=1")
    server.post("/wake_up")
    assert server.ask(PROMPT).tokens == expected
    assert server.ask_twice(PROMPT).restored == RESTORED


def test_workers_can_be_called(server: Server) -> None:
    """Found by serving: of 35 calls, all failed, for vLLM reads the signature of the method behind them."""
    assert server.post("/collective_rpc", {"method": "check_health"}) == {"results": [None]}
    for path in ("/server_info", "/get_world_size", "/version", "/health", "/load"):
        assert server.call(path)[0] == 200, path


def test_other_weights_and_the_first_ones_again(server: Server, directory: Path) -> None:
    other, first = save_model("llama-retrained", directory), save_model("llama", directory)
    before = server.ask(PROMPT).tokens
    said = []
    for path in (other, first, other, first):
        server.post("/pause")
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        server.post("/resume")
        said.append(server.ask_twice(PROMPT).tokens)
    assert said[0] == said[2] != before and said[1] == said[3] == before


def test_adapters_come_change_and_go(server: Server, model: str, directory: Path) -> None:
    place, name = directory / "adapter", {"lora_name": "mine", "lora_path": str(directory / "adapter")}
    said = []
    for which in ("one", "two", "one"):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(save_adapter(model, which), place)
        server.post("/v1/load_lora_adapter", name)
        said.append(server.ask_twice(PROMPT, model="mine").tokens)
        server.post("/v1/unload_lora_adapter", {"lora_name": "mine"})
        server.post("/reset_prefix_cache")
    assert said[0] == said[2] != said[1]
    assert server.ask(PROMPT).tokens not in said


def test_whatever_was_asked_the_connector_is_on(server: Server) -> None:
    assert server.ask_twice(THIRD).restored == RESTORED
    assert server.metric("cargohold_outage_since") == 0
    said = server.said()
    for beginning in ("device pool: ", "group 0: ", "exclusive: "):
        assert any(line.startswith(beginning) for line in said), (beginning, said)
    assert "Traceback" not in server.log.read_text()


# --- sleep with requests that go on ---


PLUGIN = """
def register():
    from vllm import _custom_ops
    from vllm.platforms.cpu import CpuPlatform
    CpuPlatform.is_sleep_mode_available = lambda self: True
    _custom_ops._supports_onednn = False  # keep matrices where they can be read
"""


def sleepy(directory: Path) -> dict[str, str]:
    """The environment of a vLLM that takes --enable-sleep-mode on a CPU, through a plugin; its workers do not really sleep."""
    (directory / "sleepy.py").write_text(PLUGIN)
    info = directory / "sleepy-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sleepy\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nsleepy = sleepy:register\n")
    return {"PYTHONPATH": str(directory), "VLLM_SERVER_DEV_MODE": "1"}


def test_a_request_goes_on_after_sleep_with_what_the_device_alone_held(model: str, directory: Path) -> None:
    extra = {**EXTRA, "host_bytes": "1920KiB"}  # 40 chunks
    running = serve(model, directory, extra, name="log-sleepy", environment=sleepy(directory), enable_sleep_mode=True)
    with running as server:
        expected = server.ask(PROMPT, max_tokens=300).tokens
        server.forget()
        for other in make_prompts(4, LONG, seed=5):
            server.ask(other)
        assert server.metric("cargohold_load_tokens_total") == 0
        with server.streaming("/v1/completions", completion(PROMPT, max_tokens=300)) as events:
            said = [next(events)]  # it is under way, and was computed from its start
            assert server.metric("cargohold_load_tokens_total") == 0
            server.post("/sleep?level=1&mode=keep")
            server.post("/wake_up")
            said += events
        assert tuple(token for one in said for of in one["choices"] for token in of.get("token_ids") or ()) == expected
        assert server.metric("cargohold_load_tokens_total") == RESTORED
        assert server.metric("cargohold_outage_since") == 0


# --- several workers --------------------------------------------------------------------------------------------------


def test_two_workers_are_called_reset_and_restored_together(model: str, directory: Path) -> None:
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    with serve(model, directory, name="log-2", environment=environment, tensor_parallel_size=2) as server:
        first = server.ask_twice(PROMPT)
        assert first.restored == RESTORED
        assert server.post("/collective_rpc", {"method": "check_health"}) == {"results": [None, None]}
        for path in ("/reset_prefix_cache", "/reset_prefix_cache?reset_external=true", "/pause?mode=wait", "/resume"):
            server.post(path)
        with server.streaming("/v1/completions", completion(OTHER, max_tokens=600)) as events:
            next(iter(events))
        again = server.ask_twice(PROMPT)
        assert (again.tokens, again.restored) == (first.tokens, RESTORED)
        assert server.metric("cargohold_outage_since") == 0
        assert "Traceback" not in server.log.read_text()


# --- tenants behind the front, and a disk that outlives the server ----------------------------------------------------

PACKS = find_spec("zstandard") is not None  # of cargohold[packing]
TENANTS = {"acme": {"key": "of acme"}, "zebra": {"key": "of zebra"}}


def picture(seed: int) -> str:
    """A picture as a part of a message names it."""
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (PICTURE_SIZE, PICTURE_SIZE, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def describe(server: Server, shown: str | None, name: str | None = None) -> tuple[Any, int]:
    """What is said of a picture, and how much of it was restored; or the status of a refusal."""
    part = {"type": "image_url", "image_url": None if shown is None else {"url": shown}}
    part |= {} if name is None else {"uuid": name}
    content = [part, {"type": "text", "text": WORDS}]
    asked = completion([], messages=[{"role": "user", "content": content}])
    status, said = server.call("/v1/chat/completions", {name: of for name, of in asked.items() if name != "prompt"})
    return (answer_of(said).tokens, answer_of(said).restored) if status == 200 else (status, 0)


def test_tenants_their_pictures_and_a_disk_over_a_restart(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cargohold.tiers.disk.shard.LOCK", replace(LOCK, plus_s=0.0))
    monkeypatch.setenv(ENGINE, "")  # restored at the end
    model = save_model("blip2", directory)
    (directory / "tenants.json").write_text(json.dumps(TENANTS), encoding="utf-8")
    (directory / "tenants.json").chmod(0o600)
    environment = {"CARGOHOLD_TENANTS": str(directory / "tenants.json"), "PYTHONHASHSEED": "0"}
    tier = {"kind": "disk", "directory": str(directory / "kv"), "max_bytes": "64MiB", "reserve_bytes": 0}
    tier["pack"] = "exponent" if PACKS else "none"
    served: dict[str, Any] = {"environment": environment, "middleware": "cargohold.serve.front.Front"}
    extra = {**EXTRA, "host_bytes": "2MiB", "tiers": [tier], "restore_timeout_s": 60.0}
    with serve(model, directory, extra, name="log-disk", **served) as server:
        acme, zebra = server.of("of acme"), server.of("of zebra")
        with pytest.raises(ConfigError, match="another tier uses it for the same model"):
            check(Command.read(command_line()))  # of a second server like this one
        assert server.call("/v1/completions", completion(PROMPT))[0] == 401
        one, another = describe(acme, picture(1))[0], describe(zebra, picture(2))[0]
        assert one != another and describe(acme, picture(1), "logo")[0] == one
        assert describe(zebra, None, "logo")[0] == 400, "of another's name, a tenant has no picture"
        assert describe(zebra, picture(2), "logo")[0] == another, "nor does it get the other's in place of its own"
        kept = acme.ask_twice(PROMPT)
        assert kept.restored == RESTORED
        acme.forget()
        on_device = acme.ask(OTHER)
        with ExitStack() as answers:
            for prompt in make_prompts(4, LONG, seed=7):
                asked = completion(prompt, max_tokens=200)
                next(answers.enter_context(acme.streaming("/v1/completions", asked)))
            stop()
    (holding,) = open_inventory(str(directory / "kv")).holdings()
    assert holding.num_chunks and bool(holding.plain_bytes) is PACKS
    with serve(model, directory, extra, name="log-disk-again", **served) as server:
        acme, zebra = server.of("of acme"), server.of("of zebra")
        again = acme.ask(PROMPT)
        assert (again.tokens, again.restored) == (kept.tokens, RESTORED)
        again = acme.ask(OTHER)
        assert (again.tokens, again.restored) == (on_device.tokens, RESTORED), (
            "the device had not lost it when it was stopped"
        )
        assert zebra.ask(PROMPT).restored == 0
        assert describe(acme, picture(2), "logo") == (another, 0), "the name was true for the first process alone"
        assert server.metric("cargohold_outage_since") == 0
        assert "Traceback" not in server.log.read_text()
