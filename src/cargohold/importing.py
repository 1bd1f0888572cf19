"""Import of users' own classes and functions, which options name as ``MODULE:NAME``."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from cargohold.errors import ConfigError, one_line


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


def search_current_directory() -> None:
    """Append the current directory to ``sys.path``, which lacks it in installed commands: its modules are found last."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
