"""Keeps models from being loaded at the same time."""

from __future__ import annotations

import threading
from typing import Final

ONE_AT_A_TIME: Final = threading.Lock()
"""Held while transformers makes a model, and while a model is tried out.

While transformers makes a model, it sets torch's default dtype for the whole process, and afterwards sets it back to what it
found. Two threads that did so at once would make models of each other's dtype, and might leave it changed for ever.
"""
