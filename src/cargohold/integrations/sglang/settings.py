"""The options, from ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Self

from cargohold.errors import ConfigError
from cargohold.option_values import is_positive_number
from cargohold.options import Options, made, must
from cargohold.tiers import TierConfig, require_packages
from cargohold.tiers.kinds import TIERS

_OF_SGLANG: Final = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "file_storage_path"})
"""Options in the same place that SGLang reads itself."""
MAX_CALL_S: Final = 8.0
"""SGLang waits ten seconds for the threads that call us, before it flushes its cache, for instance."""
_CALL: Final = must(
    lambda value: is_positive_number(value) and value <= MAX_CALL_S,
    f"a number of seconds above 0, at most {MAX_CALL_S:g}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings(Options):
    """What the user wrote.

    Attributes:
        tiers: where pages are kept; asked in this order, and all of them are written to.
        look_up_timeout_s: maximum time in which to find out what is there.
        load_timeout_s: maximum time in which to load a batch of pages, and as much again for every 4096 tokens in it.
        store_timeout_s: maximum time in which to store a batch of pages.
    """

    tiers: Annotated[tuple[TierConfig, ...], TIERS]
    look_up_timeout_s: Annotated[float, _CALL] = 1.0
    load_timeout_s: Annotated[float, _CALL] = 1.0
    store_timeout_s: Annotated[float, _CALL] = 5.0

    def __post_init__(self) -> None:
        if not self.tiers:
            raise ConfigError("tiers", self.tiers, "there must be one at least")
        for at, tier in enumerate(self.tiers):
            if (tier.admission, tier.write) != ("all", "through"):
                name = "write" if tier.admission == "all" else "admission"
                expected = "SGLang decides what is written and when, by --hicache-write-policy"
                raise ConfigError(f"tiers[{at}].{name}", getattr(tier, name), expected)
            if tier.num_daily_bytes is not None:
                expected = "here nothing limits that; --hicache-write-policy write_through_selective writes less"
                raise ConfigError(f"tiers[{at}].max_daily_bytes", tier.num_daily_bytes, expected)

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any] | None) -> Self:
        """Read the options. Raises ``ConfigError`` naming the one that is unknown or impossible, or a missing package."""
        given = dict(extra_config or {})
        own = {key: value for key, value in given.items() if key not in _OF_SGLANG}
        if not given.get("interface_v1"):
            expected = "it must be 1; else SGLang copies every page twice, and asks for another form of pages"
            raise ConfigError("interface_v1", given.get("interface_v1"), expected)
        settings = made(cls, own)
        for tier in settings.tiers:
            require_packages(tier)
        return settings

    def load_s(self, num_tokens: int) -> float:
        """Seconds that loading pages of so many tokens may take: as SGLang's own prefetch timeout, which grows with them."""
        return min(MAX_CALL_S, self.load_timeout_s * (1 + num_tokens / 4096))
