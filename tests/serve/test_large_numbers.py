"""Numbers that a machine's integers do not hold, in every field that takes one: refused or served, and nothing stays behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import cycle
from typing import Any, Final

import pytest

from cargohold import DiskTierConfig, OffloadConfig
from cargohold.connector.tenants import Tenant
from cargohold.serve.server import Server
from cargohold.serve.settings import ServeConfig, with_shares
from tests.chat_model import VOCAB_SIZE
from tests.llms import in_engine
from tests.serve.running import call, running, wait_until

LARGE: Final = (2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**400)
N: Final = "a large number"
"""Stands for it in a body."""
ENDS_AT_ONCE: Final[dict[str, Any]] = {"model": "chat", "stop_token_ids": list(range(VOCAB_SIZE))}
"""Whatever is generated ends the answer, also one that may have 2**63 tokens."""
TEXT: Final = {**ENDS_AT_ONCE, "prompt": "The ship sails on. " * 8}
CHAT: Final = {**ENDS_AT_ONCE, "messages": [{"role": "user", "content": "Hello"}]}
MESSAGES: Final = {
    "model": "chat",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 2,
    "stop_sequences": list("etaoin shrdlu,.T"),
}
HINTED: Final = {"prompt": "The ship sails on. " * 8}


def hint(kind: str, **payload: Any) -> dict[str, Any]:
    return {"action_id": "a", "action_type": kind, "action_version": "1", "payload": payload}


HINTS: Final = (
    hint("retain", token_ids=[N] * 40),
    hint("pin", token_ids=[5] * 39 + [N]),
    hint("demote", tokens=[N, N]),
    hint("retain", tokens=[0, N]),
    hint("retain", priority=N),
    hint("retain", ttl_s=N),
    hint("pin", ttl_s=N, lease="mine"),
    hint("prefetch", deadline_s=N),
    hint("share", deadline_s=N, ttl_s=N),
)
PARAMS: Final = (
    {"remote_port": N, "a": [N]},
    {"max_load_tokens": N},
    {"do_remote_decode": True, "max_store_tokens": N},
    {"cargohold_handoff": {"num_tokens": N, "num_readable_tokens": N}},
    {"kv_hint": [hint("retain", token_ids=[N] * 40)]},
)
REQUESTS: Final[tuple[tuple[str, dict[str, Any], dict[str, Any]], ...]] = (
    *(
        ("/v1/completions", TEXT, {name: N})
        for name in ("n", "max_tokens", "temperature", "top_p", "top_k", "seed", "priority")
    ),
    ("/v1/completions", TEXT, {"n": 2, "seed": N}),
    ("/v1/completions", TEXT, {"stop_token_ids": [N, *range(VOCAB_SIZE)]}),
    ("/v1/completions", TEXT, {"prompt": [5, N]}),
    ("/v1/completions", TEXT, {"prompt": [[5, 6], [5, N]]}),
    *(("/v1/completions", TEXT, {"kv_transfer_params": params}) for params in PARAMS),
    *(
        ("/v1/chat/completions", CHAT, {name: N})
        for name in ("max_completion_tokens", "max_tokens", "top_k", "seed", "priority")
    ),
    ("/v1/chat/completions", CHAT, {"chat_template_kwargs": {"depth": N}}),
    *(("/v1/messages", MESSAGES, {name: N}) for name in ("max_tokens", "temperature", "top_p", "top_k")),
    ("/v1/messages/count_tokens", {"model": "chat", "messages": MESSAGES["messages"]}, {"metadata": {"a": N}}),
    *(
        (path, body, {"cargohold_hints": [one]})
        for path, body in (("/v1/completions", TEXT), ("/v1/messages", MESSAGES))
        for one in HINTS
    ),
    *(("/cache/hints", HINTED, {"hints": [one]}) for one in HINTS),
    ("/cache/hints", {}, {"prompt": [N] * 40, "hints": [hint("retain")]}),
    ("/cache/prefetch", HINTED, {"deadline_s": N}),
    ("/cache/prefetch", {}, {"prompt": [5, N]}),
    ("/cache/pins", HINTED, {"lease": "mine", "ttl_s": N}),
    ("/cache/pins", {}, {"prompt": [N] * 40, "lease": "mine"}),
)


@pytest.fixture(scope="module")
def keyed(chat_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tenants = (Tenant(name="A", key="a"), Tenant(name="B", key="b", hints="off"))
    config = ServeConfig(port=0, tenants=tenants, max_queue=4)
    tiers = [DiskTierConfig(directory=tmp_path_factory.mktemp("disk"), max_bytes="64MiB", reserve_bytes=0)]
    offload = with_shares(OffloadConfig(host_bytes="16MiB", tiers=tiers), config)
    with running(chat_model, config, offload=offload, max_num_seqs=4, num_device_blocks=100) as server:
        yield server


@pytest.mark.parametrize(("path", "body", "field"), REQUESTS, ids=lambda value: str(value)[:60])
def test_a_large_number_is_refused_or_served_and_leaves_nothing(
    keyed: Server, path: str, body: dict[str, Any], field: dict[str, Any]
) -> None:
    for number, key in zip(LARGE, cycle("ab"), strict=False):
        sent = json.dumps({**body, **field}).replace(f'"{N}"', str(number)).encode()
        reply = call(keyed, path, sent, {"authorization": f"Bearer {key}"})
        assert reply.status < 500, (number, reply.body)
    wait_until(lambda: not keyed.admission.num_answers)
    llm = keyed.admission.llm
    assert not in_engine(llm, lambda engine: engine.num_unfinished), "a request outlives its answer"
    assert llm.status.connector_error is None
