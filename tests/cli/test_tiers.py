"""``cargohold run`` with a disk or a shared store below host memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import Command

PROMPT = "The harbour master wrote down every ship that came in with the tide, and what it had on board. " * 6


def test_the_next_run_finds_what_this_one_has_kept(cargohold: Command, chat_model: str, tmp_path: Path) -> None:
    run = ("run", chat_model, "-p", PROMPT, "--max-tokens", "4", "--json", "--host-bytes", "8MiB")
    disk = ("--disk-dir", str(tmp_path / "kv"), "--disk-bytes", "32MiB")
    first, second = (json.loads(cargohold(*run, *disk).out) for _ in range(2))
    assert first["token_ids"] == second["token_ids"]
    assert not first["metrics"]["restored_tokens"]
    assert second["metrics"]["restored_tokens"]["disk"] > 64
    assert "in disk" in second["cache_notes"][-1]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--disk-dir", "kv"), "--host-bytes"),
        (("--host-bytes", "8MiB", "--disk-dir", "/proc/kv"), "--disk-dir='/proc/kv'"),
        (("--host-bytes", "8MiB", "--disk-dir", "kv", "--disk-bytes", "lots"), "--disk-bytes='lots'"),
        (("--host-bytes", "8MiB", "--shared-url", "ftp://kv"), "--shared-url='ftp://kv'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    options: tuple[str, ...],
    named: str,
    cargohold: Command,
    chat_model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = cargohold("run", chat_model, "-p", "x", *options)
    assert result.status == 2
    assert named in result.err.splitlines()[-1]
