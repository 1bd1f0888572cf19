"""Fixtures of all tests (see ``tests.conftest``) that call the command in this process, as a user calls it."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cargohold.cli import main


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a call of the command: exit status, standard output and standard error."""

    status: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture
def cargohold(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    def call(*args: str, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "argv", ["cargohold", *args])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        status = main()
        return Result(status, *capsys.readouterr())

    monkeypatch.setenv("COLUMNS", "200")
    logger = logging.getLogger("cargohold")
    handlers, level = list(logger.handlers), logger.level
    yield call
    logger.handlers = handlers
    logger.setLevel(level)


@pytest.fixture(scope="session")
def chat_model(models_dir: Path) -> str:
    """Path of a tiny model that reads and writes text."""
    import torch  # noqa: PLC0415  # tests of the command line itself run without it

    from tests.chat_model import save_chat_model  # noqa: PLC0415  # imports torch

    torch.set_num_threads(1)
    return save_chat_model(models_dir)
