"""Block hashes: equal hash, equal prefix."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.blocks import extend_hashes, root_hash

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def hashes_of(token_ids: list[int], block_tokens: int = 4, salt: str | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, block_tokens, root_hash(salt=salt))
    return hashes


@given(left=tokens, right=tokens)
def test_hashes_are_equal_exactly_as_far_as_whole_blocks_are(left: list[int], right: list[int]) -> None:
    common = 0
    while common < min(len(left), len(right)) and left[common] == right[common]:
        common += 1
    for at, (a, b) in enumerate(zip(hashes_of(left), hashes_of(right), strict=False)):
        assert (a == b) == ((at + 1) * 4 <= common)


@given(token_ids=tokens, cut=st.integers(0, 20))
def test_hashes_may_be_computed_in_any_portions(token_ids: list[int], cut: int) -> None:
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids[:cut], 4, root_hash())
    extend_hashes(hashes, token_ids, 4, root_hash())
    assert hashes == hashes_of(token_ids)
    assert len(hashes) == len(token_ids) // 4


def test_salt_and_adapter_separate_prompts() -> None:
    roots = [
        root_hash(),
        root_hash(salt=""),
        root_hash(salt="a"),
        root_hash(adapter="a"),
        root_hash(salt="a", adapter="b"),
        root_hash(salt="ab", adapter=""),
        root_hash(salt="b", adapter="a"),
    ]
    assert len(set(roots)) == len(roots)
    assert not set(hashes_of([1, 2, 3, 4], salt="a")) & set(hashes_of([1, 2, 3, 4], salt="b"))


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_a_token_id_out_of_range_is_refused_rather_than_wrapped(bad: int) -> None:
    with pytest.raises(OverflowError):
        hashes_of([bad], block_tokens=1)


def test_hashes_are_stable_across_versions() -> None:
    # Stored KV is found by these: changing them silently would orphan or, worse, mix it.
    assert hashes_of([1, 2, 3, 4, 5, 6, 7, 8])[-1].hex().startswith("3f4c00fd76ff1fc4")
