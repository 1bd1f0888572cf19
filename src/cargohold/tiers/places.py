"""The places that users name for tiers: directories and URLs, and who else may read or write there.

Warnings at the start if other users may read or write a tier's directories, because nothing else would show that.

A directory that is not private may be meant to be so, and may not even be ours to change, like a volume in a container. So it
is used all the same. Access of groups is not reported, because an administrator chose their members; nor is the superuser's,
who may do everything anyway.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlsplit

from cargohold.errors import HIDDEN_OPTION, ConfigError

logger = logging.getLogger(__name__)


def place_of(directory: Path) -> Path:
    """Return the directory, or the one above in which it would be made. Raises ``OSError`` if files cannot be written there."""
    place = next(each for each in (directory, *directory.parents) if os.path.lexists(each))
    problem = None
    if not stat.S_ISDIR(place.stat().st_mode):
        problem = errno.ENOTDIR
    elif os.statvfs(place).f_flag & os.ST_RDONLY:
        problem = errno.EROFS
    elif not os.access(place, os.W_OK | os.X_OK):
        problem = errno.EACCES
    if problem is not None:
        raise OSError(problem, os.strerror(problem), str(place))
    return place


# --- URLs of shared stores --------------------------------------------------------------------------------------------

OBJECT_SCHEMES: Final = ("s3", "gs", "az", "file")
REDIS_SCHEMES: Final = ("redis", "rediss", "valkey", "valkeys", "unix")
MOONCAKE: Final = "mooncake"
SCHEMES: Final = (*OBJECT_SCHEMES, *REDIS_SCHEMES, MOONCAKE)
PARALLEL_PROBES: Final = 32
"""Number of objects that a worker asks an object store for at the same time."""

_MAX_PORT: Final = 65535
_SECRET: Final = re.compile(HIDDEN_OPTION + "[^&#]*")


def is_url(place: str) -> bool:
    """Whether it is meant as the URL of a store, also if its slashes were forgotten, and not as a path."""
    return "://" in place or place.startswith(tuple(f"{scheme}:" for scheme in SCHEMES))


def scheme_of(url: str) -> str:
    """Return a URL's scheme in small letters, even if the URL is otherwise malformed."""
    return url.partition(":")[0].lower()


def directory_of(url: str) -> Path | None:
    """Return the directory that a valid URL names; ``None`` if it names a server."""
    return Path(unquote(urlsplit(url).path)) if scheme_of(url) == "file" else None


def url_of(directory: Path) -> str:
    """Return the URL of a shared store in a directory, whose path is absolute."""
    return f"file://{quote(os.fsencode(directory))}"


def without_secrets(url: str) -> str:
    """Return a URL without user and password, for messages."""
    shown = _SECRET.sub(r"\1***", url)
    scheme, colon, rest = shown.partition("://" if "://" in shown else ":")
    return f"{scheme}{colon}{rest.rpartition('@')[2]}"


def require_place(url: object) -> None:
    """Raise ``ConfigError`` unless a URL names a store completely: clients would silently use another place instead."""
    if not isinstance(url, str):
        raise ConfigError("url", url, "it must be the URL of a store, such as s3://bucket/prefix")
    scheme, shown = scheme_of(url), without_secrets(url)
    if scheme not in SCHEMES:
        as_url = f"; a directory that engines share is written {url_of(Path(url))}" if url.startswith("/") else ""
        raise ConfigError("url", shown, f"the scheme must be one of {', '.join(SCHEMES)}{as_url}")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        # The error's text may quote the password.
        raise ConfigError("url", shown, f"it must be a URL, such as {_example(scheme)}") from error
    is_whole = url[len(scheme) :].startswith("://")
    if scheme == "file":
        is_place = parts.netloc in ("", "localhost") and parts.path.startswith("/") and not parts.query + parts.fragment
        expected = "it must be file:///absolute/path, with ? and # written as %3F and %23"
    elif scheme in OBJECT_SCHEMES:
        is_place = bool(parts.netloc)
        expected = f"it must name a bucket, such as {_example(scheme)}"
    elif scheme == "unix":
        is_place = parts.hostname is None and len(parts.path) > 1 and _has_database(parts)
        expected = f"it must be the absolute path of a socket, such as {_example(scheme)}, and a database a number"
    else:
        if not _has_port(parts):
            # In a URL without a host, a password may stand in the place of the port.
            if not parts.netloc.rpartition(":")[2].isdecimal():
                shown = f"{scheme}://..."
            expected = (
                f"the port must be a number from 1 to {_MAX_PORT}, and in a password : / ? # @ be written as %3A ..."
            )
            raise ConfigError("url", shown, expected)
        is_place = not parts.fragment and (_is_master(parts) or _has_database(parts))
        expected = f"it must be {_example(scheme)} or, of Redis, without the database, which is a number"
    if not (is_whole and is_place):
        raise ConfigError("url", shown, expected)


def _example(scheme: str) -> str:
    if scheme in REDIS_SCHEMES:
        return "unix:///path/of/socket?db=0" if scheme == "unix" else f"{scheme}://host:6379/0"
    examples = {"file": "file:///absolute/path", "az": "az://container/prefix", MOONCAKE: "mooncake://master:50051"}
    return examples.get(scheme, f"{scheme}://bucket/prefix")


def _has_port(parts: SplitResult) -> bool:
    """Whether the port is valid, or left out."""
    try:
        return parts.port != 0
    except ValueError:
        return False


def _is_master(parts: SplitResult) -> bool:
    """Whether it names a master of Mooncake's and its port."""
    return parts.scheme == MOONCAKE and bool(parts.hostname and parts.port) and not parts.path.strip("/")


def _has_database(parts: SplitResult) -> bool:
    """Whether the database is a number, or left out. The client would silently use another database than an invalid one."""
    if parts.scheme == MOONCAKE:
        return False
    path = "" if parts.scheme == "unix" else unquote(parts.path).strip("/")
    names = [*parse_qs(parts.query, keep_blank_values=True).get("db", []), *([path] if path else [])]
    return all(name.isascii() and name.isdecimal() for name in names)


# --- warnings at the start if other users may read or write a tier's directories --------------------------------------

_SUPERUSER: Final = 0
_WHAT_TO_DO: Final = "use a directory that is private to this user (chmod 700), or set encryption_key"


def warn_of_owners(tier: str, directories: Iterable[Path]) -> None:
    """Log a warning for each directory that belongs to another user, who can put KV of his own in place of ours."""
    for directory in directories:
        with suppress(OSError):  # if we may not even look, opening the directory fails and reports that
            owner = directory.stat().st_uid
            if owner not in (_SUPERUSER, os.geteuid()):
                _warn(tier, directory, f"belongs to user {owner}, who can replace KV")


def warn_of_writers(tier: str, directories: Iterable[Path]) -> None:
    """Log a warning for each directory in which every user can replace files."""
    for directory in directories:
        with suppress(OSError):
            if _everybody_may(stat.S_IWOTH, directory) and not directory.stat().st_mode & stat.S_ISVTX:
                _warn(tier, directory, "can be written by everyone, so anyone can replace KV")


def warn_of_readers(tier: str, directory: Path, file: Path) -> None:
    """Log a warning if every user can read what we write to a directory (``file`` is an example): in effect, prompts."""
    with suppress(OSError):
        if _everybody_may(stat.S_IROTH, file):
            _warn(tier, directory, "can be read by everyone, and KV can be turned back into prompts")


def _everybody_may(right: int, path: Path) -> bool:
    """Whether all users have ``right`` on ``path``, and may enter all directories above it. Raises ``OSError``."""
    place = Path(os.path.realpath(path))  # unlike ``resolve``, which raises something else for links in a circle
    return bool(place.stat().st_mode & right) and all(above.stat().st_mode & stat.S_IXOTH for above in place.parents)


def _warn(tier: str, directory: Path, reason: str) -> None:
    logger.warning("%s tier: %s %s; %s", tier, directory, reason, _WHAT_TO_DO)
