"""Verification in a simulated engine: KV that lies is found, and dropped, and nothing else is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any, cast

import msgspec
import pytest

from cargohold.blocks import ABSENT, READY
from cargohold.connector.guests.verification import Verifier
from cargohold.connector.kernel.worker import KernelWorker
from cargohold.connector.offloading import OffloadingWorker
from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, simulated_layout
from cargohold.lab.simulation.tiers import NUM_SPARE
from cargohold.protocol import KVCacheLayout, TransferOutcome, metrics
from cargohold.tiers.messages import Gap, TierReport
from cargohold.transfer.compare import Comparer
from tests.connector.common import evict_everything, finish, prompt
from tests.connector.offloading import broken_rule, keys_of

LAYOUT = simulated_layout(60)
Patch = pytest.MonkeyPatch


class Played:
    """A connector that verifies, and an engine whose steps complete no more chunks than are compared at once."""

    def __init__(self, verify: float | str = 1.0, layout: KVCacheLayout = LAYOUT, **options: Any) -> None:
        self.offloading = SimulatedOffloading(40, verify=verify, **options)
        step_tokens = NUM_SPARE * layout.groups[0].block_tokens
        self.engine = SimulatedEngine(layout, self.offloading, max_num_batched_tokens=step_tokens)
        self.verified: Counter[str] = Counter()
        self._num_asked = 0

    def ask(self, tokens: list[int], **options: Any) -> str:
        """Serve a prompt, and let the device forget it. Returns the request's id."""
        name = f"request {self._num_asked}"
        self._num_asked += 1
        self.engine.add(name, tokens, 2, **options)
        finish(self.engine, self.offloading)
        evict_everything(self.engine)
        for series, count in self.engine.scheduler.connector.get_kv_connector_stats().items():
            if series.family is metrics.VERIFIED:
                self.verified[series.labels[0]] += int(count)
        return name

    def rows_of(self, keys: Sequence[bytes]) -> list[int]:
        """Where host memory keeps chunks."""
        pins = self.offloading.manager.prepare_load(keys)
        pins.release()
        return [slot for slot in pins.slots if isinstance(slot, int)]

    def states(self, keys: Sequence[bytes]) -> list[int]:
        return list(self.offloading.manager.lookup(keys))


def test_what_is_computed_again_is_found_to_be_equal() -> None:
    played = Played()
    for at in range(5):
        played.ask(prompt(at % 2, 33))
    name = played.ask(prompt(1, 33))
    assert played.verified == {"equal": 2 * 2 * 8}
    notes = played.engine.outputs[name].cache_report.notes
    assert notes[0] == "32 tokens that are kept are computed all the same, to verify what is kept"


def flip(rows: Any, first: int, _second: int) -> None:
    rows[first, 3] ^= 0x40


def exchange(rows: Any, first: int, second: int) -> None:
    rows[[first, second]] = rows[[second, first]]


def shift(rows: Any, first: int, second: int) -> None:
    rows[first] = [*rows[first][8:], *rows[second][:8]]


@pytest.mark.parametrize("attack", [flip, exchange, shift])
def test_a_chunk_that_lies_is_dropped_with_all_that_continues_it(attack: Callable[..., None]) -> None:
    played, tokens = Played(), prompt(1, 33)
    played.ask(tokens)
    played.ask([*tokens[:20], *prompt(2, 13)])
    keys, others = keys_of(tokens, 8), keys_of([*tokens[:20], *prompt(2, 13)], 8)
    assert played.states(keys) == played.states(others) == [READY] * 8
    lying = played.rows_of(keys)
    attack(played.offloading.rows(0, LAYOUT), lying[3], lying[4])
    name = played.ask(tokens)
    assert played.verified["different"] == 1
    assert played.states(keys) == [READY] * 3 + [ABSENT] * 5
    assert played.states(others) == [READY] * 3 + [ABSENT] * 5, "also those of a request that went on otherwise"
    (note,) = [note for note in played.engine.outputs[name].cache_report.notes if "is not what was computed" in note]
    assert note.startswith("what host kept of the tokens from 12 on is not what was computed: layers.0 is inf of")
    played.ask(tokens)
    assert played.states(keys) == [READY] * 8, "the next request stores it again"
    assert not broken_rule(played.engine)


def test_three_comparisons_in_a_row_that_find_lies_turn_the_connector_off() -> None:
    played = Played()
    for seed in range(3):
        tokens = prompt(seed, 33)
        played.ask(tokens)
        played.offloading.rows(0, LAYOUT)[played.rows_of(keys_of(tokens, 8)[:1])] ^= 1
        assert not broken_rule(played.engine)
        played.engine.add(f"again {seed}", tokens, 2)
        played.engine.run()
        evict_everything(played.engine)
    assert "3 comparisons in a row" in broken_rule(played.engine)


def test_only_what_steps_compute_anyway_is_compared_for_free() -> None:
    played, tokens = Played("free"), prompt(1, 33)
    for _ in range(3):
        played.ask(tokens)
    assert not played.verified, "it was restored"
    for _ in range(3):
        played.ask(tokens, kv_transfer_params={"max_load_tokens": 12})
    assert played.verified == {"equal": 3 * 5}


def test_requests_are_chosen_by_a_secret_and_no_more_than_their_share() -> None:
    played = Played(0.25)
    tokens = prompt(1, 33)
    for _ in range(80):
        played.ask(tokens)
    assert 0 < played.verified["equal"] // 8 < 40


def test_so_many_bytes_are_compared_in_a_second_and_no_more() -> None:
    layout = simulated_layout(60, block_tokens=16)
    played, per_s = Played(layout=layout, verify_bytes_per_s=4096), 4096 // layout.block_bytes
    for _ in range(20):
        played.ask(prompt(1, 129))
    assert per_s <= played.verified["equal"] <= per_s + per_s * played.engine.clock() < 19 * 8


# --- verification that is broken is found by these tests ---------------------------------------------------------------


def compare_with_itself(patch: Patch) -> None:
    compare = Comparer.compare
    patch.setattr(
        Comparer, "compare", lambda self, job: compare(self, replace(job, compared={row: row for row in job.rows}))
    )


def compare_before_the_copy_has_ended(patch: Patch) -> None:
    def started(self: OffloadingWorker) -> None:
        for store in self._metadata.stores:
            if store.compared:
                self._gaps[store.job_id] = self._compare(store)
        wait(self)

    wait = OffloadingWorker.wait_for_save
    patch.setattr(OffloadingWorker, "wait_for_save", started)
    patch.setattr(OffloadingWorker, "_count", KernelWorker._count)


def drop_the_wrong_chunk(patch: Patch) -> None:
    drop = Verifier._drop
    patch.setattr(Verifier, "_drop", lambda self, chunk, gap: drop(self, chunk._replace(number=chunk.number + 1), gap))


@pytest.mark.parametrize("mutant", [compare_with_itself, compare_before_the_copy_has_ended, drop_the_wrong_chunk])
def test_broken_verification_is_found(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_chunk_that_lies_is_dropped_with_all_that_continues_it(exchange)


def test_what_was_not_copied_is_not_judged() -> None:
    played, tokens = Played(), prompt(1, 33)
    played.ask(tokens)
    (transfers,) = played.offloading.transfers
    transfers.auto = False
    played.engine.add("again", tokens, 2)
    while played.engine.scheduler.has_work():
        played.engine.step()
        for job in list(transfers.pending):
            transfers.complete(job, TransferOutcome.FAILED)
    assert not played.verified
    finish(played.engine, played.offloading)


class ReportingPart:
    """A worker's part of lower tiers that has something to report."""

    def take_report(self) -> TierReport:
        return TierReport(answers={3: (b"\x01", 1)})


def test_what_one_worker_finds_is_not_lost_among_what_others_report() -> None:
    """Found by reading: a report on lower tiers alone, merged with one that has gaps, dropped them."""
    workers, found = [], dict[int, tuple[Gap, ...]]({7: (Gap(1, 0, inf),)})
    for gaps in ({}, found):
        workers.append(OffloadingWorker(lambda _: cast("Any", None), cast("Any", ReportingPart())))
        workers[-1]._gaps = gaps
    for first, second in (workers, reversed(workers)):
        reports = [cast("TierReport", worker.build_connector_worker_meta()) for worker in (first, second)]
        merged = reports[0].aggregate(reports[1])
        decoded = msgspec.msgpack.Decoder(TierReport).decode(msgspec.msgpack.encode(merged))
        assert merged.gaps == decoded.gaps == found
        assert decoded.answers == {3: (b"\x01", 2)}
        workers[1]._gaps = found
