"""Real models over real servers and real crashes: tokens are those without tiers, whatever happens to the medium."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from cargohold import LLM
from cargohold.cache.manager import OffloadKey
from cargohold.tiers import BreakerConfig, QueueConfig, SharedTierConfig
from cargohold.tiers.stores.objects import ObjectTier
from tests.connector.test_tiers_with_models import OPTIONS, ask, disk, offload, prompts, restored, tokens
from tests.llms import SettledLLM
from tests.models import VOCAB_SIZE
from tests.servers import BUCKET, Server, key_value_server, set_credentials

REPOSITORY = Path(__file__).parents[2]


def expected_tokens(model: str, num: int = 3) -> list[tuple[int, ...]]:
    with SettledLLM(model, **OPTIONS) as plain:
        return tokens(ask(plain, prompts(num)))


@pytest.mark.parametrize("kind", [pytest.param("redis", marks=pytest.mark.long), "valkey"])
def test_a_server_under_an_engine_goes_and_comes_back(
    kind: str, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    soon_tried = partial(QueueConfig, breaker=BreakerConfig(cooldown_s=0.05, max_cooldown_s=0.1))
    monkeypatch.setattr("cargohold.connector.offloading.factory.QueueConfig", soon_tried)
    model = tiny_model("llama")
    expected = expected_tokens(model)
    with key_value_server(kind) as server:
        tier = SharedTierConfig(url=f"{kind}://127.0.0.1:{server.port}")
        config = offload(tier, host_bytes="16MiB")
        assert tokens(ask(make_llm(model, offload=config, **OPTIONS), prompts())) == expected
        llm = make_llm(model, offload=config, **OPTIONS)
        first = ask(llm, prompts()[:1])
        assert restored(first) == [{"shared": 100}]
        server.stop()
        assert tokens(ask(llm, prompts())) == expected
        server.start()
        others = random.Random(7)
        while not _num_values(server):  # until the breaker lets work through again
            llm.generate([[others.randrange(VOCAB_SIZE) for _ in range(50)]])
        llm.close()
        refilled = make_llm(model, offload=config, **OPTIONS)
        assert tokens(ask(refilled, prompts())) == expected
        refilled.close()
        again = ask(make_llm(model, offload=config, **OPTIONS), prompts())
        assert tokens(again) == expected
        assert restored(again) == [{"shared": 100}] * 3


def _num_values(server: Server) -> int:
    import redis  # noqa: PLC0415  # an optional package

    with redis.Redis(port=server.port) as client:
        return int(client.dbsize())


def test_engines_share_a_bucket(
    s3: Server, monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    set_credentials(monkeypatch, s3.port)
    model = tiny_model("llama")
    expected = expected_tokens(model)
    config = offload(SharedTierConfig(url=f"s3://{BUCKET}/engines"))
    assert tokens(ask(make_llm(model, offload=config, **OPTIONS), prompts())) == expected
    again = ask(make_llm(model, offload=config, **OPTIONS), prompts())
    assert tokens(again) == expected
    assert restored(again) == [{"shared": 100}] * 3


def test_of_a_new_prompt_an_object_store_is_asked_for_the_first_chunks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    asked: list[int] = []

    class Counting(ObjectTier):
        def probe(self, keys: Sequence[OffloadKey]) -> list[bool]:
            if len(keys) > 1:  # not one that is about to be stored
                asked.append(len(keys))
            return super().probe(keys)

    monkeypatch.setattr("cargohold.tiers.stores.objects.ObjectTier", Counting)
    model, options = tiny_model("llama"), {**OPTIONS, "block_tokens": 2}
    config = offload(SharedTierConfig(url=f"file://{tmp_path}"))
    ask(make_llm(model, offload=config, **options), prompts(1))
    assert asked == [32], "of 50"
    asked.clear()
    again = ask(make_llm(model, offload=config, **options), prompts(1))
    assert asked == [32, 18]
    assert restored(again) == [{"shared": 100}]


STORING = """
import sys
from cargohold import LLM
from tests.connector.test_tiers_with_models import OPTIONS, ask, disk, offload, prompts
from pathlib import Path
with LLM(sys.argv[1], offload=offload(disk(Path(sys.argv[2]), max_bytes="8MiB")), **OPTIONS) as llm:
    for prompt in prompts(1000):
        ask(llm, [prompt])
        print("answered", flush=True)
"""


@pytest.mark.long  # in ``test_tiers_with_models`` one is killed while it writes over what it has written
def test_an_engine_killed_while_it_stores(
    tmp_path: Path, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    model = tiny_model("llama")
    expected = expected_tokens(model, 12)
    command = [sys.executable, "-c", STORING, model, str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for _ in range(6):
            assert process.stdout.readline() == "answered\n"
        process.send_signal(signal.SIGKILL)
    llm = make_llm(model, offload=offload(disk(tmp_path, max_bytes="8MiB")), **OPTIONS)
    again = ask(llm, prompts(12))
    assert tokens(again) == expected
    assert any(counts.get("disk") for counts in restored(again))
