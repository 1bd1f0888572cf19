"""Warnings at the start if other users may read or write a tier's directories, because nothing else would show that.

A directory that is not private may be meant to be so, and may not even be ours to change, like a volume in a container. So it
is used all the same. Access of groups is not reported, because somebody decided who is in a group; nor is the superuser's, who
may do everything anyway.
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
    """Log a warning for each directory that belongs to another user, who can put KV of his own in place of ours."""
    for directory in directories:
        with suppress(OSError):  # if we may not even look, opening the directory fails and reports that
            owner = directory.stat().st_uid
            if owner not in (_SUPERUSER, os.geteuid()):
                _warn(tier, directory, f"belongs to user {owner}, who can put other KV in place of ours")


def warn_of_writers(tier: str, directories: Iterable[Path]) -> None:
    """Log a warning for each directory in which every user can replace files."""
    for directory in directories:
        with suppress(OSError):
            if _everybody_may(stat.S_IWOTH, directory) and not directory.stat().st_mode & stat.S_ISVTX:
                _warn(tier, directory, "is for everybody to write to, so anybody can put other KV in place of ours")


def warn_of_readers(tier: str, directory: Path, file: Path) -> None:
    """Log a warning if every user can read what we write to a directory (``file`` is an example): in effect, prompts."""
    with suppress(OSError):
        if _everybody_may(stat.S_IROTH, file):
            _warn(tier, directory, "is for everybody to read, and KV can be turned back into prompts")


def _everybody_may(right: int, path: Path) -> bool:
    """Whether all users have ``right`` on ``path``, and may enter all directories above it. Raises ``OSError``."""
    place = path.resolve()
    return bool(place.stat().st_mode & right) and all(above.stat().st_mode & stat.S_IXOTH for above in place.parents)


def _warn(tier: str, directory: Path, reason: str) -> None:
    logger.warning("%s tier: %s %s; %s", tier, directory, reason, _WHAT_TO_DO)
