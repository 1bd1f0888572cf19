"""When Python's garbage collector looks at what is made.

Collections run with Ctrl-C held back. Python would raise ``KeyboardInterrupt`` in the first ``__del__`` that is called, where
exceptions are printed and then ignored.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from cargohold.interrupts import deferred_interrupt


@contextmanager
def collected_in_one_go() -> Iterator[None]:
    """Collect garbage only once, at the end of the block. For work that makes hardly any before its end."""
    try:
        with _off():
            yield
    finally:
        if gc.isenabled():
            with deferred_interrupt():
                gc.collect(0)  # looks only at objects made meanwhile, not at older ones


@contextmanager
def made_for_good() -> Iterator[None]:
    """Never look for garbage among what there is at the end of the block.

    For a process of our own that loads a model. Its libraries consist of some 600,000 objects that stay to the end. Looking at
    each of them again and again takes a fifth of the time to import them, and a quarter of a second whenever it happens later.
    Garbage made in the block is collected once, at its end: it would stay as well, with everything that it refers to.
    """
    with _off():
        try:
            yield
        finally:
            with deferred_interrupt():
                gc.collect()
                gc.freeze()


@contextmanager
def _off() -> Iterator[None]:
    """Collect nothing by itself inside the block; afterwards, as before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
