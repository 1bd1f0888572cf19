"""``longest_hit`` against a definition so plain that it cannot be wrong, on every small case."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cargohold.blocks import ABSENT, NOT_YET, READY, GroupUnits, PrefixHit, longest_hit
from cargohold.connector.kernel.offers import blocks_to_store
from cargohold.protocol import AttentionKind, KVCacheGroup

FULL = (AttentionKind.FULL, None)


class States:
    """Unit states from a list, remembering what was asked."""

    def __init__(self, states: Sequence[int]) -> None:
        self.states = bytes(states)
        self.asked: set[int] = set()

    def run(self, first: int, end: int) -> bytes:
        run = self.states[first:end]
        absent = run.find(ABSENT)
        run = run if absent < 0 else run[:absent]
        self.asked.update(range(first, min(first + len(run) + 1, end)))
        return run

    def window(self, first: int, end: int) -> bytes:
        assert first < end
        self.asked.update(range(first, end))
        return self.states[first:end]


def group_of(index: int, kind: tuple[AttentionKind, int | None], block_tokens: int) -> KVCacheGroup:
    return KVCacheGroup(index, kind[0], block_tokens, (f"layers.{index}",), kind[1])


def usable(
    group: KVCacheGroup,
    unit_tokens: int,
    states: Sequence[int],
    length: int,
    num_tokens: int,
    num_computed: int,
    *,
    needs_end: bool = False,
) -> bool:
    """Whether every token that the next query and later ones read is computed or in a present unit; or also the last unit."""
    if length % unit_tokens or length % group.hit_tokens:
        return False
    next_query = min(length, num_tokens - 1)
    first_needed = group.num_skipped_tokens(next_query) // group.block_tokens * group.block_tokens
    if needs_end:
        first_needed = min(first_needed, length - unit_tokens)
    return all(
        states[token // unit_tokens] == READY or (token // unit_tokens + 1) * unit_tokens <= num_computed
        for token in range(first_needed, length)
    )


def naive(
    groups: Sequence[tuple[KVCacheGroup, int]], states: Sequence[Sequence[int]], num_tokens: int, num_computed: int
) -> int:
    needs_end = all(any(group.num_skipped_tokens(at) == at for at in range(1, 9)) for group, _ in groups)
    for length in range(num_tokens, num_computed, -1):
        if all(
            usable(group, unit, of, length, num_tokens, num_computed, needs_end=needs_end)
            for (group, unit), of in zip(groups, states, strict=True)
        ):
            return length
    return num_computed


def find(
    groups: Sequence[tuple[KVCacheGroup, int]], states: Sequence[Sequence[int]], num_tokens: int, num_computed: int
) -> PrefixHit:
    return longest_hit(
        [GroupUnits(group, unit, States(of)) for (group, unit), of in zip(groups, states, strict=True)],
        num_tokens,
        num_computed,
    )


KINDS = [
    FULL,
    (AttentionKind.SLIDING_WINDOW, 1),
    (AttentionKind.SLIDING_WINDOW, 2),
    (AttentionKind.SLIDING_WINDOW, 4),
    (AttentionKind.SLIDING_WINDOW, 5),
    (AttentionKind.CHUNKED_LOCAL, 4),
    (AttentionKind.CHUNKED_LOCAL, 6),
    (AttentionKind.RECURRENT, None),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks_per_unit", [1, 2, 3])
def test_one_group_exhaustively(kind: tuple[AttentionKind, int | None], blocks_per_unit: int) -> None:
    block_tokens = 2
    unit = block_tokens * blocks_per_unit
    group = group_of(0, kind, block_tokens)
    for num_units in range(6):
        for states in itertools.product((ABSENT, READY), repeat=num_units):
            for num_tokens in {num_units * unit, num_units * unit + 1} - {0}:
                for num_computed in range(0, num_tokens, block_tokens):
                    expected = naive([(group, unit)], [states], num_tokens, num_computed)
                    assert find([(group, unit)], [states], num_tokens, num_computed) == PrefixHit(expected, False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hit_tokens", [4, 6, 8])
def test_a_hit_ends_where_the_engine_goes_on(kind: tuple[AttentionKind, int | None], hit_tokens: int) -> None:
    """With whatever is there, and with no more than what a hit that ends there can reach."""
    group = replace(group_of(0, kind, 2), hit_tokens=hit_tokens)
    for states in itertools.product((ABSENT, READY), repeat=8):
        for num_tokens, num_computed in ((16, 0), (17, 0), (16, 4), (17, 10)):
            expected = naive([(group, 2)], [states], num_tokens, num_computed)
            assert find([(group, 2)], [states], num_tokens, num_computed) == PrefixHit(expected, False)
    kept = blocks_to_store(group, range(1, 9), 1, 0, 8)[0]
    states = tuple(READY if at in kept else ABSENT for at in range(8))
    assert find([(group, 2)], [states], 17, 0) == PrefixHit(16 // hit_tokens * hit_tokens, False)


@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_is_present_nothing_is_usable(kind: tuple[AttentionKind, int | None]) -> None:
    """Found by a review: with chunked local attention alone, an empty cache answered a hit up to the last boundary."""
    for num_tokens in range(1, 30):
        assert find([(group_of(0, kind, 2), 2)], [[ABSENT] * 15], num_tokens, 0) == PrefixHit(0, False)


@pytest.mark.parametrize("kinds", list(itertools.combinations(KINDS, 2)))
@pytest.mark.parametrize("blocks_per_unit", [(1, 1), (1, 2), (2, 1)])
def test_two_groups_exhaustively(
    kinds: Sequence[tuple[AttentionKind, int | None]], blocks_per_unit: tuple[int, int]
) -> None:
    groups = [(group_of(at, kind, 2), 2 * blocks_per_unit[at]) for at, kind in enumerate(kinds)]
    num_tokens = 9
    num_units = [num_tokens // unit for _, unit in groups]
    for first in itertools.product((ABSENT, READY), repeat=num_units[0]):
        for second in itertools.product((ABSENT, READY), repeat=num_units[1]):
            for num_computed in (0, 2, 4):
                expected = naive(groups, [first, second], num_tokens, num_computed)
                assert find(groups, [first, second], num_tokens, num_computed).num_tokens == expected


def window_of_chunks(num_chunks: int, unit: int) -> tuple[AttentionKind, int]:
    """A sliding window that reaches into the last ``num_chunks`` chunks."""
    return AttentionKind.SLIDING_WINDOW, (num_chunks - 1) * unit + 2


def every_combination(groups: Sequence[tuple[KVCacheGroup, int]], num_chunks: int) -> None:
    """Compare the hit with the plain definition for every set of present chunks."""
    unit = groups[0][1]
    num_tokens = num_chunks * unit + 1
    every = list(itertools.product((ABSENT, READY), repeat=num_chunks))
    # Which lengths each group could use, by what of it is there: bit n for n chunks.
    masks = [
        [
            sum(
                1 << length
                for length in range(num_chunks + 1)
                if not length or usable(group, unit, states, length * unit, num_tokens, 0)
            )
            for states in every
        ]
        for group, _ in groups
    ]
    units = [[GroupUnits(group, unit, States(states)) for states in every] for group, _ in groups]
    for combination in itertools.product(range(len(every)), repeat=len(groups)):
        common = -1
        for mask, at in zip(masks, combination, strict=True):
            common &= mask[at]
        hit = longest_hit([of[at] for of, at in zip(units, combination, strict=True)], num_tokens)
        assert hit == PrefixHit((common.bit_length() - 1) * unit, False)


@pytest.mark.parametrize("window", [1, 2, 3, 4])
@pytest.mark.parametrize("per_chunk", [1, 2, 3])
def test_full_attention_and_a_window_of_so_many_chunks(window: int, per_chunk: int) -> None:
    unit = 2 * per_chunk
    kinds = (FULL, window_of_chunks(window, unit))
    every_combination([(group_of(at, kind, 2), unit) for at, kind in enumerate(kinds)], 6)


def test_full_attention_and_a_window_over_eight_chunks() -> None:
    every_combination([(group_of(0, FULL, 2), 2), (group_of(1, window_of_chunks(3, 2), 2), 2)], 8)


@pytest.mark.parametrize("windows", [(1, 2), (1, 4), (2, 3), (3, 4)])
@pytest.mark.parametrize("per_chunk", [1, 3])
def test_full_attention_and_two_windows(windows: tuple[int, int], per_chunk: int) -> None:
    unit = 2 * per_chunk
    kinds = (FULL, *(window_of_chunks(window, unit) for window in windows))
    every_combination([(group_of(at, kind, 2), unit) for at, kind in enumerate(kinds)], 4)


def test_three_groups_shorten_each_other_until_nothing_changes() -> None:
    full, near, far = (
        group_of(0, FULL, 2),
        group_of(1, (AttentionKind.SLIDING_WINDOW, 3), 2),
        group_of(2, (AttentionKind.SLIDING_WINDOW, 5), 2),
    )
    for states in itertools.product(itertools.product((ABSENT, READY), repeat=4), repeat=3):
        groups = [(full, 2), (near, 2), (far, 2)]
        assert find(groups, states, 9, 0).num_tokens == naive(groups, states, 9, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_not_yet_makes_the_answer_undecided_wherever_it_could_matter(kind: tuple[AttentionKind, int | None]) -> None:
    """If turning "not yet" into hits or misses could change the answer, it must be undecided."""
    group = group_of(0, kind, 2)
    for states in itertools.product((ABSENT, READY, NOT_YET), repeat=5):
        answers = set()
        unknown = [at for at, state in enumerate(states) if state == NOT_YET]
        for outcome in itertools.product((ABSENT, READY), repeat=len(unknown)):
            resolved = list(states)
            for at, state in zip(unknown, outcome, strict=True):
                resolved[at] = state
            answers.add(naive([(group, 2)], [resolved], 11, 0))
        hit = find([(group, 2)], [states], 11, 0)
        if len(answers) > 1:
            assert hit.undecided
        elif not hit.undecided:
            assert hit.num_tokens == answers.pop()


def test_full_attention_starts_all_lookups_up_to_the_first_miss() -> None:
    states = States([READY, NOT_YET, READY, NOT_YET, ABSENT, READY])
    hit = longest_hit([GroupUnits(group_of(0, FULL, 2), 2, states)], 13)
    assert hit.undecided
    assert states.asked == {0, 1, 2, 3, 4}


def test_a_window_does_not_ask_for_more_than_it_needs() -> None:
    states = States([READY] * 100)
    window = group_of(0, (AttentionKind.SLIDING_WINDOW, 5), 2)
    assert longest_hit([GroupUnits(window, 2, states)], 201) == PrefixHit(200, False)
    assert states.asked == {98, 99}


def test_a_run_may_show_the_absent_unit_at_its_end() -> None:
    """``UnitStates`` leaves that open."""

    class Shown(States):
        def run(self, first: int, end: int) -> bytes:
            return self.states[first : min(first + len(super().run(first, end)) + 1, end)]

    full = group_of(0, FULL, 2)
    for states in itertools.product((ABSENT, READY), repeat=4):
        for num_computed in (0, 2, 4):
            expected = naive([(full, 2)], [states], 9, num_computed)
            assert longest_hit([GroupUnits(full, 2, Shown(states))], 9, num_computed) == PrefixHit(expected, False)


def test_what_is_computed_is_not_asked_for() -> None:
    states = States([ABSENT, ABSENT, READY])
    assert longest_hit([GroupUnits(group_of(0, FULL, 2), 2, states)], 7, 4) == PrefixHit(6, False)
    assert states.asked == {2}


def test_a_limit_is_kept() -> None:
    states = States([READY] * 5)
    assert longest_hit([GroupUnits(group_of(0, FULL, 2), 2, states)], 11, 0, limit_tokens=5) == PrefixHit(4, False)
