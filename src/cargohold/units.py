"""Options as people write them."""

from __future__ import annotations

import re

from cargohold.errors import ConfigError

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_EXPECTED = "it must be a number of bytes, such as 2GiB, 512MiB, 1.5GB or 1000000"


def parse_bytes(key: str, value: int | str) -> int:
    """A number of bytes from ``2GiB``, ``512 MiB``, ``1.5GB`` or a plain integer.

    Args:
        key: name of the option, for the error.
        value: what was given.

    Raises:
        ConfigError: it is not a size, or not a positive one.
    """
    num_bytes = _parse(value)
    if num_bytes is None or num_bytes < 1:
        raise ConfigError(key, value, _EXPECTED)
    return num_bytes


def format_bytes(num_bytes: float) -> str:
    """A size for people: ``1.5 GiB``, ``737 KiB``, ``12 B``."""
    for unit, size in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if num_bytes >= size:
            number = num_bytes / size
            return f"{number:.1f} {unit}" if number < 10 else f"{number:.0f} {unit}"
    return f"{num_bytes:.0f} B"


def is_positive_int(value: object) -> bool:
    """Whether it is an integer from 1; ``True`` is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _parse(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in _UNITS:
        return None
    return int(float(match[1]) * _UNITS[match[2]])
