"""Classes and functions of others, which options name by where they are: ``MODULE:NAME``."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from cargohold.errors import ConfigError, one_line


def import_named(key: str, name: str) -> Any:
    """What ``MODULE:NAME`` names; the module is imported.

    Args:
        key: the option, for the error.
        name: its value.

    Raises:
        ConfigError: it cannot be imported.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # a module of others may raise anything
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ConfigError(key, name, f"it cannot be imported from here ({reason})") from error


def search_current_directory() -> None:
    """Let modules in the current directory be found, behind all others; a command's own path lacks it. Mutates ``sys.path``."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
