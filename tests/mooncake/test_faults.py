"""A Mooncake Store whose master and lenders go, hang and come back; no chunk of it is ever wrong, and no engine waits."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial

import psutil
import pytest

from cargohold import LLM, OffloadConfig, SamplingParams
from cargohold.errors import TierError
from cargohold.tiers import LoadOutcome, SharedTierConfig, StoreOutcome
from cargohold.tiers.stores.mooncake import ClientProcess
from tests.models import VOCAB_SIZE
from tests.mooncake.cluster import LENT, Cluster, cluster, until
from tests.mooncake.test_tier import SECONDS, open_tier
from tests.servers import Server
from tests.tiers.common import CHUNK, codec, key, load, payload
from tests.tiers.shared import store

AT_ONCE_S = 2 * SECONDS
"""Longest that a call may take: as long as a request, or, where the client must be started anew, twice."""
TTL = "--client_ttl=2"
"""Seconds after which the master takes a silent lender for dead."""


@pytest.fixture
def own(usable: None) -> Iterator[Cluster]:
    with cluster(TTL) as running:
        yield running


def tried(call: Callable[[], object]) -> object:
    """What a call answers, or ``None`` if the store fails; in time."""
    begun, answer = time.monotonic(), None
    with suppress(TierError):
        answer = call()
    assert time.monotonic() - begun < AT_ONCE_S + 1, "a call has not ended in time"
    return answer


def test_a_master_that_is_not_there_at_the_start_may_come_later(usable: None, caplog: pytest.LogCaptureFixture) -> None:
    late = Cluster()
    with closing(open_tier(late)) as tier:
        assert "does not answer yet" in caplog.text and "refused" in caplog.text
        with pytest.raises(TierError, match="refused"):
            tier.probe([key(1)])
        try:
            late.master.start()
            late.lend()
            assert store(tier, 1) is StoreOutcome.STORED and load(tier, 1) == payload(1)
        finally:
            late.lenders[0].stop()
            late.master.stop()


def test_a_master_that_comes_back_empty(own: Cluster) -> None:
    with closing(open_tier(own)) as tier:
        until(
            lambda: tried(partial(store, tier, 1)) in {StoreOutcome.STORED, StoreOutcome.PRESENT}, "it stores nothing"
        )
        own.master.stop()
        for call in (lambda: tier.probe([key(1)]), lambda: load(tier, 1), lambda: store(tier, 2)):
            assert tried(call) is None
        own.master.start()
        own.await_segments(1)
        until(lambda: tried(partial(load, tier, 1)) is LoadOutcome.ABSENT, "it does not answer again")
        assert store(tier, 1) is StoreOutcome.STORED and load(tier, 1) == payload(1)


def test_a_master_that_hangs(own: Cluster) -> None:
    with closing(open_tier(own)) as tier:
        store(tier, 1)
        own.master.freeze()
        for call in (lambda: tier.probe([key(1)]), lambda: load(tier, 1), lambda: store(tier, 2)):
            assert tried(call) is None
        own.master.thaw()
        assert load(tier, 1) == payload(1)


def test_a_client_that_is_slow_to_start_is_waited_for(own: Cluster) -> None:
    """Found by random faults on a busy machine: each request ended the client in its start, so that it never became ready."""
    own.master.freeze()
    with closing(open_tier(own)) as tier:
        started = clients()
        assert tried(lambda: tier.probe([key(1)])) is None
        own.master.thaw()
        until(lambda: tried(lambda: tier.probe([key(1)])) == [False], "the client does not become ready")
        assert clients() == started and len(started) == 1


def test_a_lender_that_is_killed_takes_its_chunks_with_it(own: Cluster) -> None:
    with closing(open_tier(own)) as tier:
        for number in range(8):
            assert store(tier, number) is StoreOutcome.STORED
        own.lenders[0].stop()
        assert {tried(partial(load, tier, number)) for number in range(8)} <= {None, LoadOutcome.ABSENT}
        until(
            lambda: tried(lambda: tier.probe([key(1)])) == [False], "the master does not notice that the lender is dead"
        )
        own.lend()
        assert store(tier, 1) is StoreOutcome.STORED and load(tier, 1) == payload(1)


def test_a_lender_that_is_killed_in_the_middle_of_reads(own: Cluster) -> None:
    size = 8 * 2**20
    with closing(open_tier(own, size=size)) as tier:
        assert tier.store(key(1), memoryview(payload(1, size))) is StoreOutcome.STORED
        killing = threading.Timer(0.05, own.lenders[0].stop)
        killing.start()
        for _ in range(1000):
            read = tried(partial(load, tier, 1, size))
            assert read in {payload(1, size), None, LoadOutcome.ABSENT}, "wrong bytes"
            if read != payload(1, size):
                break
        killing.join()


def test_a_lender_that_hangs_while_it_is_read(own: Cluster) -> None:
    with closing(open_tier(own)) as tier:
        store(tier, 1)
        own.lenders[0].freeze()
        assert tried(lambda: load(tier, 1)) is None
        own.lenders[0].thaw()
        until(lambda: store(tier, 2) is StoreOutcome.STORED, "the lender is not taken back")
        assert load(tier, 2) == payload(2)


def test_a_client_that_is_killed_is_started_again(own: Cluster) -> None:
    with closing(open_tier(own)) as tier:
        store(tier, 1)
        for _ in range(2):
            clients()[0].kill()
            assert tried(lambda: load(tier, 1)) in {None, payload(1)}
            assert load(tier, 1) == payload(1)


def clients() -> list[psutil.Process]:
    """The processes of this one in which Mooncake's client runs."""
    return [child for child in psutil.Process().children() if "mooncake_process" in command_of(child)]


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


def test_clients_end_with_their_engine(own: Cluster) -> None:
    with closing(open_tier(own)) as tier:
        store(tier, 1)
        assert clients()
    assert not clients()


def test_a_full_store_puts_chunks_off_and_never_mixes_them_up(usable: None) -> None:
    with cluster("--default_kv_lease_ttl=200") as own, closing(open_tier(own, size=2**20)) as tier:
        sizes = {number: payload(number, 2**20) for number in range(3 * LENT // 2**20)}
        outcomes = [tier.store(key(number), memoryview(of)) for number, of in sizes.items()]
        assert set(outcomes) <= {StoreOutcome.STORED, StoreOutcome.LATER} and outcomes[0] is StoreOutcome.STORED
        found = {number: load(tier, number, 2**20) for number in sizes}
        assert all(one in {LoadOutcome.ABSENT, sizes[number]} for number, one in found.items())
        assert LoadOutcome.ABSENT in found.values(), "the store was not filled"
        until(
            lambda: tier.store(key(0), memoryview(sizes[0])) in {StoreOutcome.STORED, StoreOutcome.PRESENT},
            "no room is made",
        )


def test_what_was_just_stored_is_not_evicted_for_others(usable: None) -> None:
    """A hand-off announces it: the other engine must find it."""
    with cluster(lent=16 * 2**20) as own, closing(open_tier(own, size=2**20)) as tier:
        outcomes = {number: tier.store(key(number), memoryview(payload(number, 2**20))) for number in range(32)}
        stored = [number for number, outcome in outcomes.items() if outcome is StoreOutcome.STORED]
        assert len(stored) < 32 and set(outcomes.values()) == {StoreOutcome.STORED, StoreOutcome.LATER}
        assert all(load(tier, number, 2**20) == payload(number, 2**20) for number in stored)


def test_values_that_are_not_ours_are_misses_and_replaced(own: Cluster) -> None:
    with closing(open_tier(own)) as tier, closing(ClientProcess(own.url, {}, num_bytes=3 * CHUNK)) as other:
        name = f"cargohold:{codec().namespace.id}:{key(1).hex()}"
        for size in (3 * CHUNK, 100, 1):
            assert other.call("put", name, 0, size, False) == [0, 1]
            assert tier.probe([key(1)]) == [True]
            assert load(tier, 1) is LoadOutcome.CORRUPT
            assert store(tier, 1) is StoreOutcome.STORED and load(tier, 1) == payload(1)
            tier.remove([key(1)])


def test_an_engine_lends_memory_until_it_ends(usable: None) -> None:
    with cluster(TTL, lent=0) as own:
        options = SharedTierConfig(url=own.url, lend_bytes="32MiB")
        with closing(open_tier(own, options=options)) as tier, closing(open_tier(own)) as other:
            assert store(tier, 1) is StoreOutcome.LATER, "nobody lends anything yet"
            tier.begin()
            own.await_segments(1)
            assert own.segments()[0]["size_bytes"] == 32 * 2**20
            assert store(tier, 1) is StoreOutcome.STORED and load(other, 1) == payload(1)
            own.master.freeze()
            assert tried(lambda: tier.probe([key(1)])) is None
            own.master.thaw()
            assert load(tier, 1) == payload(1), "what it lends was given up with a client that hung"
            for client in clients():
                client.kill()
            until(lambda: tried(lambda: store(tier, 2)) is StoreOutcome.STORED, "nothing is lent any more")
            assert load(other, 2) == payload(2)
        own.await_segments(0)


# --- random faults ----------------------------------------------------------------------------------------------------

SAMPLING = SamplingParams(max_tokens=4)
STEP_S = 30.0
"""Longest that a request may take on a busy machine: its time in the engine, and that of its store."""
FAULTS_IN_A_ROW = 12
RECOVERY_S = 150.0
"""Longest that a tier takes until it is used again: what is suspended is tried once a minute, after many failures."""
NUM_FAULTS = int(os.environ.get("MOONCAKE_FAULTS", "12"))


class Mischief:
    """What happens to a store while an engine uses it.

    Args:
        own: the store.
        seed: decides what happens.
    """

    def __init__(self, own: Cluster, seed: int) -> None:
        self._own = own
        self._random = random.Random(seed)
        self._frozen: list[Server] = []
        self.done: list[str] = []

    def strike(self) -> None:
        """Do one thing; what was frozen mostly goes on."""
        if self._random.random() < 0.7:
            self.thaw()
        kinds = [self.kill_client, self.freeze_client, self.freeze_master, self.restart_master, self.kill_lender]
        kinds += [self.freeze_lender, self.fill]
        kind = self._random.choice(kinds)
        self.done.append(kind.__name__)
        kind()

    def kill_client(self) -> None:
        for client in clients():
            client.kill()

    def freeze_client(self) -> None:
        for client in clients()[:1]:
            client.send_signal(signal.SIGSTOP)

    def freeze_master(self) -> None:
        self._freeze(self._own.master)

    def freeze_lender(self) -> None:
        self._freeze(self._random.choice(self._own.lenders))

    def restart_master(self) -> None:
        self.thaw()
        self._own.master.stop()
        self._own.master.start()

    def kill_lender(self) -> None:
        self.thaw()
        lender = self._random.choice(self._own.lenders)
        lender.stop()
        self._own.lenders.remove(lender)
        self._own.lend()

    def fill(self) -> None:
        self.thaw()
        with closing(open_tier(self._own, "others", size=2**20)) as tier, suppress(TierError):
            for number in range(3):
                tier.store(key(self._random.randrange(10**6)), memoryview(payload(number, 2**20)))

    def thaw(self) -> None:
        for server in self._frozen:
            server.thaw()
        self._frozen.clear()

    def _freeze(self, server: Server) -> None:
        if server not in self._frozen:
            server.freeze()
            self._frozen.append(server)


def test_an_engine_lives_through_random_faults(
    usable: None, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # noqa: T201  # shown if it fails
    draw = random.Random(seed)
    options = {"block_tokens": 4, "num_device_blocks": 60, "max_model_len": 200}
    stems = [[draw.randrange(VOCAB_SIZE) for _ in range(80)] for _ in range(5)]
    plain = make_llm(tiny_model("llama"), **options)
    with cluster(TTL, "--default_kv_lease_ttl=500", lent=16 * 2**20) as own:
        own.lend(16 * 2**20)
        tier = SharedTierConfig(url=own.url, num_threads=2)
        offload = OffloadConfig(
            host_bytes="64KiB", tiers=[tier], restore="always", restore_timeout_s=1.0, transfer_timeout_s=3.0
        )
        llm = make_llm(tiny_model("llama"), settled=False, offload=offload, **options)
        mischief = Mischief(own, seed)
        num_restored = 0
        for at in range(1, NUM_FAULTS + 1):
            mischief.strike()
            print(f"{num_restored} tokens restored, then: {mischief.done[-1]}", flush=True)  # noqa: T201  # the same
            for _ in range(4):
                prompt = [*draw.choice(stems), draw.randrange(VOCAB_SIZE)]
                begun = time.monotonic()
                (output,) = llm.generate([prompt], SAMPLING)
                assert time.monotonic() - begun < STEP_S, f"a request has waited; {mischief.done}"
                num_restored += output.metrics.restored_tokens.get("shared", 0)
                (expected,) = plain.generate([prompt], SAMPLING)
                assert output.token_ids == expected.token_ids, f"a wrong token; {mischief.done}"
            if at % FAULTS_IN_A_ROW == 0:
                mischief.thaw()
                until(lambda: found_in_store(llm, stems) > 0, "the tier has not recovered", RECOVERY_S)


def found_in_store(llm: LLM, stems: list[list[int]]) -> int:
    """Tokens that prompts find in the store; each has been displaced by the others in memory."""
    outputs = [llm.generate([[*stem, 1]], SAMPLING)[0] for stem in stems]
    return sum(output.metrics.restored_tokens.get("shared", 0) for output in outputs)
