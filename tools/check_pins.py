"""Ask pip whether every pinned version can be had for the lowest Python that ``pyproject.toml`` promises, and for the highest.

Run from the repository's root. Prints one line per file and Python that lack a version, and exits with 1 if there are
any; with 2 if the index was not reached, which says nothing of the versions. The lowest versions that we support are older than
the highest Python, so they are asked for with the lowest only.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

USUAL = "constraints.txt"
LOWEST = "constraints-lowest.txt"
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--dry-run", "--ignore-installed", "--no-deps")
BROKEN = "connection broken by"  # pip then finds no version, as if there were none
UNREACHED = "the package index was not reached"


def main() -> int:
    """Check every file of pinned versions; returns the exit status."""
    lowest, highest = promised()
    usual = pins(Path(USUAL))
    # What two files have in common is asked for once.
    files = {path.name: pins(path) - usual for path in Path().glob("constraints*.txt")} | {USUAL: usual}
    asked = [(name, pinned, lowest) for name, pinned in sorted(files.items())]
    asked += [(name, pinned, highest) for name, pinned in sorted(files.items()) if name != LOWEST]
    with ThreadPoolExecutor() as threads:  # most of the time goes by waiting for the index
        problems = [said for said in threads.map(missing, *zip(*asked, strict=True)) if said]
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    if not problems:
        return 0
    return 2 if all(UNREACHED in problem for problem in problems) else 1


def promised() -> tuple[str, str]:
    """The lowest Python that the package promises, and the highest that it names."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    return f"{project['requires-python'].removeprefix('>=')}.0", f"{named[-1]}.0"


def pins(path: Path) -> set[str]:
    """The pinned versions in a file."""
    return {line for line in path.read_text(encoding="utf-8").splitlines() if "==" in line}


def missing(name: str, pinned: set[str], python: str) -> str:
    """What pip says of the first version for which it finds nothing; empty if there is none."""
    with tempfile.TemporaryDirectory() as directory:
        wanted = Path(directory, name)
        wanted.write_text("\n".join(sorted(pinned)), encoding="utf-8")
        # For a Python that is not its own, pip demands not to build anything, nor to install it where it would not run.
        other = ("--only-binary", ":all:", "--python-version", python, "--target", directory)
        command = [sys.executable, *PIP, *other, "--requirement", wanted]
        run = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # our own command
    if not run.returncode:
        return ""
    if BROKEN in run.stderr:
        return f"{name}, Python {python}: not checked, {UNREACHED}; run it again"
    reasons = re.findall(r"^ERROR: ((?:Could not find|Package) [^(\n]*)", run.stderr, re.MULTILINE)
    return f"{name}, Python {python}: {reasons[0].strip() if reasons else run.stderr}"


if __name__ == "__main__":
    sys.exit(main())
