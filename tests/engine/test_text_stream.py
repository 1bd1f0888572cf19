"""Text up to a stop string, released piece by piece, against a naive search of the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from cargohold.engine.model.tokenizer import PieceDecoder
from cargohold.engine.text_stream import TextStream


@dataclass(frozen=True, slots=True)
class Pieces:
    """A decoder whose tokens are pieces of text, by number."""

    texts: Sequence[str]

    def step(self, token_id: int) -> str:
        return self.texts[token_id]


def text_until_stop(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, bool]:
    """The text after the first piece that completes a stop string, cut before it; else the whole text."""
    text = ""
    for piece in pieces:
        text += piece
        found = [text.index(stop) for stop in stops if stop in text]
        if found:
            return text[: min(found)], True
    return text, False


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_what_is_released_is_the_text_before_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    expected, stops_early = text_until_stop(pieces, stops)
    stream = TextStream(cast("PieceDecoder", Pieces(pieces)), stops)
    released = ""
    for at in range(len(pieces)):
        ended = stream.push(at)
        released += stream.release(finished=ended)
        assert stream.released == released
        assert expected.startswith(released), "text was released that a stop string takes back"
        if ended:
            break
    released += stream.release(finished=True)
    assert released == stream.released == expected
    assert stream.stopped == stops_early


@given(pieces=st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=8))
def test_without_a_stop_string_nothing_is_held_back(pieces: list[str]) -> None:
    stream = TextStream(cast("PieceDecoder", Pieces(pieces)))
    for at, piece in enumerate(pieces):
        assert not stream.push(at)
        assert stream.release(finished=False) == piece


def test_a_model_without_tokenizer_has_no_text() -> None:
    stream = TextStream(None)
    assert not stream.push(7)
    assert stream.release(finished=True) == ""
