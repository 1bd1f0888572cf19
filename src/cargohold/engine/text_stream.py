"""Generated tokens as text, piece by piece, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from cargohold.engine.model.tokenizer import PieceDecoder


class TextStream:
    """Turns one request's tokens into text.

    A stop string may span several tokens: text is released only when it cannot be the beginning of one.

    Args:
        decoder: turns tokens into pieces of text; ``None`` for a model without tokenizer, whose text stays empty.
        stop: strings that end the text, which goes up to the first of them.
    """

    def __init__(self, decoder: PieceDecoder | None, stop: Sequence[str] = ()) -> None:
        self._decoder = decoder
        self._stop = stop
        self._num_released = 0
        self.text = ""
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether the text has reached a stop string."""
        return self.stop_string is not None

    def push(self, token_id: int) -> bool:
        """Add a token. Returns whether the text has reached a stop string."""
        if self._decoder is not None and not self.stopped:
            piece = self._decoder.step(token_id)
            # A new occurrence must end in the new piece, so what lies further back has been searched.
            search_from = max(0, len(self.text) - max(map(len, self._stop), default=0) + 1)
            self.text += piece
            found = [(at, stop) for stop in self._stop if (at := self.text.find(stop, search_from)) >= 0]
            if found:
                at, self.stop_string = min(found)
                self.text = self.text[:at]
        return self.stopped

    @property
    def released(self) -> str:
        """All text that was released so far."""
        return self.text[: self._num_released]

    def release(self, *, finished: bool) -> str:
        """Release text, all of it if ``finished``; returns the part that was not released before."""
        end = len(self.text) - (0 if finished or self.stopped else self._num_held_back())
        new = self.text[self._num_released : end]
        self._num_released = max(self._num_released, end)
        return new

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        return max(
            (
                length
                for stop in self._stop
                for length in range(1, min(len(stop), len(self.text) + 1))
                if self.text.endswith(stop[:length])
            ),
            default=0,
        )
