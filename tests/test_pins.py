"""``make check`` finds pinned versions that cannot be had for a Python that we promise."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

TOOL = Path(__file__).parent.parent / "tools" / "check_pins.py"
PROJECT = """[project]
requires-python = ">=3.11"
classifiers = ["Programming Language :: Python :: 3.11", "Programming Language :: Python :: 3.14", "Typing :: Typed"]
"""


def publish(index: Path, name: str, version: str, python: str) -> None:
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(index / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        of = f"Name: {name}\nVersion: {version}\nRequires-Python: {python}\n"
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\n{of}")
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: us\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "")


def test_a_pin_that_a_promised_python_cannot_have_is_named(tmp_path: Path) -> None:
    """Found by use: with Debian 12's Python 3.11.2 ``make docs`` found no version of one of its packages."""
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    for name, python in (("anywhere", ">=3.9"), ("newer", ">=3.11.5"), ("older", "<3.14")):
        publish(tmp_path, name, "1.0", python)
    pinned = {
        "constraints.txt": "# ours\nanywhere==1.0\nnewer==1.0\n",
        "constraints-vllm.txt": "anywhere==1.0\nolder==1.0\n",
        "constraints-lowest.txt": "older==1.0\n",
    }
    for name, text in pinned.items():
        (tmp_path / name).write_text(text)
    only_here = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, str(TOOL)]
    run = subprocess.run(command, cwd=tmp_path, env=os.environ | only_here, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.splitlines() == [
        "constraints.txt, Python 3.11.0: Package 'newer' requires a different Python: 3.11.0 not in '>=3.11.5'",
        "constraints-vllm.txt, Python 3.14.0: Package 'older' requires a different Python: 3.14.0 not in '<3.14'",
    ]


def test_an_index_that_is_not_reached_is_no_missing_version(tmp_path: Path) -> None:
    """Found by use: after half an hour, a connection that was reset was called a missing version."""
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    for name in ("constraints.txt", "constraints-lowest.txt"):
        (tmp_path / name).write_text("anywhere==1.0\n")
    nobody = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1", "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, str(TOOL)]
    run = subprocess.run(command, cwd=tmp_path, env=os.environ | nobody, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    said = "not checked, the package index was not reached; run it again"
    assert run.stderr.splitlines() == [f"constraints.txt, Python {python}: {said}" for python in ("3.11.0", "3.14.0")]
