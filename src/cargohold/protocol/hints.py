"""Hints: what clients and routers may ask of the cache, and what it answers.

A client, a router or an agent's orchestrator knows what no cache can learn: that an agent waits for a test run, that a
conversation is over, that the next turn comes in 200 ms. It says so in *hints*, each an action on the prefix of a request.
Every hint gets exactly one *outcome*. A hint never changes a token, never crosses a salt or tenant, and never raises a hard
limit; one that is malformed, unknown or of another version is rejected, and its request is served as without it.

Hints travel in the envelope that engines and routers have agreed on, as JSON or as an object with these attributes::

    {"protocol_version": "1", "message_id": "m1", "actions": [
        {"action_id": "a1", "action_type": "retain", "action_version": "1", "payload": {"ttl_s": 600, "priority": 80}}]}
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count
from reprlib import repr as shown  # a client may send values of any size
from typing import Any, Final, Self

from cargohold.protocol.engine_view import Adapter, ExtraKey
from cargohold.protocol.turns import TurnEnd

NORMAL_PRIORITY: Final = 50
"""The priority of chunks without hints."""
MAX_PRIORITY: Final = 100
RAISED_PRIORITY: Final = 80
"""The priority of ``retain`` where the hint names none."""
MAX_HINTS: Final = 64
"""Maximum number of hints that one envelope, or one call, may have. The others are not read: they are rejected as one."""
HINTS_KEY: Final = "cargohold_hints"
"""Our own key for hints in a request's ``kv_transfer_params``, and for their outcomes in the response."""
EXPLAIN: Final = "cargohold_explain"
"""Key in a request's ``kv_transfer_params`` that asks for an explanation, and in the response that gives it."""
FRONT_KEY: Final = "cargohold_front"
"""The key for hints that a front has made of what a client has said in other words: they are not answered in the response."""
PARAMS_KEYS: Final = (HINTS_KEY, "kv_hint")
"""The keys in a request's ``kv_transfer_params`` under which hints are looked for."""

_VERSIONS: Final = frozenset({"1", "1.0", "v1"})
_MAX_NAME: Final = 128
_MAX_TOKEN_ID: Final = 2**32 - 1
"""Block hashes have four bytes for each token."""
_PREFIX: Final = "kv."


class HintKind(StrEnum):
    """What is asked for."""

    RETAIN = "retain"
    """The chunks are worth more, or less, than the policy thinks, for a time: they are evicted later, or earlier."""
    PIN = "pin"
    """A lease: the chunks are not evicted from host memory while it lasts. Each use by a request renews it."""
    PREFETCH = "prefetch"
    """Bring chunks up from lower tiers now, before the request comes."""
    DEMOTE = "demote"
    """The chunks will not be used soon: their slots in host memory are for others. Lower tiers keep them, or none does."""
    RELEASE = "release"
    """End leases and raised priorities."""
    SHARE = "share"
    """Other requests will want the chunks, which a shared tier has: look there and bring them up, then retain them."""


_OTHER_NAMES: Final[Mapping[str, HintKind]] = {"fetch": HintKind.SHARE}
"""What routers call a kind."""


class HintStatus(StrEnum):
    """The answer to a hint."""

    ACCEPTED = "accepted"
    """It is done, or will be as chunks come."""
    CLIPPED = "clipped"
    """It is done in part: a limit, which the reason names, allows no more."""
    DEFERRED = "deferred"
    """It has begun, and ends later: an event tells how."""
    REJECTED = "rejected"
    """Nothing was done, and the reason says why."""
    MISSING = "missing"
    """Nothing was done, because the cache has nothing to act on."""


@dataclass(frozen=True, slots=True)
class HintOutcome:
    """The answer to one hint.

    Attributes:
        action_id: id of the hint.
        status: the answer.
        reason: the limit that has clipped it, or why it was rejected or finds nothing; empty if it was accepted.
        num_tokens: number of tokens, from the start of the prefix on, that it acts on now.
    """

    action_id: str
    status: HintStatus
    reason: str = ""
    num_tokens: int = 0

    def __str__(self) -> str:
        what = f"hint {self.action_id}: {self.status}"
        return f"{what}, {self.reason}" if self.reason else what


class HintEnd(StrEnum):
    """How a hint ended that was accepted, clipped or deferred."""

    DONE = "done"
    """A prefetch has brought its chunks up; a demotion has written them down, or has dropped them."""
    FAILED = "failed"
    """A prefetch or a demotion has ended without all of its chunks: its deadline has passed, or a tier has failed."""
    EXPIRED = "expired"
    """The time of a lease, or of a priority, is over."""
    RELEASED = "released"
    """A later hint has ended it."""
    VOID = "void"
    """What it was about is gone: the cache was reset, its last chunk was found damaged, or lost."""


@dataclass(frozen=True, slots=True)
class HintEvent:
    """A hint has ended.

    Attributes:
        action_id: id of the hint.
        kind: what was asked for.
        end: how it ended.
        tenant: the tenant that asked.
    """

    action_id: str
    kind: HintKind
    end: HintEnd
    tenant: str | None = None


_numbers = count(1)


def _next_id() -> str:
    return f"hint-{next(_numbers)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """One thing that is asked of the cache, about the prefix of a request. See the class methods.

    Attributes:
        kind: what is asked for.
        action_id: its name in outcomes and events.
        start: first token that it is about. Whatever keeps a chunk also keeps those before it, so this matters only for
            ``demote`` and lowered priorities.
        end: number of the token after the last one; ``None`` for all, those that the request generates included.
        priority: for ``retain`` and ``share``: from 0, evicted first, to 100, evicted last; 50 is normal.
        ttl_s: for ``retain``, ``pin`` and ``share``: seconds that it lasts; ``None`` for as long as the configuration allows.
        lease: for ``pin``: name of the lease, which renews the tenant's lease of that name; for ``release``: the lease to end.
        to: for ``prefetch`` and ``share``: ``host``; for ``demote``: ``lower`` tiers, or ``nowhere``.
        deadline_s: for ``prefetch`` and ``share``: seconds after which the chunks are no longer needed.
        token_ids: of a request's hint, the prompt that it is about instead of the request's; ``None`` for the request's own.
        part: what there is of the prompt before ``end``, from 0 to 1, for clients that do not know how many tokens it has.
    """

    kind: HintKind
    action_id: str = field(default_factory=_next_id)
    start: int = 0
    end: int | None = None
    priority: int = RAISED_PRIORITY
    ttl_s: float | None = None
    lease: str | None = None
    to: str | None = None
    deadline_s: float | None = None
    token_ids: tuple[int, ...] | None = None
    part: float | None = None

    def __post_init__(self) -> None:
        problem = _problem_of(self)
        if problem:
            raise ValueError(problem)

    def without_tokens(self) -> Hint:
        """Return the same without ``token_ids``, for the connector: it remembers hints, and a prompt may be long."""
        return self if self.token_ids is None else replace(self, token_ids=None)

    def within(self, num_prompt_tokens: int) -> Hint:
        """Return the same with a number of tokens in place of ``part``."""
        if self.part is None:
            return self
        return replace(self, end=max(1, int(self.part * num_prompt_tokens)), part=None)

    @classmethod
    def retain(cls, ttl_s: float | None = None, priority: int = RAISED_PRIORITY, **options: Any) -> Self:
        """Evict the chunks later than others, or earlier if ``priority`` is below 50, for ``ttl_s`` seconds."""
        return cls(kind=HintKind.RETAIN, ttl_s=ttl_s, priority=priority, **options)

    @classmethod
    def pin(cls, ttl_s: float | None = None, lease: str | None = None, **options: Any) -> Self:
        """Do not evict the chunks from host memory for ``ttl_s`` seconds after their last use."""
        return cls(kind=HintKind.PIN, ttl_s=ttl_s, lease=lease, **options)

    @classmethod
    def prefetch(cls, deadline_s: float | None = None, **options: Any) -> Self:
        """Bring the chunks up from lower tiers now."""
        return cls(kind=HintKind.PREFETCH, deadline_s=deadline_s, **options)

    @classmethod
    def demote(cls, to: str = "lower", **options: Any) -> Self:
        """Give the chunks' slots in host memory back."""
        return cls(kind=HintKind.DEMOTE, to=to, **options)

    @classmethod
    def release(cls, lease: str | None = None, **options: Any) -> Self:
        """End a lease by its name, or all leases and priorities of the chunks."""
        return cls(kind=HintKind.RELEASE, lease=lease, **options)

    @classmethod
    def share(cls, ttl_s: float | None = None, **options: Any) -> Self:
        """Look for the chunks in shared tiers, and keep them for ``ttl_s`` seconds."""
        return cls(kind=HintKind.SHARE, ttl_s=ttl_s, **options)

    @property
    def is_lowering(self) -> bool:
        """Whether it makes chunks worth less."""
        return self.kind is HintKind.DEMOTE or (self.kind is HintKind.RETAIN and self.priority < NORMAL_PRIORITY)


def _problem_of(hint: Hint) -> str:
    """Return what is wrong with the values of a hint; empty if nothing is."""
    is_range = _is_count(hint.start) and (hint.end is None or (_is_count(hint.end) and hint.end > hint.start))
    places = {HintKind.PREFETCH: ("host",), HintKind.SHARE: ("host",), HintKind.DEMOTE: ("lower", "nowhere")}
    allowed = places.get(hint.kind, ())
    for name, holds, expected in (
        ("action_id", _is_name(hint.action_id), f"text of at most {_MAX_NAME} characters"),
        ("tokens", is_range, "two integers, the first from 0 and the second above it"),
        (
            "priority",
            _is_count(hint.priority) and hint.priority <= MAX_PRIORITY,
            f"an integer from 0 to {MAX_PRIORITY}",
        ),
        ("ttl_s", hint.ttl_s is None or _is_seconds(hint.ttl_s), "a number of seconds above 0"),
        ("lease", hint.lease is None or _is_name(hint.lease), f"text of at most {_MAX_NAME} characters"),
        ("to", hint.to is None or hint.to in allowed, " or ".join(allowed) or "left out"),
        ("deadline_s", hint.deadline_s is None or _is_seconds(hint.deadline_s), "a number of seconds above 0"),
        ("part", hint.part is None or (_is_seconds(hint.part) and hint.part <= 1), "a number above 0, up to 1"),
        (
            "token_ids",
            hint.token_ids is None or _are_token_ids(hint.token_ids),
            f"a list of integers from 0 to {_MAX_TOKEN_ID}",
        ),
    ):
        if not holds:
            value = [hint.start, hint.end] if name == "tokens" else getattr(hint, name)
            return f"{name}={shown(value)} must be {expected}"
    return ""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_token_ids(values: object) -> bool:
    return isinstance(values, tuple) and all(_is_count(value) and value <= _MAX_TOKEN_ID for value in values)


def _is_seconds(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # At most the largest float, for it is added to times: an integer may be larger.
    return is_number and 0 < value <= sys.float_info.max  # type: ignore[operator]  # it is a number


def _is_name(value: object) -> bool:
    # Half a character, which JSON can write, has no bytes: an error about it could not be sent.
    return isinstance(value, str) and 0 < len(value) <= _MAX_NAME and value == value.encode(errors="replace").decode()


# --- envelopes --------------------------------------------------------------------------------------------------------


def parse_hints(given: object, max_tokens: int = sys.maxsize) -> tuple[list[Hint], list[HintOutcome]]:
    """Read hints that a client or router has sent.

    Args:
        given: an envelope, as a mapping or an object with the same attributes; one action or hint, or a list of either.
        max_tokens: number of token ids that they may bring along in all: an engine's thread reads and hashes them.

    Returns:
        The hints, and an outcome for each action that is none: it is malformed, unknown, or of another version. Those after
        the first ``MAX_HINTS`` have one together. Never raises.
    """
    try:
        actions, version = _actions_of(given)
    except Exception as error:  # noqa: BLE001  # what a client sends may be an object of any kind: it is rejected, no more
        return [], [HintOutcome("?", HintStatus.REJECTED, f"the hints cannot be read: {type(error).__name__}")]
    hints: list[Hint] = []
    rejected: list[HintOutcome] = []
    names: set[str] = set()
    for at, action in enumerate(actions[:MAX_HINTS]):
        found = _read(action, at, version, max_tokens)
        if isinstance(found, HintOutcome):
            rejected.append(found)
        elif found.action_id in names:
            rejected.append(HintOutcome(found.action_id, HintStatus.REJECTED, "another action has the same action_id"))
        else:
            names.add(found.action_id)
            hints.append(found)
            max_tokens -= len(found.token_ids or ())
    if len(actions) > MAX_HINTS:  # a body has room for millions, and an engine's thread reads them
        problem = f"there are {len(actions)} actions, of which the first {MAX_HINTS} are read"
        rejected.append(HintOutcome(f"#{MAX_HINTS}", HintStatus.REJECTED, problem))
    return hints, rejected


def _actions_of(given: Any) -> tuple[list[Any], object]:
    """Return the actions in what was given, and the version of their envelope; ``None`` if they came without one."""
    if isinstance(given, list | tuple):
        return list(given), None
    if isinstance(given, Hint) or _get(given, "action_type") is not None:
        return [given], None
    return list(_get(given, "actions")), str(_get(given, "protocol_version"))


def _get(given: Any, name: str) -> Any:
    return given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)


def _read(action: Any, at: int, version: object, max_tokens: int) -> Hint | HintOutcome:
    """Return the hint that an action is, or the outcome of one that is none."""
    name: Any = f"#{at}"
    try:
        given = _get(action, "action_id")
        name = given if _is_name(given) else name
        _check_number(action, max_tokens)
        return action if isinstance(action, Hint) else _hint_of(action, name, version)
    except ValueError as error:
        return HintOutcome(name, HintStatus.REJECTED, str(error))
    except Exception as error:  # noqa: BLE001  # see above
        return HintOutcome(name, HintStatus.REJECTED, f"it cannot be read: {type(error).__name__}")


def _check_number(action: Any, max_tokens: int) -> None:
    """Raise ``ValueError`` for too many token ids, before one of them is looked at."""
    token_ids = _get(action if isinstance(action, Hint) else _get(action, "payload"), "token_ids")
    if isinstance(token_ids, list | tuple) and len(token_ids) > max_tokens:
        expected = "with the hints before, that is more than a prompt may have (max_model_len)"
        raise ValueError(f"token_ids has {len(token_ids)} tokens: {expected}")


def _hint_of(action: Any, name: str, envelope_version: object) -> Hint:
    """Read an action. Raises ``ValueError`` that says what is wrong."""
    for what, version in (("protocol_version", envelope_version), ("action_version", _get(action, "action_version"))):
        if version is not None and str(version) not in _VERSIONS:
            raise ValueError(f"{what}={shown(version)} is unknown; it must be 1")
    kind = _kind_of(_get(action, "action_type"))
    payload = _get(action, "payload")
    if not isinstance(payload, Mapping | None):
        raise ValueError(f"payload={shown(payload)} must be an object")  # noqa: TRY004  # callers tell it as a wrong value
    options = dict(payload or {})
    if isinstance(token_ids := options.get("token_ids"), list):
        options["token_ids"] = tuple(token_ids)
    first, last = _range_of(options.pop("tokens", None))
    unknown = options.keys() - {"priority", "ttl_s", "lease", "to", "deadline_s", "token_ids", "part"}
    if unknown:
        raise ValueError(f"payload has {shown(min(map(str, unknown)))}, which is unknown")
    return Hint(kind=kind, action_id=name, start=first, end=last, **options)


def _kind_of(value: Any) -> HintKind:
    name = value.removeprefix(_PREFIX) if isinstance(value, str) else ""
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    try:
        return HintKind(name)
    except ValueError:
        raise ValueError(f"action_type={shown(value)} is unknown; there are {', '.join(HintKind)}") from None


def _range_of(tokens: Any) -> tuple[Any, Any]:
    if tokens is None:
        return 0, None
    if isinstance(tokens, Mapping):
        return tokens.get("start", 0), tokens.get("end")
    first, last = tokens
    return first, last


def hints_in(params: Mapping[str, Any] | None) -> object | None:
    """Return what a request's ``kv_transfer_params`` have as hints; ``None`` if there are none."""
    found = [params[key] for key in PARAMS_KEYS if params.get(key) is not None] if params else []
    return found[0] if found else None


def answers_to(
    hints: Sequence[Hint], status: HintStatus = HintStatus.REJECTED, reason: str = ""
) -> tuple[HintOutcome, ...]:
    """Return the same answer to each hint."""
    return tuple(HintOutcome(hint.action_id, status, reason) for hint in hints)


_ORDER: Final = (
    HintStatus.REJECTED,
    HintStatus.MISSING,
    HintStatus.CLIPPED,
    HintStatus.ACCEPTED,
    HintStatus.DEFERRED,
)
"""From what says least of a hint's success to what says most of it."""


def best_outcome(outcomes: Sequence[HintOutcome]) -> HintOutcome:
    """Return the answer to one hint that several caches have answered: the best counts, and all tokens that it acts on."""
    best = max(outcomes, key=lambda outcome: _ORDER.index(outcome.status))
    return replace(best, num_tokens=max(outcome.num_tokens for outcome in outcomes))


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix that hints are about when no request is running. Satisfies ``RequestView``.

    Attributes:
        block_hashes: one per full block.
        all_token_ids: its tokens; empty if only the hashes are known.
        num_tokens: how many tokens it has.
        salt: the salt of the requests that have it.
        tenant: the tenant that gives the hints.
    """

    block_hashes: Sequence[bytes]
    all_token_ids: Sequence[int]
    num_tokens: int
    salt: str | None = None
    tenant: str | None = None

    @property
    def request_id(self) -> str:
        """Empty: there is no request."""
        return ""

    @property
    def num_prompt_tokens(self) -> int:
        """All of them."""
        return self.num_tokens

    @property
    def adapter(self) -> Adapter | None:
        """None that is known."""
        return None

    def extra_keys(self, start: int, end: int) -> tuple[ExtraKey, ...]:
        """Return what hashes cover besides the tokens: the salt, at the start."""
        return () if start or self.salt is None else (self.salt,)

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """None: a client gives them with requests."""
        return None

    @property
    def turn_end(self) -> TurnEnd:
        """Unknown: there is no turn."""
        return TurnEnd.UNKNOWN
