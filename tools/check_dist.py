"""Install what ``make dist`` built in clean environments of this Python, and use it: ``python tools/check_dist.py dist``.

The wheel alone, the wheel with the command line, and the source distribution. Exits with 1 if one fails.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

BASE = "from cargohold import OffloadConfig; print(OffloadConfig(host_bytes='1GiB').host_bytes)"
FLAGS = ["-m", "cargohold", "vllm-flags", "--host", "1GiB", "--disk", "/kv:1GiB", "--elsewhere"]
HELP = ["-m", "cargohold", "--help"]


def main() -> int:
    """Try each; returns the exit status."""
    directory = Path(sys.argv[1]).resolve()
    (wheel,), (source,) = directory.glob("cargohold-*.whl"), directory.glob("cargohold-*.tar.gz")
    tries = {"wheel": str(wheel), "wheel with cli": f"{wheel}[cli]", "source distribution": str(source)}
    status = 0
    for name, what in tries.items():
        said = problem(what, HELP if what.endswith("]") else FLAGS)
        sys.stdout.write(f"Python {sys.version.split()[0]}, {name}: {said or 'ok'}\n")
        status |= bool(said)
    return status


def problem(what: str, command: list[str]) -> str:
    """Install it alone, and run a line of Python and a command; returns the end of what failed, or nothing."""
    with tempfile.TemporaryDirectory() as place:
        venv.create(place, with_pip=True)
        python = Path(place, "bin", "python")
        for words in (["-m", "pip", "install", "--quiet", what], ["-c", BASE], command, ["-m", "pip", "check"]):
            done = subprocess.run([python, *words], cwd=place, capture_output=True, text=True, check=False)  # noqa: S603  # our own
            if done.returncode:
                return f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
