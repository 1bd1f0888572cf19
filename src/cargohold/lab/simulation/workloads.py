"""Workloads, each of which draws traffic and the engine that it is meant for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Any, Final

from cargohold.connector.config import (
    HINTS_ALL,
    HINTS_OFF,
    HINTS_RETAIN,
    RESTORE_IF_FASTER,
    HintConfig,
    TenantQuota,
)
from cargohold.connector.guests.handoff import HANDOFF
from cargohold.engine.core.request_queues import QueuePolicy
from cargohold.lab.simulation.fingerprints import GroupPlan
from cargohold.lab.simulation.traffic import Ask, Restart, Sender, Tokens, Writer
from cargohold.lab.simulation.transfers import LinkProfile
from cargohold.protocol import AttentionKind, Hint, HintKind

FULL: Final = GroupPlan()


@dataclass(slots=True)
class DrawnWorkload:
    """Traffic, and the engine that it is meant for.

    Attributes:
        writer: writes the traffic.
        groups: KV-cache groups; drawn if empty.
        options: further options of engine and connector that must not be drawn; see ``cargohold.lab.simulation.world``.
    """

    writer: Writer
    groups: tuple[GroupPlan, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def random(self) -> Random:
        """Source of random numbers."""
        return self.writer.random


def small(load: DrawnWorkload) -> None:
    """One or two short requests at a time, one worker, full attention: for speed."""
    writer, random = load.writer, load.random
    load.groups = (FULL,)
    load.options = {"world_size": 1, "max_num_seqs": 2, "emit_events": False}
    stems = [writer.text(8, 16) for _ in range(3)]
    for _ in range(12):
        writer.pause(0.6)
        writer.ask(random.choice(stems) + writer.text(1, 6), random.randint(4, 16))


def shared_prefix(load: DrawnWorkload) -> None:
    """Many requests that begin alike: the same few documents, cut off anywhere."""
    writer, random = load.writer, load.random
    documents = [writer.text(12, 48) for _ in range(random.randint(1, 4))]
    for _ in range(random.randint(5, 20)):
        writer.pause(0.4)
        document = random.choice(documents)
        writer.ask(_cut(document, random) + writer.text(1, 10), random.randint(1, 8), salt=_salt(random))


def multi_turn(load: DrawnWorkload) -> None:
    """Conversations: each turn repeats all that was said, answers included, with pauses between turns."""
    writer, random = load.writer, load.random
    histories: list[Tokens] = [writer.text(4, 20) for _ in range(random.randint(1, 5))]
    for _ in range(random.randint(5, 18)):
        writer.pause(0.8)
        at = random.randrange(len(histories))
        ask = writer.ask(histories[at] + writer.text(1, 8), random.randint(1, 8))
        histories[at] = ask.prompt + tuple(ask.answer())
        if len(histories[at]) > 90:
            histories[at] = writer.text(4, 20)


def agents(load: DrawnWorkload) -> None:
    """Agents: a long shared preamble, then branches that grow by tool outputs and fan out."""
    writer, random = load.writer, load.random
    preamble = writer.text(20, 40)
    branches: list[Tokens] = [preamble]
    for _ in range(random.randint(4, 14)):
        writer.pause(0.3)
        trunk = random.choice(branches)
        if len(trunk) > 90:
            trunk = preamble
        for _ in range(random.randint(1, 3)):
            ask = writer.ask(trunk + writer.text(1, 10), random.randint(1, 5))
            branches.append(ask.prompt + tuple(ask.answer()))


def aborts(load: DrawnWorkload) -> None:
    """Clients that give up at any moment."""
    writer, random = load.writer, load.random
    documents = [writer.text(16, 48) for _ in range(3)]
    for _ in range(random.randint(6, 18)):
        writer.pause(0.3)
        ask = writer.ask(_cut(random.choice(documents), random) + writer.text(1, 6), random.randint(1, 10))
        if random.random() < 0.6:
            writer.abort(ask, random.choice((0.0, 0.05, 0.3, 1.0)))


def retries(load: DrawnWorkload) -> None:
    """Clients that give up and ask once more, under the same id, while copies for their last attempt are on their way."""
    writer, random = load.writer, load.random
    documents = [writer.text(12, 48) for _ in range(random.randint(2, 4))]
    load.options = {"num_spare_blocks": random.randint(0, 8)}
    for _ in range(random.randint(5, 14)):
        writer.pause(0.4)
        ask = writer.ask(_cut(random.choice(documents), random) + writer.text(1, 6), random.randint(1, 10))
        for _ in range(random.choice((0, 1, 1, 2, 4))):
            ask = writer.retry(ask, random.random() * random.choice((0.02, 0.1, 0.4, 2.0)), random.randint(1, 10))


def queues(load: DrawnWorkload) -> None:
    """Crowds that arrive at once and queue for long, for prompts that mostly are in tiers: few are served at a time."""
    writer, random = load.writer, load.random
    documents = [writer.text(8, 40) for _ in range(random.randint(3, 8))]
    load.options = {
        "max_num_seqs": random.randint(1, 3),
        "num_spare_blocks": random.randint(0, 4),
        "tier_slots": random.randint(4, 24),
        "policy": random.choice(tuple(QueuePolicy)),
    }
    for document in documents:
        writer.ask(document, 1)
    for _ in range(random.randint(1, 3)):
        writer.pause(4.0)
        for _ in range(random.randint(8, 30)):
            prompt = random.choice(documents) + writer.text(0, 6)
            ask = writer.ask(prompt, random.randint(1, 6), priority=random.randint(0, 2))
            if random.random() < 0.15:
                writer.abort(ask, 2.0)


def preemption(load: DrawnWorkload) -> None:
    """Storms of preemption: long answers of many requests in a pool that cannot hold them."""
    writer, random = load.writer, load.random
    load.options = {"num_spare_blocks": random.randint(0, 8), "max_num_seqs": random.randint(3, 8)}
    stem = writer.text(4, 16)
    for _ in range(random.randint(4, 10)):
        writer.pause(0.2)
        writer.ask(_cut(stem, random) + writer.text(1, 12), random.randint(8, 40))


def tiny_pool(load: DrawnWorkload) -> None:
    """Hardly more blocks than the longest request needs, and a tier of a few slots."""
    load.options = {"num_spare_blocks": load.random.randint(0, 2), "tier_slots": load.random.randint(1, 8)}
    shared_prefix(load)


def windows(load: DrawnWorkload) -> None:
    """Sliding windows, whose blocks are given back while a request runs."""
    random = load.random
    load.groups = tuple(
        GroupPlan(AttentionKind.SLIDING_WINDOW, 4, random.randint(1, 20)) if random.random() < 0.7 else FULL
        for _ in range(random.randint(1, 3))
    )
    random.choice((shared_prefix, multi_turn, aborts, full_hit))(load)


def mixed_groups(load: DrawnWorkload) -> None:
    """Groups of every kind, with blocks of different sizes."""
    random = load.random
    load.groups = tuple(_any_group(random) for _ in range(random.randint(2, 3)))
    random.choice((shared_prefix, multi_turn, agents))(load)


def recurrent(load: DrawnWorkload) -> None:
    """Recurrent state next to attention, as hybrid models have it."""
    random = load.random
    block_tokens = random.choice((2, 4, 8))
    state = GroupPlan(AttentionKind.RECURRENT, block_tokens)
    beside = GroupPlan(block_tokens=block_tokens if random.random() < 0.7 else random.choice((2, 4, 8)))
    window = GroupPlan(AttentionKind.SLIDING_WINDOW, block_tokens, random.randint(1, 20))
    groups = random.choice(((beside, state), (beside, state), (state, beside, state), (window, state), (state,)))
    random.choice((shared_prefix, multi_turn, agents, aborts, preemption, full_hit, returning))(load)
    load.groups = groups


def chunks(load: DrawnWorkload) -> None:
    """Chunks of several blocks."""
    load.options = {"blocks_per_chunk": load.random.randint(2, 5)}
    load.random.choice((shared_prefix, multi_turn, agents))(load)


def ranks(load: DrawnWorkload) -> None:
    """Several workers, which never end at the same time. Some may hold the same shard."""
    load.options = {"world_size": load.random.randint(2, 4)}
    load.random.choice((shared_prefix, aborts, multi_turn, returning))(load)


def priority(load: DrawnWorkload) -> None:
    """Some requests are more urgent than others."""
    writer, random = load.writer, load.random
    load.options = {"policy": QueuePolicy.PRIORITY, "num_spare_blocks": random.randint(0, 12)}
    documents = [writer.text(12, 40) for _ in range(3)]
    for _ in range(random.randint(5, 16)):
        writer.pause(0.3)
        prompt = _cut(random.choice(documents), random) + writer.text(1, 6)
        writer.ask(prompt, random.randint(1, 12), priority=random.randint(0, 3))


def full_hit(load: DrawnWorkload) -> None:
    """The same prompts again and again, wholly cached; many end with a block."""
    writer, random = load.writer, load.random
    prompts = [writer.text(4, 48) for _ in range(random.randint(1, 4))]
    prompts = [prompt[: len(prompt) // 4 * 4] if random.random() < 0.7 else prompt for prompt in prompts]
    load.options = {"num_spare_blocks": random.randint(0, 30)}
    for _ in range(random.randint(8, 24)):
        writer.pause(0.3)
        ask = writer.ask(random.choice(prompts), random.randint(1, 6))
        if random.random() < 0.2:
            writer.abort(ask, 0.2)
    if random.random() < 0.7:
        # The last query sees one block more than the query after the hit: it may be the only one that a small tier has lost.
        load.groups = (GroupPlan(AttentionKind.SLIDING_WINDOW, 4, 4 * random.randint(1, 4) + 1),)
        load.options |= {"tier_slots": random.randint(4, 16), "blocks_per_chunk": 1, "num_spare_blocks": 0}
        load.options["eviction"] = "fifo"  # takes what others keep for what is after it


def remote_decode(load: DrawnWorkload) -> None:
    """Requests that another engine will decode, and requests that another engine has prefilled."""
    writer, random = load.writer, load.random
    documents = [writer.text(16, 48) for _ in range(2)]
    for _ in range(random.randint(5, 14)):
        writer.pause(0.4)
        prompt = _cut(random.choice(documents), random) + writer.text(1, 8)
        if random.random() < 0.5:
            writer.ask(prompt, 1, params={"do_remote_decode": True})
        else:
            # Some of them were promised more than there ever is.
            sent = {"num_tokens": random.choice((0, len(prompt) // 2, len(prompt), 10**6))}
            writer.ask(prompt, random.randint(1, 8), params={"do_remote_prefill": True, HANDOFF: sent})


def limits(load: DrawnWorkload) -> None:
    """Requests that limit what is loaded and stored for them; some ask for nonsense and are refused."""
    writer, random = load.writer, load.random
    documents = [writer.text(16, 48) for _ in range(3)]
    for _ in range(random.randint(5, 16)):
        writer.pause(0.4)
        params: dict[str, Any] = {}
        for key in ("max_load_tokens", "max_store_tokens"):
            if random.random() < 0.5:
                params[key] = random.randint(0, 30)
        if random.random() < 0.1:
            params["max_load_tokens"] = random.choice((-1, "all", True, 2.5))
        prompt = _cut(random.choice(documents), random) + writer.text(1, 8)
        ask = writer.ask(prompt, random.randint(1, 6), params=params)
        if random.random() < 0.2:
            writer.abort(ask, 0.2)


def returning(load: DrawnWorkload) -> None:
    """Prompts that come back after others have taken their place, even in host memory: the case for tiers below it."""
    writer, random = load.writer, load.random
    documents = [writer.text(8, 40) for _ in range(random.randint(4, 10))]
    load.options |= {"num_spare_blocks": random.randint(0, 4), "tier_slots": random.randint(4, 16)}
    for _ in range(random.randint(8, 24)):
        writer.pause(1.0)
        ask = writer.ask(random.choice(documents) + writer.text(0, 3), random.randint(1, 4))
        if random.random() < 0.1:
            writer.abort(ask, 0.5)
        if random.random() < 0.03:
            writer.reset()


def endurance(load: DrawnWorkload) -> None:
    """Many requests for a few prompts, one by one, for minutes: what is learned about tiers that hang or are slow must pay."""
    writer, random = load.writer, load.random
    documents = [writer.text(16, 56) for _ in range(random.randint(4, 8))]
    load.groups = (FULL,)
    load.options |= {
        "max_num_batched_tokens": random.choice((2, 4, 8)),
        "num_spare_blocks": random.randint(0, 4),
        "prefix_caching": True,
        "link": LinkProfile(),
        "tier_slots": random.randint(4, 16),
        "restore": RESTORE_IF_FASTER,
    }
    for _ in range(random.randint(30, 60)):
        writer.pause(4.0)
        writer.ask(random.choice(documents) + writer.text(0, 3), random.randint(1, 3))


def stops(load: DrawnWorkload) -> None:
    """Answers that end early, at a stop token, and caches that are reset."""
    writer, random = load.writer, load.random
    documents = [writer.text(12, 40) for _ in range(3)]
    for _ in range(random.randint(5, 16)):
        writer.pause(0.6)
        draft = Ask(0.0, "", _cut(random.choice(documents), random) + writer.text(1, 8), random.randint(2, 12))
        writer.ask(draft.prompt, draft.max_tokens, stop=random.choice(draft.answer()))
        if random.random() < 0.2:
            writer.reset()


CLIENTS: Final = (
    Sender(),
    Sender(salt="tenant a"),
    Sender(salt="tenant b"),
    Sender(tenant="tenant c"),
    Sender(tenant="tenant d"),
    Sender(salt="tenant a", tenant="tenant c"),
)
"""Tenants with a salt meet no chunks of others; those without share prefixes with each other."""


RIGHTS: Final = (HINTS_OFF, HINTS_RETAIN, HINTS_ALL)


def hints(load: DrawnWorkload) -> None:
    """Hints of every kind, also floods, contradictory and foreign ones, of tenants that have rights and quotas."""
    writer, random = load.writer, load.random
    documents = [writer.text(12, 40) for _ in range(random.randint(3, 8))]
    load.options |= {
        "num_spare_blocks": random.randint(0, 6),
        "tier_slots": random.randint(8, 30),
        "hints": HintConfig(
            allow=random.choice((HINTS_ALL, *RIGHTS)),
            allow_of={f"tenant {name}": random.choice(RIGHTS) for name in "abcd" if random.random() < 0.4},
            pin_fraction=random.choice((0.1, 0.3, 0.6)),
            retain_fraction=random.choice((0.2, 0.6)),
            max_ttl_s=random.choice((1.0, 5.0, 60.0)),
        ),
        "quotas": _quotas(random),
    }
    clients = random.choices(CLIENTS, k=3)
    for _ in range(random.randint(10, 40)):
        writer.pause(1.0)
        client = random.choice(clients)
        document = _cut(random.choice(documents), random) + writer.text(1, 4)
        given = tuple(_hint(random) for _ in range(random.choice((0, 1, 1, 2, 8))))
        writer.ask(document, random.randint(1, 6), salt=client.salt, tenant=client.tenant, hints=given)
        if random.random() < 0.5:
            sent = [_hint(random) for _ in range(random.choice((1, 1, 3)))]
            writer.send_hints(random.choice(documents), random.choice(clients), sent)
        if random.random() < 0.02:
            writer.reset()


def shared_beginnings(load: DrawnWorkload) -> None:
    """One system prompt or two, and after it questions longer than a block, one by one, on a device that forgets."""
    writer, random = load.writer, load.random
    _forget(load)
    systems = [writer.text(32, 110) for _ in range(random.choice((1, 1, 2)))]
    for _ in range(random.randint(4, 8)):
        writer.ask(random.choice(systems) + writer.text(8, 50), random.randint(1, 4))
        _ask_other_things(writer)


def forks(load: DrawnWorkload) -> None:
    """Agents that go on from where they were before, several times from the same place, on a device that forgets."""
    writer, random = load.writer, load.random
    _forget(load)
    trunk = writer.text(32, 80)
    for _ in range(random.randint(2, 4)):
        sent = trunk
        for _ in range(random.randint(2, 3)):
            ask = writer.ask(trunk + writer.text(8, 40), random.randint(1, 4))
            sent = ask.prompt + tuple(ask.answer())
            _ask_other_things(writer)
        trunk = sent[: random.randint(max(len(trunk), len(sent) - 20), len(sent))]


def _forget(load: DrawnWorkload) -> None:
    """Choose groups, a device that soon forgets, and tiers that forget nothing: what was computed once is to be found."""
    random, block_tokens = load.random, load.random.choice((2, 4, 4, 8))
    full, state = GroupPlan(block_tokens=block_tokens), GroupPlan(AttentionKind.RECURRENT, block_tokens)
    window = GroupPlan(AttentionKind.SLIDING_WINDOW, block_tokens, random.randint(1, 30))
    load.groups = random.choice(((full,), (full, window), (full, state), (full, window, state), (window, window, full)))
    load.options = {
        "max_num_batched_tokens": random.choice((8, 16, 64)),
        "num_spare_blocks": random.choice((random.randint(0, 4), 128 // block_tokens * len(load.groups))),
        "prefix_caching": True,
        "tier_slots": 4000,
        "eviction": "lru",  # nothing is evicted
        "link": LinkProfile(latency_s=random.choice((0.0, 0.005)), block_s=random.choice((0.0, 0.001)), lanes=2),
        # A state is kept where a step ends with a block; that is rarely where a chunk of several ends.
        "blocks_per_chunk": 1 if state in load.groups else random.choice((1, 1, 2)),
        "keeps_all": True,
    }


def _ask_other_things(writer: Writer) -> None:
    """Write that time passes in which the last request ends, and then another, which shares nothing with it."""
    for _ in range(2):
        writer.now += 5.0
        writer.ask(writer.text(90, 120), 1)
    writer.now += 5.0


def _quotas(random: Random) -> tuple[TenantQuota, ...]:
    """Quotas of no tenant, of one or of several, which together reserve less than there is."""
    possible = (
        TenantQuota(tenant="tenant a", reserved="40%", hard="70%"),
        TenantQuota(tenant="tenant c", reserved="20%", soft="30%"),
        TenantQuota(tenant="tenant d", hard="40%"),
    )
    return tuple(random.sample(possible, random.choice((0, 1, 2, 3))))


def _hint(random: Random) -> Hint:
    kind = random.choice(tuple(HintKind))
    first = random.randint(0, 20)
    return Hint(
        kind=kind,
        start=first,
        end=random.choice((None, None, first + random.randint(1, 30))),
        priority=random.choice((0, 20, 50, 80, 100)),
        ttl_s=random.choice((None, 0.05, 1.0, 100.0)),
        lease=random.choice((None, "one", "two")) if kind in (HintKind.PIN, HintKind.RELEASE) else None,
        to=random.choice((None, "lower", "nowhere")) if kind is HintKind.DEMOTE else None,
        deadline_s=random.choice((None, 0.1, 2.0)),
    )


ADAPTERS: Final = ("adapter one", "adapter two", "adapter three")
"""Salts of requests that are computed with adapters, where the engine has any."""


def adapters(load: DrawnWorkload) -> None:
    """The same prompts with several adapters and without one, resets at which their files change, and often a restart."""
    writer, random = load.writer, load.random
    document, salts = writer.text(16, 48), random.choices((None, *ADAPTERS), k=2)
    load.groups = (FULL,)
    load.options = {
        "num_spare_blocks": random.randint(0, 4),
        "tier_slots": random.randint(20, 60),
        "world_size": random.choice((1, 2, 2)),
        "prefix_caching": True,
        "emit_events": False,  # routers get other hashes, which cover the weights
    }
    for _ in range(random.randint(12, 30)):
        writer.pause(1.0)
        writer.ask(_cut(document, random) + writer.text(1, 30), random.randint(1, 4), salt=random.choice(salts))
        if random.random() < 0.15:
            writer.now += 1.0
            writer.reset()
        elif random.random() < 0.1:
            writer.actions.append(Restart(writer.now))


def sleep(load: DrawnWorkload) -> None:
    """Long answers, in the middle of which the engine is paused and its device sleeps."""
    writer, random = load.writer, load.random
    load.options = {"prefix_caching": True, "blocks_per_chunk": 1, "tier_slots": random.randint(8, 60)}
    for _ in range(random.randint(2, 4)):
        for _ in range(random.randint(1, 4)):
            writer.ask(writer.text(8, 70), random.randint(10, 40))
        writer.now += random.random() * 0.5
        writer.reset(sleeps=True)


WORKLOADS: Final[Mapping[str, Callable[[DrawnWorkload], None]]] = MappingProxyType(
    {
        write.__name__.replace("_", "-"): write
        for write in (
            small, shared_prefix, multi_turn, agents, aborts, retries, queues, preemption, tiny_pool, windows,
            mixed_groups, recurrent, chunks, ranks, priority, full_hit, remote_decode, limits, returning, endurance,
            stops, hints, shared_beginnings, forks, adapters, sleep,
        )
    }
)  # fmt: skip
"""Workloads by their names on the command line."""
REUSING: Final = ("shared-beginnings", "forks")
"""Those of which everything is to be found again."""


def _cut(document: Tokens, random: Random) -> Tokens:
    """The document's beginning; often all of it, or up to the end of a block."""
    length = random.choice((len(document), len(document) // 4 * 4, random.randint(0, len(document))))
    return document[:length]


def _salt(random: Random) -> str | None:
    return random.choice(("tenant a", "tenant b")) if random.random() < 0.1 else None


def _any_group(random: Random) -> GroupPlan:
    kind = random.choice(tuple(AttentionKind))
    block_tokens = random.choice((2, 4, 8))
    match kind:
        case AttentionKind.SLIDING_WINDOW:
            return GroupPlan(kind, block_tokens, random.randint(1, 20))
        case AttentionKind.CHUNKED_LOCAL:
            return GroupPlan(kind, block_tokens, random.choice((4, 8, 16, random.randint(1, 20))))
        case _:
            return GroupPlan(kind, block_tokens)
