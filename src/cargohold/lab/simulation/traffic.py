"""Traffic: the actions that happen to an engine (requests, aborts, hints, resets, restarts), and what writes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeAlias

from cargohold.lab.simulation.fingerprints import tokens_alone
from cargohold.lab.simulation.replica import VOCAB_SIZE, root_of_salt
from cargohold.protocol import Hint

Tokens: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request arrives.

    Attributes:
        at: virtual time in seconds.
        request_id: that of no request that is alive. Of one that has ended, if a client uses it again.
        prompt: the prompt's tokens.
        max_tokens: most tokens to generate.
        priority, salt, params: see ``Request``; ``params`` are its ``kv_transfer_params``.
        stop: a token that ends the answer; ``None`` for none.
        hints: what its client says of its future.
        tenant: whose request it is; ``None`` for the salt, if there is one.
    """

    at: float
    request_id: str
    prompt: Tokens
    max_tokens: int
    priority: int = 0
    salt: str | None = None
    params: Mapping[str, Any] | None = None
    stop: int | None = None
    hints: tuple[Hint, ...] = ()
    tenant: str | None = None

    def answer(self) -> list[int]:
        """The tokens that the request generates when it has an engine to itself."""
        tokens = tokens_alone(self.prompt, self.max_tokens, VOCAB_SIZE, root_of_salt(self.salt))
        return tokens[: tokens.index(self.stop) + 1] if self.stop in tokens else tokens

    def __str__(self) -> str:
        wishes = "".join(
            f", {name}={value!r}"
            for name, value in (
                ("priority", self.priority),
                ("salt", self.salt),
                ("tenant", self.tenant),
                ("params", self.params),
                ("hints", [hint.kind.value for hint in self.hints]),
            )
            if value
        )
        return f"{self.request_id} arrives: {len(self.prompt)} tokens, {self.max_tokens} to generate{wishes}"


@dataclass(frozen=True, slots=True)
class Abort:
    """A client aborts its request."""

    at: float
    request_id: str

    def __str__(self) -> str:
        return f"{self.request_id} is aborted"


@dataclass(frozen=True, slots=True)
class SendHints:
    """Hints about a prefix, without a request."""

    at: float
    prompt: Tokens
    salt: str | None
    hints: tuple[Hint, ...]
    tenant: str | None = None

    def __str__(self) -> str:
        kinds = ", ".join(hint.kind for hint in self.hints)
        who = "" if self.tenant is None else f", tenant={self.tenant!r}"
        return f"hints about {len(self.prompt)} tokens, salt={self.salt!r}{who}: {kinds}"


@dataclass(frozen=True, slots=True)
class Reset:
    """All caches are to be reset.

    Attributes:
        at: virtual time in seconds.
        sleeps: whether the device sleeps while requests are paused: they go on afterwards, with the same weights.
    """

    at: float
    sleeps: bool = False

    def __str__(self) -> str:
        return "the device sleeps" if self.sleeps else "caches are to be reset"


@dataclass(frozen=True, slots=True)
class Restart:
    """The process dies and comes back; requests that have not ended are sent again."""

    at: float

    def __str__(self) -> str:
        return "the process dies and comes back"


Action: TypeAlias = Ask | Abort | SendHints | Reset | Restart


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sends requests and hints.

    Attributes:
        salt: what keeps its KV apart from that of others; ``None`` if it shares prefixes with all others that have none.
        tenant: its name, if that is not its salt.
    """

    salt: str | None = None
    tenant: str | None = None


@dataclass(slots=True)
class Writer:
    """Writes traffic.

    Attributes:
        random: source of random numbers.
        actions: the actions written so far.
        now: virtual time of the next action.
    """

    random: Random
    actions: list[Action] = field(default_factory=list)
    now: float = 0.0
    _num_requests: int = 0

    def text(self, low: int, high: int) -> Tokens:
        """New random tokens, between ``low`` and ``high`` of them."""
        # Cheap random numbers: prompts need not be good ones, only different ones.
        bits, length = self.random.getrandbits, self.random.randint(low, high)
        return tuple(bits(30) % VOCAB_SIZE for _ in range(length))

    def pause(self, longest_s: float) -> None:
        """Let some time pass; often none, so that requests come in bursts."""
        if self.random.random() < 0.6:
            self.now += self.random.random() * longest_s

    def ask(self, prompt: Sequence[int], max_tokens: int, **options: Any) -> Ask:
        """Write that a request arrives now; returns it."""
        self._num_requests += 1
        ask = Ask(self.now, f"r{self._num_requests}", tuple(prompt), max_tokens, **options)
        self.actions.append(ask)
        return ask

    def abort(self, ask: Ask, within_s: float) -> None:
        """Write that a request is aborted at a random time within ``within_s`` after its arrival."""
        self.actions.append(Abort(ask.at + self.random.random() * within_s, ask.request_id))

    def retry(self, ask: Ask, after_s: float, max_tokens: int) -> Ask:
        """Write that a client aborts its request ``after_s`` after its arrival, if it is alive, and repeats it at once.

        The new request has the id of the old one, and may have another limit of tokens.
        """
        again = replace(ask, at=ask.at + after_s, max_tokens=max_tokens)
        self.actions += (Abort(again.at, ask.request_id), again)
        return again

    def send_hints(self, prompt: Sequence[int], client: Sender, hints: Sequence[Hint]) -> None:
        """Write that a client gives hints now about a prefix."""
        self.actions.append(SendHints(self.now, tuple(prompt), client.salt, tuple(hints), client.tenant))

    def reset(self, *, sleeps: bool = False) -> None:
        self.actions.append(Reset(self.now, sleeps))

    def sorted_actions(self) -> tuple[Action, ...]:
        """The actions written so far, in order of time."""
        return tuple(sorted(self.actions, key=lambda action: action.at))


def without_used_ids(actions: Sequence[Action]) -> tuple[Action, ...]:
    """The same traffic with an id of its own for every request: for engines that give requests ids themselves."""
    times_asked: Counter[str] = Counter()
    changed: list[Action] = []
    for action in actions:
        if isinstance(action, SendHints | Reset | Restart):
            changed.append(action)
            continue
        times_asked[action.request_id] += isinstance(action, Ask)
        attempt = times_asked[action.request_id]
        changed.append(replace(action, request_id=f"{action.request_id}.{attempt}") if attempt > 1 else action)
    return tuple(changed)
