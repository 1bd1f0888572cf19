"""The examples run on a tiny model, and print what their READMEs show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import example_runs
from tests.example_runs import EXAMPLES, NAMES

TAKE_LONG = {"disaggregated/run", "sizing_notebook/run"}
"""Two servers and a proxy, where ``connector.test_handoff`` hands off prefixes in one process; and replays of a whole
trace, as in ``replay``."""

SAME_EVERYWHERE = {"own_engine/run", "own_policy/run", "sizing_notebook/run"}
"""Their numbers are those of no model and no machine."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in TAKE_LONG else ()) for name in NAMES]
)
def test_example(
    name: str, chat_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "vllm" in example_runs.imports(name):
        pytest.skip("runs in `make test-vllm`")
    if lacking := example_runs.missing(name):
        pytest.skip(f"needs {', '.join(lacking)}")
    monkeypatch.chdir(tmp_path)
    printed = example_runs.run(name, chat_model, monkeypatch, capsys)
    numbers = name in SAME_EVERYWHERE
    assert example_runs.differences(example_runs.shown(name), printed, numbers=numbers) == [], printed
    assert list(tmp_path.iterdir()) == [], "an example leaves files where it is run"


def test_every_folder_is_an_example_in_the_table() -> None:
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    folders = sorted(folder.name for folder in EXAMPLES.iterdir() if folder.is_dir() and folder.name[0] not in "._")
    assert [name for name in folders if f"{name}/run" not in NAMES] == [], "a folder has no run.py"
    assert [name for name in folders if f"| [{name}]({name}/README.md) |" not in table] == []


@pytest.mark.parametrize(
    ("shown", "wrong"),
    [
        ("12 tokens\n", []),
        ("3,456.7  tokens\nsame: yes\n", []),
        ("12 ... \n", []),
        ("12 blocks\n", ["12 blocks"]),
        ("same: yes\n12 tokens\n", ["12 tokens"]),
    ],
)
def test_what_counts_as_shown(shown: str, wrong: list[str]) -> None:
    assert example_runs.differences(shown, "98 tokens\nsame: yes\n") == wrong
