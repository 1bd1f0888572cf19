"""Text up to a stop string, released piece by piece, against a naive search of the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cargohold.engine.model.tokenizer import PieceDecoder
from cargohold.engine.outputs import TextStream


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


# --- characters of several tokens -------------------------------------------------------------------------------------


def tokenizer_of_bytes() -> Tokenizer:
    """Characters that it does not know are written byte by byte, as SentencePiece does."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for text in (*"xy日", "\u2581"):
        vocabulary[text] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def tokenizer_of_letters_for_bytes() -> Tokenizer:
    """All is bytes, and every byte has a letter, as in GPT-2."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return backend


BACKENDS = [tokenizer_of_bytes(), tokenizer_of_letters_for_bytes()]


def tokens_of(backend: Tokenizer, text: str) -> list[int]:
    if backend is BACKENDS[1]:
        return list(backend.encode(text).ids)
    found = [(backend.token_to_id(char.replace(" ", "\u2581")), char) for char in text]
    return [token for token_id, char in found for token in ([token_id] if token_id is not None else char.encode())]


@pytest.mark.parametrize("backend", BACKENDS, ids=["bytes", "letters"])
@given(text=st.text("xy 日é語🙂😀", max_size=16), cut=st.integers(0, 40))
def test_text_goes_on_where_the_prompt_ends_also_within_a_character(backend: Tokenizer, text: str, cut: int) -> None:
    text = f"x{text}x"
    token_ids = tokens_of(backend, text)
    at = 1 + cut % (len(token_ids) - 1)
    num_complete = max(num for num in range(len(text)) if len(tokens_of(backend, text[:num])) <= at)
    decoder = PieceDecoder(backend, token_ids[:at])
    assert "".join(map(decoder.step, token_ids[at:])) == text[num_complete:]


def test_a_prompt_that_ends_in_what_is_no_character_is_not_repeated() -> None:
    backend = BACKENDS[1]
    for end in ("\N{REPLACEMENT CHARACTER}".encode(), b"\xf0\x9f"):
        prompt = [*tokens_of(backend, "xy"), *token_ids_of(backend, end)]
        decoder = PieceDecoder(backend, prompt)
        assert "".join(map(decoder.step, tokens_of(backend, "xy"))) == "xy"


def test_what_will_never_be_a_character_is_not_held_back_for_ever() -> None:
    backend = BACKENDS[1]
    (no_character,) = token_ids_of(backend, b"\xff")
    decoder = PieceDecoder(backend)
    assert any(decoder.step(no_character) for _ in range(100))


def test_special_tokens_do_not_pile_up() -> None:
    backend = CountingBackend(BACKENDS[1])
    decoder = PieceDecoder(cast("Tokenizer", backend), tokens_of(BACKENDS[1], "xyx"))
    end = known(BACKENDS[1].token_to_id("<end>"))
    assert "".join(decoder.step(end) for _ in range(100)) == ""
    assert backend.longest < 20, "each token was decoded with all that came before it"
    assert "".join(map(decoder.step, tokens_of(BACKENDS[1], " y"))) == " y"


@dataclass(slots=True)
class CountingBackend:
    """A tokenizer that remembers how many tokens it had to decode at once."""

    backend: Tokenizer
    longest: int = 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        self.longest = max(self.longest, len(token_ids))
        text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


def token_ids_of(backend: Tokenizer, data: bytes) -> list[int]:
    """These bytes in letters, and the letters' tokens."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = [chr(byte) if byte in plain else chr(0x100 + others.index(byte)) for byte in data]
    return [known(backend.token_to_id(letter)) for letter in letters]


def known(token_id: int | None) -> int:
    assert token_id is not None
    return token_id
