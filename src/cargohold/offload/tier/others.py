"""Who besides us may use a tier's directories: told at the start, for nothing else would show it.

What is not private may be meant so, and may not even be ours to change, as a volume in a container: it is told, and used.
Groups are passed over, for who is in one was somebody's decision, and the superuser, who may do everything anyhow.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

_SUPERUSER: Final = 0
_WHAT_TO_DO: Final = "use a directory that is private to this user (chmod 700), or set encryption_key"


def warn_of_owners(tier: str, directories: Iterable[Path]) -> None:
    """Say of each directory that is another user's that he can make us answer with KV of his."""
    for directory in directories:
        with suppress(OSError):  # who may not even look has other troubles, and hears of them
            owner = directory.stat().st_uid
            if owner not in (_SUPERUSER, os.geteuid()):
                _warn(tier, directory, f"belongs to user {owner}, who can put other KV in place of ours")


def warn_of_writers(tier: str, directories: Iterable[Path]) -> None:
    """The same of each directory in which everybody can replace what is there."""
    for directory in directories:
        with suppress(OSError):
            if _everybody_may(stat.S_IWOTH, directory) and not directory.stat().st_mode & stat.S_ISVTX:
                _warn(tier, directory, "is for everybody to write to, so anybody can put other KV in place of ours")


def warn_of_readers(tier: str, directory: Path, file: Path) -> None:
    """Say it if everybody can read what we write to a directory, of which ``file`` is an example: users' prompts, in effect."""
    with suppress(OSError):
        if _everybody_may(stat.S_IROTH, file):
            _warn(tier, directory, "is for everybody to read, and KV can be turned back into prompts")


def _everybody_may(right: int, path: Path) -> bool:
    """Whether all users of this machine have a right, and may enter the directories on the way. Raises ``OSError``."""
    place = path.resolve()
    return bool(place.stat().st_mode & right) and all(above.stat().st_mode & stat.S_IXOTH for above in place.parents)


def _warn(tier: str, directory: Path, reason: str) -> None:
    logger.warning("%s tier: %s %s; %s", tier, directory, reason, _WHAT_TO_DO)
