"""What Dynamo's indexer makes of the events of a real vLLM equals what can be found, on the device, in host memory and on disk.

``make test-routers`` runs these tests with vLLM's environment and the indexer with its own, both in one network namespace.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.blocks import READY
from cargohold.cache.manager import offload_key
from cargohold.tiers.disk import DiskTier
from tests.routers.dynamo import Found, Indexer, end_of_run, needs_dynamo, ports, running_indexer
from tests.vllm.common import LAZY, RESTARTED, forget, make_prompts
from tests.vllm.engine import BLOCK_TOKENS, Engine
from tests.vllm.models import VOCAB_SIZE

pytestmark = needs_dynamo

PROMPTS = make_prompts(5, 330)
SETTLED_S = 30.0
PAUSE_S = 0.01
SMALL: dict[str, Any] = {"host_bytes": "4MiB"}
"""Host memory with room for two prompts and a half."""
_TIERS = Found._fields
_MARKS = count(1)
_WORKERS = count(1)


@pytest.fixture(scope="module")
def indexer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Indexer]:
    with running_indexer(tmp_path_factory.mktemp("dynamo") / "log") as indexer:
        yield indexer


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch) -> list[DiskTier]:
    """The disk tiers that engines make, the newest last."""
    made: list[DiskTier] = []
    init = DiskTier.__init__

    def note(self: DiskTier, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(DiskTier, "__init__", note)
    return made


class Replica:
    """vLLM on a disk that outlives it, whose events the indexer follows.

    Args:
        start: starts an engine, and ends the one before.
        model: the model's path.
        indexer: the indexer.
        disks: where engines' disk tiers are noted.
        extra: options of the connector.
    """

    def __init__(
        self, start: Callable[..., Engine], model: str, indexer: Indexer, disks: list[DiskTier], extra: dict[str, Any]
    ) -> None:
        self._start, self._model, self._extra = start, model, extra
        self._indexer, self._disks = indexer, disks
        self._worker = 0
        self.start()

    def start(self) -> None:
        """Start the engine, after the one before has ended: device and host memory are lost.

        vLLM numbers its messages from 0 after each start, which a follower of the one before would take for old ones. So the
        indexer is told of a new worker, as by the orchestrator that has started it.
        """
        self.stop()
        own_ports = dict(zip(("endpoint", "replay_endpoint"), ports, strict=False))
        # A publisher of vLLM's binds to the addresses of all interfaces, and only connects to any other.
        own = {name: f"tcp://*:{port}" for name, port in own_ports.items()}
        events = {"enable_kv_cache_events": True, "publisher": "zmq", **own}
        self.engine = self._start(self._model, self._extra, kv_events_config=events)
        self._worker = next(_WORKERS)
        events_at, replayed_at = (f"tcp://127.0.0.1:{port}" for port in own_ports.values())
        self._indexer.register(self._worker, events_at, replayed_at, BLOCK_TOKENS)
        self._hear()

    def stop(self) -> None:
        """Let the indexer forget the engine."""
        if self._worker:
            self._indexer.forget(self._worker)

    def find(self, prompt: Sequence[int]) -> Found:
        """Ask the indexer, once it has heard of everything that has happened."""
        self._publish_all()
        return self._indexer.find(prompt, self._worker)

    def _publish_all(self) -> None:
        self.engine.settle()
        self.engine.ask(make_prompts(1, BLOCK_TOKENS - 1), 1)  # makes a step, whose end publishes what is left
        self.engine.settle()
        self._hear()

    def _hear(self) -> None:
        """Wait until the indexer has heard of all that was published: marks in the same stream show how far it is."""
        from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch  # noqa: PLC0415  # where vLLM is

        publisher = self.engine.scheduler.kv_event_publisher
        deadline = time.monotonic() + SETTLED_S
        while time.monotonic() < deadline:
            mark = next(_MARKS)
            tokens = [VOCAB_SIZE + mark] * BLOCK_TOKENS
            stored = BlockStored(
                block_hashes=[mark],
                parent_block_hash=None,
                token_ids=tokens,
                block_size=BLOCK_TOKENS,
                lora_id=None,
                medium="GPU",
                lora_name=None,
            )
            publisher.publish(KVEventBatch(ts=time.time(), events=[stored]))
            until = time.monotonic() + 1
            while not (is_heard := self._indexer.find(tokens, self._worker).device > 0) and time.monotonic() < until:
                time.sleep(PAUSE_S)
            publisher.publish(KVEventBatch(ts=time.time(), events=[BlockRemoved(block_hashes=[mark], medium="GPU")]))
            if is_heard:
                return
        pytest.fail("the indexer hears nothing")

    def can_find(self, prompt: Sequence[int], salt: str | None = None) -> Found:
        """How many leading tokens the engine itself can find: on the device, then in host memory, then on disk."""
        from vllm.v1.core.kv_cache_utils import get_block_hash  # noqa: PLC0415  # where vLLM is

        hashes = _block_hashes(prompt, salt)
        cached = (block.block_hash for block in self.engine.scheduler.kv_cache_manager.block_pool.blocks)
        on_device = {get_block_hash(block_hash) for block_hash in cached if block_hash is not None}
        per_chunk = int(self._extra.get("blocks_per_chunk", 1))
        keys = [offload_key(hashes[end - 1], 0) for end in range(per_chunk, len(hashes) + 1, per_chunk)]
        connector: Any = self.engine.side.guard.inner
        manager = connector.shared.manager
        in_host = [state == READY for state in manager.lookup(keys)]
        on_disk = self._disks[-1].probe(connector.lower.tasks.names(keys))
        num_device = len(list(takewhile(on_device.__contains__, hashes)))
        num_host = end_of_run(in_host, num_device, per_chunk)
        num_disk = end_of_run(on_disk, num_host, per_chunk)
        return Found(num_device * BLOCK_TOKENS, num_host * BLOCK_TOKENS, num_disk * BLOCK_TOKENS)

    def compare(self) -> list[Found]:
        """Compare the two for every prompt. Of chunks of several blocks, the indexer may find parts that cannot be loaded."""
        allowed = BLOCK_TOKENS * (int(self._extra.get("blocks_per_chunk", 1)) - 1)
        self._publish_all()
        found = [self._indexer.find(prompt, self._worker) for prompt in PROMPTS]
        for at, (told, right) in enumerate(zip(found, map(self.can_find, PROMPTS), strict=True)):
            too_many = [more - less for more, less in zip(told, right, strict=True)]
            assert too_many[0] == 0 <= min(too_many) <= max(too_many) <= allowed, (at, told, right)
        return found


def _block_hashes(prompt: Sequence[int], salt: str | None) -> list[bytes]:
    """Hashes of a prompt's full blocks, as vLLM computes them for a request."""
    from vllm import SamplingParams  # noqa: PLC0415  # where vLLM is
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher  # noqa: PLC0415  # likewise
    from vllm.v1.request import Request  # noqa: PLC0415  # likewise

    from cargohold.lab.vllm.requests import hash_function  # noqa: PLC0415  # imports vLLM

    request = Request(
        request_id="asked",
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, hash_function()),
    )
    return list(request.block_hashes)


def _on(directory: Path, **options: Any) -> dict[str, Any]:
    """Options of a connector whose host memory has room for 85 blocks, and its disk for some more."""
    tiers = [{"kind": "disk", "directory": str(directory), "max_bytes": "5MiB"}]
    return {**RESTARTED, **options, "host_bytes": "4MiB", "tiers": tiers}


ROUNDS = (
    "ask",
    "ask",
    "abort",
    "forget",
    "ask",
    "restart",
    "ask",
    "forget",
    "reset",
    "ask",
    "forget",
    "ask",
    "restart",
    "ask",
)


@pytest.mark.parametrize("option", [{}, {"blocks_per_chunk": 2}, LAZY], ids=["eager", "chunks of two blocks", "lazy"])
def test_dynamo_finds_what_vllm_can_find(
    vllm_model: Callable[[str], str],
    start: Callable[..., Engine],
    indexer: Indexer,
    disks: list[DiskTier],
    tmp_path: Path,
    option: dict[str, Any],
) -> None:
    """Traffic with evictions from every tier, aborts, a reset, and restarts with the disk."""
    rng = random.Random(7)
    replica = Replica(start, vllm_model("llama"), indexer, disks, _on(tmp_path, **option))
    found, evicted = Counter[str](), Counter[str]()
    before = [Found(0, 0, 0)] * len(PROMPTS)
    try:
        for at, what in enumerate(ROUNDS):
            for _ in range(2):
                replica.engine.ask([rng.choice(PROMPTS)[: rng.randrange(20, 331)]], rng.randrange(1, 40))
            _disturb(replica, what, rng.choice(PROMPTS), f"aborted {at}")
            now = replica.compare()
            for old, new in zip(before, now, strict=True):
                found.update(
                    {name: tokens - above for name, tokens, above in zip(_TIERS, new, (0, *new), strict=False)}
                )
                if what not in ("restart", "reset"):
                    evicted.update(
                        {name: max(0, was - tokens) for name, was, tokens in zip(_TIERS, old, new, strict=True)}
                    )
            before = now
    finally:
        replica.stop()
    assert all(found[tier] and evicted[tier] for tier in _TIERS), f"not everything was compared: {found}, {evicted}"


def _disturb(replica: Replica, what: str, prompt: list[int], request_id: str) -> None:
    match what:
        case "abort":
            replica.engine.add(request_id, prompt, 50)
            replica.engine.step()
            replica.engine.abort(request_id)
        case "forget":
            forget(replica.engine)
        case "reset":
            replica.engine.settle()
            assert replica.engine.llm.reset_prefix_cache()
        case "restart":
            replica.engine.settle()
            replica.start()


@pytest.mark.parametrize("is_published", [False, True])
def test_salted_blocks_of_our_tiers_are_found_only_if_they_are_to_be_published(
    vllm_model: Callable[[str], str],
    start: Callable[..., Engine],
    indexer: Indexer,
    disks: list[DiskTier],
    tmp_path: Path,
    is_published: bool,
) -> None:
    """The indexer knows of no salts: whoever asks for the same tokens finds them."""
    extra = _on(tmp_path, kv_events_salted=is_published)
    replica = Replica(start, vllm_model("llama"), indexer, disks, extra)
    whole = len(PROMPTS[0]) // BLOCK_TOKENS * BLOCK_TOKENS
    try:
        replica.engine.ask(PROMPTS[:1], 1, salt="mine")
        assert replica.can_find(PROMPTS[0], "mine") == replica.find(PROMPTS[0]) == Found(whole, whole, whole)
        forget(replica.engine)
        assert replica.can_find(PROMPTS[0], "mine") == Found(0, whole, whole)
        assert replica.find(PROMPTS[0]) == (Found(0, whole, whole) if is_published else Found(0, 0, 0))
        replica.start()
        assert replica.can_find(PROMPTS[0], "mine") == Found(0, 0, whole)
        assert replica.find(PROMPTS[0]) == (Found(0, 0, whole) if is_published else Found(0, 0, 0))
    finally:
        replica.stop()
