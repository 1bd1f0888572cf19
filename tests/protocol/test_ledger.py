"""Counted references, against a plain list of them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.errors import BlockNotHeldError
from cargohold.protocol.guard import BlockLedger

BLOCKS = st.lists(st.integers(1, 4), max_size=6)


@given(st.lists(st.tuples(st.booleans(), BLOCKS), max_size=20))
def test_what_is_given_back_was_taken_and_of_a_refusal_nothing_stays(moves: list[tuple[bool, list[int]]]) -> None:
    ledger, held = BlockLedger(), list[int]()
    for takes, block_ids in moves:
        lacking = Counter(block_ids) - Counter(held)
        if takes:
            ledger.take(block_ids)
            held += block_ids
        elif lacking:
            with pytest.raises(BlockNotHeldError) as raised:
                ledger.give_back(block_ids)
            named = raised.value.block_id
            assert named in lacking
            assert (raised.value.held, raised.value.given_back) == (held.count(named), block_ids.count(named))
        else:
            ledger.give_back(block_ids)
            for block_id in block_ids:
                held.remove(block_id)
        assert ledger.counts() == Counter(held)
        assert (len(ledger), bool(ledger)) == (len(held), bool(held))
    ledger.counts().clear()  # a copy
    assert sorted(ledger.give_back_all()) == sorted(held)
    assert not ledger and len(ledger) == 0 and ledger.give_back_all() == ()
