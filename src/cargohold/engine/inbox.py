"""Outputs of one call's requests until the call reads them."""

from __future__ import annotations

from dataclasses import replace

from cargohold.engine.outputs import RequestOutput


class Inbox:
    """Keeps at most one output per request, however slowly it is read.

    Each output has all of a request's text and tokens so far, so those of a long answer that nobody reads would together take
    memory with the square of its length. One thread takes outputs while others put some in.
    """

    def __init__(self) -> None:
        self._unread: dict[str, RequestOutput] = {}

    def __bool__(self) -> bool:
        return bool(self._unread)

    def put(self, output: RequestOutput) -> None:
        """Add an output, in place of the request's last one if that was not taken: ``new_text`` is then new in either of them.

        Only one thread at a time may call this.
        """
        # Not looked at and replaced: the reading thread may take it in between, and would then get its text twice.
        before = self._unread.pop(output.request_id, None)
        if before is not None:
            output = replace(output, new_text=before.new_text + output.new_text)
        self._unread[output.request_id] = output

    def take(self) -> RequestOutput | None:
        """Remove and return an output of any request; ``None`` if there is none."""
        try:
            return self._unread.popitem()[1]
        except KeyError:
            return None
