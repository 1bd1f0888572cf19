"""How much is drawn: little in ``make test``, 25 times as much in ``make test-long``."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def examples(count: int, **options: Any) -> settings:
    """Settings of a test of so many examples; with Hypothesis's profile ``long``, of 25 times as many."""
    return settings(max_examples=count * (25 if settings.get_current_profile_name() == "long" else 1), **options)
