"""Ctrl-C, held back until a moment when it does no harm."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold back the first Ctrl-C until the block is left; a second one interrupts at once.

    Does nothing outside the main thread, or where the program handles Ctrl-C itself.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupted = False

    def remember(_signal: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        raise KeyboardInterrupt


@contextmanager
def held_back_in_processes() -> Iterator[None]:
    """Hold back Ctrl-C while processes are started: in this process until the block is left, in the new ones for longer.

    They inherit a blocked SIGINT, which they have to unblock or ignore. A Python process that Ctrl-C reaches before it could
    decide about that prints a traceback.
    """
    with deferred_interrupt():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # started processes inherit the mask
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def interrupt_thread(thread: threading.Thread) -> None:
    """Raise ``KeyboardInterrupt`` in a thread, at its next line of Python: what Ctrl-C does to the main thread alone."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))
