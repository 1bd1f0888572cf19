"""Values of options as people write them: numbers, sizes such as ``2GiB``, names of what to import; and numbers for people."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard, cast

from cargohold.errors import ConfigError, one_line

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
NUMBER = r"[0-9]{1,40}(?:\.[0-9]{1,40})?"
"""Pattern of a size's number. Its length is limited because Python refuses to convert very long numbers."""
_SIZE = re.compile(rf"\s*({NUMBER})\s*([A-Za-z]*)\s*")
_SHORT_UNIT = re.compile(rf"\s*({NUMBER})\s*([KMGTkmgt])\s*")
MAX_TIMEOUT_S = 1_000_000
_SUCH_AS = "such as 2GiB, 512MiB, 1.5GB or 1000000"
LEAST_BYTES = 4096
"""No model's chunk of KV is smaller: a smaller size was written without its unit."""
SIZE_UNITS = "the units are B, KB, MB, GB, TB (1000 bytes and so on) and KiB, MiB, GiB, TiB (1024 bytes and so on)"
"""The error for a size that is invalid."""


def parse_bytes(key: str, value: int | str) -> int:
    """A number of bytes from ``2GiB``, ``512 mib``, ``1.5GB`` or a plain integer.

    Args:
        key: name of the option, for the error.
        value: what was given.

    Raises:
        ConfigError: it is not a size, or not a positive one.
    """
    num_bytes = _parse(value)
    if num_bytes is None:
        short = _SHORT_UNIT.fullmatch(value) if isinstance(value, str) else None
        meant = f"write {short[1]}{short[2].upper()}iB or {short[1]}{short[2].upper()}B" if short else _SUCH_AS
        raise ConfigError(key, value, f"it must be a number of bytes, {meant}; {SIZE_UNITS}")
    if num_bytes < 1:
        raise ConfigError(key, value, f"it must be a size above 0, {_SUCH_AS}")
    return num_bytes


def parse_room(key: str, value: int | str) -> int:
    """The same for a place where chunks of KV are kept. A size that has room for none lacks its unit: ``8`` for ``8GiB``."""
    num_bytes = parse_bytes(key, value)
    if num_bytes < LEAST_BYTES:
        raise too_small(key, value, "that is smaller than any chunk of KV")
    return num_bytes


def too_small(key: str, value: object, reason: str) -> ConfigError:
    """Return the refusal of a size that has no room for one chunk, with the unit that was probably meant."""
    match = _SIZE.fullmatch(str(value))
    is_bare = match is not None and match[2].lower() in ("", "b")
    return ConfigError(key, value, f"{reason}; did you mean {match[1]}GiB?" if match and is_bare else reason)


def parse_path(key: str, value: str | PathLike[str]) -> Path:
    """A path in which ``~`` stands for the user's home directory.

    Args:
        key: name of the option, for the error.
        value: what was given.

    Raises:
        ConfigError: the directory is unknown, as in containers for a user that the system does not know.
    """
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        expected = "there is no home directory for ~; set HOME, or use a path without ~"
        raise ConfigError(key, value, expected) from error


def format_bytes(num_bytes: float) -> str:
    """A size for people: ``1.5 GiB``, ``737 KiB``, ``12 B``."""
    for unit, size in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if num_bytes >= size:
            number = num_bytes / size
            return f"{number:.1f} {unit}" if number < 10 else f"{number:.0f} {unit}"
    return f"{num_bytes:.0f} B"


def format_time(seconds: float) -> str:
    """A time for people, in three digits: ``2.5 d``, ``45 s``, ``13.2 ms``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{1000 * seconds:.3g} ms"


def format_count(number: int, noun: str) -> str:
    """A number of things for people: ``1 request``, ``1,400 requests``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def is_int(value: object) -> TypeGuard[int]:
    """Whether it is an integer; ``True`` and ``2.0`` are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_positive_int(value: object) -> TypeGuard[int]:
    return is_int(value) and value >= 1


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite integer or float; ``True`` and NaN are not."""
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


def is_positive_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite number above 0."""
    return is_number(value) and value > 0


def is_timeout(value: object) -> TypeGuard[float]:
    """Whether it is a number of seconds that the system's own timeouts can hold: sockets take no more than 24 days."""
    return is_positive_number(value) and value <= MAX_TIMEOUT_S


def _parse(value: object) -> int | None:
    if is_int(value):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNITS:
        return None
    return int(Fraction(match[1]) * _UNITS[match[2].lower()])  # exact, with all digits


def import_named(key: str, name: str) -> Any:
    """Import ``MODULE`` and return its attribute ``NAME``.

    Args:
        key: the option, for the error.
        name: the option's value, ``MODULE:NAME``.

    Raises:
        ConfigError: it cannot be imported.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # a user's module may raise anything
        reason = f"{type(error).__name__}: {one_line(error)}"
        expected = "it must be MODULE:NAME of a module that is installed or in PYTHONPATH"
        raise ConfigError(key, name, f"it cannot be imported from here ({reason}); {expected}") from error


def import_class(key: str, name: str, base: type, expected: str) -> Any:
    """Import a class that an option names. Raises ``ConfigError`` if it is not ``expected``, one derived from ``base``."""
    found = import_named(key, name)
    if not isinstance(found, type) or not issubclass(found, base):
        raise ConfigError(key, name, f"it must be {expected}")
    if lacking := getattr(found, "__abstractmethods__", ()):
        raise ConfigError(key, name, f"the class lacks {', '.join(sorted(lacking))}")
    return found


def find_factory(key: str, name: object) -> Callable[..., Any]:
    """Return what an option names as ``MODULE:FACTORY``, which must be callable. Raises ``ConfigError`` if it is not."""
    if not isinstance(name, str) or ":" not in name:
        raise ConfigError(key, name, "it must be MODULE:FACTORY")
    found = import_named(key, name)
    if not callable(found):
        raise ConfigError(key, name, "it must be MODULE:FACTORY of something that can be called")
    return cast("Callable[..., Any]", found)


def made_by(key: str, name: str, kind: type, *args: Any, **options: Any) -> Any:
    """Call the factory that an option names. Raises ``ConfigError`` if it fails, or what it makes is not of this kind."""
    try:
        made = find_factory(key, name)(*args, **options)
    except ConfigError:
        raise
    except Exception as error:  # a user's factory may raise anything
        raise ConfigError(key, name, f"it failed: {type(error).__name__}: {one_line(error)}") from error
    if not isinstance(made, kind):
        raise ConfigError(
            key, name, f"it returned a {type(made).__name__}, and must return a {kind.__module__}.{kind.__name__}"
        )
    return made


@contextmanager
def somebody_elses(key: str, name: str) -> Iterator[None]:
    """Turn whatever third-party code raises inside the ``with`` into a ``ConfigError``."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # it may raise anything
        raise ConfigError(key, name, f"it rejects its options ({type(error).__name__}: {one_line(error)})") from error


def search_current_directory() -> None:
    """Append the current directory to ``sys.path``, which lacks it in installed commands: its modules are found last."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
