"""``cargohold run`` with a disk or a shared store below host memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import cast

import pytest

import cargohold as cargohold_package
from cargohold.tiers import TierConfig
from cargohold.tiers.kinds import KINDS
from examples.own_tier.folder import FolderConfig
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


@pytest.mark.parametrize("kind", ["folder", "examples.own_tier.folder:FolderConfig"])
def test_a_kind_of_ones_own_is_a_line_in_the_table_or_a_name(
    kind: str, cargohold: Command, chat_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading, opening, counting, naming and the report at the start need nothing else of a kind."""
    monkeypatch.setitem(cast("dict[str, type[TierConfig]]", KINDS), "folder", FolderConfig)
    tier = json.dumps({"kind": kind, "path": str(tmp_path), "admission": "all"})
    run = ("run", chat_model, "-p", PROMPT, "--max-tokens", "4", "--json", "--host-bytes", "8MiB", "--tier", tier)
    first, second = (json.loads(cargohold(*run).out) for _ in range(2))
    assert first["token_ids"] == second["token_ids"]
    assert second["metrics"]["restored_tokens"]["folder"] > 64
    assert "in folder" in second["cache_notes"][-1]


def test_no_code_but_a_kinds_own_knows_it() -> None:
    """What makes a disk on purpose aside: the demo, and the measurement of a disk."""
    source = Path(cargohold_package.__file__).parent
    naming = {
        str(file.relative_to(source))
        for file in source.rglob("*.py")
        if re.search(r"import .*(Disk|Shared)TierConfig", file.read_text(encoding="utf-8"))
    }
    assert naming == {"__init__.py", "tiers/__init__.py", "tiers/kinds.py", "cli/demo.py", "cli/machine.py"}
