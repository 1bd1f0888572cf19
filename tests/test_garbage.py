"""When the garbage collector looks at what is made."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from cargohold.cli.app import loaded
from cargohold.process import collected_in_one_go, made_for_good
from tests.command import Command


class Ring:
    """Refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def dropped_ring() -> weakref.ref[Ring]:
    return weakref.ref(Ring())


@pytest.fixture(autouse=True)
def _is_on() -> Iterator[None]:
    """Leave to the next test a collector that is on."""
    yield
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _as_before() -> Iterator[None]:
    """Leave to other modules a collector that looks at nothing that there is (see ``tests.conftest``)."""
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def test_garbage_of_work_is_collected_at_its_end() -> None:
    with collected_in_one_go():
        ring = dropped_ring()
        more = [Ring() for _ in range(10_000)]  # enough to be looked at, if anything were
        assert ring() is not None
    assert ring() is None
    assert len(more) == 10_000
    assert gc.isenabled()


def test_what_is_made_for_good_is_never_looked_at_again() -> None:
    with made_for_good():
        garbage, ring = dropped_ring(), Ring()
        assert garbage() is not None
    assert garbage() is None
    kept = weakref.ref(ring)
    del ring
    later = dropped_ring()
    gc.collect()
    assert kept() is not None
    assert later() is None
    assert gc.isenabled()


def test_also_when_it_fails() -> None:
    with pytest.raises(RuntimeError), made_for_good():
        raise RuntimeError
    assert gc.isenabled()
    with pytest.raises(RuntimeError), collected_in_one_go():
        raise RuntimeError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with made_for_good(), collected_in_one_go():
        pass
    assert not gc.isenabled()


class Interrupting(Ring):
    """Ctrl-C is pressed while it is collected: Python would print a ``KeyboardInterrupt`` of ``__del__``, and ignore it."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("collected", [made_for_good, collected_in_one_go])
def test_ctrl_c_in_a_collection_comes_after_it(collected: Callable[[], AbstractContextManager[None]]) -> None:
    def work() -> None:
        with collected():
            Interrupting()

    with pytest.raises(KeyboardInterrupt):
        work()
    assert gc.isenabled()


LOADED = """
import gc, sys, weakref
from cargohold.cli.app import loaded
with loaded(sys.argv[1]) as llm:
    left = weakref.ref(llm)
del llm
gc.collect()
assert left() is None
"""


def test_a_model_that_a_command_has_closed_is_gone(chat_model: str) -> None:
    with loaded(chat_model) as llm:
        left = weakref.ref(llm)
    del llm
    gc.collect()
    assert left() is None


@pytest.mark.long
def test_a_model_that_the_first_command_of_a_process_has_closed_is_gone(chat_model: str) -> None:
    """Found by looking: errors that libraries had caught while they were imported kept it, and were never looked at."""
    subprocess.run([sys.executable, "-c", LOADED, chat_model], check=True)


def test_a_command_never_looks_at_its_model_again(cargohold: Command, chat_model: str) -> None:
    gc.unfreeze()
    assert cargohold("run", chat_model, "--prompt", "Ships", "--max-tokens", "2").status == 0
    assert gc.get_freeze_count() > 100_000
