"""The parts that lower tiers are made of: each against what it says of itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.lab.simulation import VirtualClock
from cargohold.pace import Pace
from cargohold.tiers.scheduler_side.tasks import PAUSE_S, SteppedClock
from cargohold.tiers.scheduler_side.tier_state import LookupCache
from cargohold.tiers.scheduler_side.writing import DAY_S, MAX_LOOKS, Allowance, Backlog

KEYS = [bytes([at]) * 36 for at in range(20)]


def everything(keys: Sequence[bytes]) -> Sequence[bytes]:
    return keys


def add(backlog: Backlog, *chunks: tuple[bytes, bytes | None]) -> None:
    """Chunks, each with its parent, one after the other."""
    for key, parent in chunks:
        backlog.add([key], {key: parent})


class TestBacklog:
    def test_a_batch_is_of_all_prefixes_each_chunk_with_its_parent(self) -> None:
        backlog = Backlog(20)
        backlog.add(KEYS[:3], dict(zip(KEYS, (None, *KEYS), strict=False)))
        add(backlog, (KEYS[9], KEYS[8]))
        assert list(backlog.take(2, everything).items()) == [(KEYS[0], None), (KEYS[1], KEYS[0])]
        assert list(backlog.take(9, everything).items()) == [(KEYS[2], KEYS[1]), (KEYS[9], KEYS[8])]
        assert backlog.take(9, everything) == {}

    def test_what_has_left_host_memory_is_passed_over(self) -> None:
        backlog = Backlog(20)
        backlog.add(KEYS[:5], dict(zip(KEYS, (None, *KEYS), strict=False)))

        def there(keys: Sequence[bytes]) -> Sequence[bytes]:
            return [key for key in keys if key not in {KEYS[0], KEYS[3]}]

        assert list(backlog.take(2, there).items()) == [(KEYS[1], KEYS[0]), (KEYS[2], KEYS[1])]
        assert backlog.take(9, there) == {KEYS[4]: KEYS[3]}
        assert len(backlog) == 0

    def test_the_oldest_are_given_up_when_there_are_too_many(self) -> None:
        backlog = Backlog(3)
        add(backlog, *((key, None) for key in KEYS[:3]))
        backlog.add(KEYS[3:5], dict.fromkeys(KEYS))
        assert [backlog.take(1, everything) for _ in range(4)] == [
            *({key: None} for key in KEYS[2:5]),
            {},
        ]

    def test_what_was_used_is_written_last_and_the_end_of_a_prefix_before_its_start(self) -> None:
        backlog = Backlog(20)
        backlog.add(KEYS[:4], dict.fromkeys(KEYS))
        backlog.postpone([*KEYS[:2], KEYS[9]])  # the last is nothing that waits
        taken = [backlog.take(1, everything) for _ in range(4)]
        assert [key for batch in taken for key in batch] == [KEYS[2], KEYS[3], KEYS[1], KEYS[0]]

    def test_passing_over_many_takes_no_longer_for_each(self) -> None:
        """Found by measuring: 50,000 chunks that had gone while a disk was suspended cost the scheduler a second."""
        backlog = Backlog(50_000)
        keys = [at.to_bytes(36, "little") for at in range(50_000)]
        backlog.add(keys, dict.fromkeys(keys))
        looked_at: list[bytes] = []

        def nothing(keys: Sequence[bytes]) -> Sequence[bytes]:
            looked_at.extend(keys)
            return ()

        num_looks = []
        while len(backlog):
            assert backlog.take(9, nothing) == {}
            num_looks.append(len(looked_at))
            looked_at.clear()
        assert max(num_looks) <= MAX_LOOKS and sum(num_looks) == 50_000


class TestPresence:
    def test_an_answer_counts_for_a_while(self) -> None:
        clock = VirtualClock()
        lookup_cache = LookupCache(9, 10.0, clock)
        assert lookup_cache.get(KEYS[:1]) == [None]
        lookup_cache.note(KEYS[:2], [True, False])
        clock.advance(10)
        assert lookup_cache.get(KEYS[:3]) == [True, False, None]
        clock.advance(0.1)
        assert lookup_cache.get(KEYS[:1]) == [None]
        assert lookup_cache.last(KEYS[:3]) == [True, False, None]

    @given(limit=st.integers(2, 9), noted=st.lists(st.tuples(st.integers(0, 11), st.booleans()), max_size=60))
    def test_the_last_half_is_remembered_and_no_more_than_the_limit(
        self, limit: int, noted: list[tuple[int, bool]]
    ) -> None:
        lookup_cache = LookupCache(limit, 10.0, VirtualClock())
        last: dict[int, bool] = {}
        for at, is_there in noted:
            lookup_cache.note(KEYS[at : at + 1], [is_there])
            last.pop(at, None)
            last[at] = is_there
            assert len(lookup_cache) <= limit
        for at in [*last][-(limit // 2) :]:
            assert lookup_cache.get(KEYS[at : at + 1]) == [last[at]]
        for at, answer in enumerate(lookup_cache.last(KEYS[:12])):
            assert answer in (None, last.get(at))

    def test_what_is_forgotten_is_not_known(self) -> None:
        lookup_cache = LookupCache(9, 10.0, VirtualClock())
        lookup_cache.note(KEYS[:2], [True, False])
        lookup_cache.forget(KEYS[1:3])
        assert (lookup_cache.get(KEYS[:1]), lookup_cache.last(KEYS[1:2])) == ([True], [None])


class TestPace:
    @given(
        fixed=st.floats(0, 1),
        each=st.floats(1e-6, 1),
        amounts=st.lists(st.integers(1, 1000), min_size=2, max_size=20, unique=True),
    )
    def test_it_finds_the_line_that_the_measurements_are_on(
        self, fixed: float, each: float, amounts: list[int]
    ) -> None:
        pace = Pace(VirtualClock(), 60)
        for amount in amounts:
            pace.note(amount, fixed + each * amount)
        assert pace.predict(500) == pytest.approx(fixed + each * 500, rel=1e-3, abs=1e-3)
        assert pace.predict(500, times=3) == pytest.approx(3 * fixed + each * 500, rel=1e-2, abs=1e-2)

    def test_nothing_takes_less_than_no_time(self) -> None:
        pace = Pace(VirtualClock(), 30.0)
        pace.note(5, 0.1)
        pace.note(10, 1.0)
        assert pace.predict(1) == pytest.approx(0.09, abs=0.02), "in proportion"

    def test_with_one_amount_measured_more_is_thought_cheap(self) -> None:
        pace = Pace(VirtualClock(), 60)
        pace.note(10, 1.0)
        pace.note(10, 3.0)
        predicted = pace.predict(1000)
        assert predicted is not None and 1.0 < predicted < 3.0

    def test_nothing_is_known_at_first_and_after_a_long_time(self) -> None:
        clock = VirtualClock()
        pace = Pace(clock, 60)
        assert pace.predict(1) is None
        pace.note(1, 1.0)
        clock.advance(61)
        assert pace.predict(1) is None
        pace.note(1, 5.0)
        assert pace.predict(1) == pytest.approx(5.0)

    def test_a_measurement_that_other_work_has_made_long_counts_less(self) -> None:
        pace = Pace(VirtualClock(), 60, least_weight=0.25)
        for _ in range(10):
            pace.note(10, 0.1)
        pace.note(10, 1.0)
        assert pace.predict(10) == pytest.approx(0.16, abs=0.01), "a quarter of its weight; with all of it, 0.27"

    @pytest.mark.parametrize("least_weight", [1.0, 0.25])
    def test_a_medium_that_has_become_slow_is_found_slow(self, least_weight: float) -> None:
        pace = Pace(VirtualClock(), 60, least_weight)
        for amount in range(1, 20):
            pace.note(amount, 0.001 * amount)
        for amount in range(1, 40):
            pace.note(amount, 0.1 * amount)
        assert pace.predict(100) == pytest.approx(10, rel=0.1)


class TestAllowance:
    @given(st.lists(st.tuples(st.floats(0, 4000), st.integers(0, 200)), max_size=100))
    def test_a_day_is_exceeded_by_an_hours_share_at_most(self, wishes: list[tuple[float, int]]) -> None:
        clock = VirtualClock()
        allowance = Allowance(1000, clock)
        spent = 0
        for wait_s, wish in wishes:
            if clock() + wait_s > DAY_S:
                break
            clock.advance(wait_s)
            num_chunks = min(wish, allowance.available)
            allowance.spend(num_chunks)
            spent += num_chunks
        assert spent <= 1000 * (1 + 1 / 24)

    def test_no_more_is_saved_up_than_for_an_hour_and_never_less_than_one_chunk(self) -> None:
        clock = VirtualClock()
        plenty, little = Allowance(2400, clock), Allowance(2, clock)
        for _ in range(2):
            clock.advance(10 * DAY_S)
            assert (plenty.available, little.available) == (100, 1)
            plenty.spend(100)
            little.spend(1)
            assert (plenty.available, little.available) == (0, 0)

    def test_whoever_starts_again_and_again_writes_little_more_than_the_limit(self) -> None:
        """Found by reading: a start could write an hour's share at once, so one each two minutes wrote 30 times the limit."""
        clock = VirtualClock()
        spent, per_day = 0, 14_400
        while clock() < DAY_S:
            allowance = Allowance(per_day, clock)
            for _ in range(2):
                num_chunks = allowance.available
                assert num_chunks > 0, "something can be written at once"
                allowance.spend(num_chunks)
                spent += num_chunks
                clock.advance(60)
        assert spent <= 1.5 * per_day
        assert Allowance(2, clock).available == 1

    def test_all_of_it_can_be_used(self) -> None:
        clock = VirtualClock()
        allowance = Allowance(1000, clock)
        spent = 0
        while clock() < DAY_S:
            num_chunks = allowance.available
            allowance.spend(num_chunks)
            spent += num_chunks
            clock.advance(600)
        assert spent >= 990


class TestSteppedClock:
    def test_a_short_gap_between_steps_counts_and_a_long_one_does_not(self) -> None:
        clock = VirtualClock()
        stepped = SteppedClock(clock)
        start = stepped()
        for gap_s in (PAUSE_S / 2, 3600.0, PAUSE_S / 2):
            stepped.begin_step()
            stepped.end_step()
            clock.advance(gap_s)
        assert stepped() - start == pytest.approx(PAUSE_S)

    def test_a_step_counts_however_long_it_takes_and_though_the_one_before_has_ended(self) -> None:
        """Before, the second of two steps in flight was taken for a pause: no deadline passed while prompts were computed."""
        clock = VirtualClock()
        stepped = SteppedClock(clock)
        start = stepped()
        stepped.begin_step()
        for _ in range(5):
            stepped.begin_step()
            stepped.end_step()
            clock.advance(4)
        assert stepped() - start == pytest.approx(20)
        stepped.end_step()
        stepped.end_step()  # an end without a beginning
        stepped.begin_step()
        clock.advance(4)
        stepped.end_step()
        assert stepped() - start == pytest.approx(24), "nobody looked while it ran"

    @given(st.lists(st.tuples(st.sampled_from(["look", "begin", "end"]), st.floats(0, 5)), max_size=60))
    def test_it_never_goes_back_nor_faster_than_time(self, events: list[tuple[str, float]]) -> None:
        clock = VirtualClock()
        stepped = SteppedClock(clock)
        before = stepped()
        for event, advance_s in events:
            clock.advance(advance_s)
            if event == "begin":
                stepped.begin_step()
            elif event == "end":
                stepped.end_step()
            now = stepped()
            assert 0 <= now - before <= advance_s + 1e-9
            before = now
