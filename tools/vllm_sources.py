"""Fetch the source distribution of vLLM, for its tests: from the index's own list, as pip would want PyTorch to look into it.

python tools/vllm_sources.py 0.32.0 build/vllm-sources
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import Request, urlopen

_LIST = "application/vnd.pypi.simple.v1+json"


def index_url() -> str:
    """The index that pip asks."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    if url := os.environ.get("PIP_INDEX_URL") or asked.stdout.strip():
        return url
    from pip._internal.models.index import PyPI  # noqa: PLC0415  # only where nobody has set another

    return str(PyPI.simple_url)


def fetch(version: str) -> bytes:
    """The file's bytes, checked against the list. Ends the process if there is none."""
    page = urljoin(index_url().rstrip("/") + "/", "vllm/")
    with urlopen(Request(page, headers={"Accept": _LIST})) as answer:  # noqa: S310  # an address of pip's
        files = json.load(answer)["files"]
    name = f"vllm-{version}.tar.gz"
    entry = next((file for file in files if file["filename"] == name), None)
    if entry is None:
        raise SystemExit(f"the index has no {name}")
    with urlopen(urljoin(page, entry["url"])) as answer:  # noqa: S310  # of that list
        data: bytes = answer.read()
    if hashlib.sha256(data).hexdigest() != entry["hashes"]["sha256"]:
        raise SystemExit(f"{name} is not what the index says")
    return data


def main() -> None:
    """Unpack the tests into the folder, unless they are there."""
    version, folder = sys.argv[1], Path(sys.argv[2])
    if (folder / f"vllm-{version}" / "tests").is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"vllm-{version}.tar.gz"
    archive.write_bytes(fetch(version))
    with tarfile.open(archive) as tar:
        tests = [member for member in tar.getmembers() if member.name.startswith(f"vllm-{version}/tests/")]
        tar.extractall(folder, members=tests, filter="data")
    archive.unlink()


if __name__ == "__main__":
    main()
