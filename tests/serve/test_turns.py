"""Turns: who is let in, in which order, whatever goes away meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from cargohold.serve.turns import Turn, Turns


async def settle() -> None:
    """Let all tasks go on until they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


class Crowd:
    """Many who want in, each a task that stays until it is told to leave."""

    def __init__(self, limit: int | None) -> None:
        self.turns = Turns(limit)
        self.entered: list[str] = []
        self.inside: dict[str, Turn] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def send(self, *names: str, weight: int = 1, urgency: int = 0) -> None:
        """Each name is that of a tenant, and a number."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._go_in(name, weight, urgency))
        await settle()

    async def _go_in(self, name: str, weight: int, urgency: int) -> None:
        turn = await self.turns.enter(name[0], weight, urgency)
        self.entered.append(name)
        self.inside[name] = turn

    async def end(self, *names: str) -> None:
        for name in names:
            self.turns.leave(self.inside.pop(name))
            await settle()

    async def cancel(self, *names: str) -> None:
        for name in names:
            self.tasks[name].cancel()
        await settle()


def test_tenants_get_equal_parts_and_then_go_in_rotation() -> None:
    async def play() -> list[str]:
        crowd = Crowd(2)
        await crowd.send("a1", "a2", "a3", "a4", "b1", "b2", "b3", "c1")
        assert crowd.entered == ["a1", "a2"], "what is free may be borrowed"
        await crowd.end("a1")
        assert crowd.entered[2:] == ["b1"], "and is given back as soon as somebody has ended"
        await crowd.end("a2", "b1", "c1", "a3", "b2", "a4")
        return crowd.entered

    assert asyncio.run(play()) == ["a1", "a2", "b1", "c1", "a3", "b2", "a4", "b3"]


def test_of_one_tenant_the_most_urgent_goes_first_and_then_who_came_first() -> None:
    async def play() -> list[str]:
        crowd = Crowd(1)
        await crowd.send("a1")
        await crowd.send("a2", "a3", urgency=5)
        await crowd.send("a4", urgency=-5)
        await crowd.end("a1")
        await crowd.end("a4")
        await crowd.end("a2")
        return crowd.entered

    assert asyncio.run(play()) == ["a1", "a4", "a2", "a3"]


def test_what_weighs_more_than_the_limit_goes_alone() -> None:
    async def play() -> None:
        crowd = Crowd(3)
        await crowd.send("a1")
        await crowd.send("b1", weight=9)
        await crowd.send("c1", "c2")
        assert crowd.entered == ["a1"], "nobody goes past it for ever"
        await crowd.end("a1")
        assert crowd.entered == ["a1", "b1"]
        await crowd.end("b1")
        assert crowd.entered == ["a1", "b1", "c1", "c2"]

    asyncio.run(play())


def test_who_was_let_in_and_goes_away_before_it_knows_makes_room() -> None:
    async def play() -> None:
        crowd = Crowd(1)
        await crowd.send("a1", "a2", "a3")
        crowd.turns.leave(crowd.inside.pop("a1"))  # a2 is let in, and does not know yet
        crowd.tasks["a2"].cancel()
        await settle()
        assert crowd.entered == ["a1", "a3"]

    asyncio.run(play())


def test_who_goes_away_while_it_waits_is_passed_over() -> None:
    async def play() -> None:
        crowd = Crowd(1)
        await crowd.send("a1", "a2", "b1")
        crowd.tasks["b1"].cancel()
        crowd.tasks["a2"].cancel()
        crowd.turns.leave(crowd.inside.pop("a1"))  # before they know that they are cancelled
        await crowd.send("a3")
        assert crowd.entered == ["a1", "a3"]

    asyncio.run(play())


@pytest.mark.parametrize("seed", range(20))
def test_the_limit_holds_and_everybody_gets_in(seed: int) -> None:
    async def play() -> None:
        chance, limit = random.Random(seed), 4
        crowd, weights = Crowd(limit), Counter[str]()
        for step in range(200):
            match chance.randrange(4):
                case 0 | 1:
                    name = f"{chance.choice('abc')}{step}"
                    weights[name] = chance.choice((1, 1, 2, 5))
                    await crowd.send(name, weight=weights[name], urgency=chance.randrange(3))
                case 2 if crowd.inside:
                    await crowd.end(chance.choice(sorted(crowd.inside)))
                case 3 if waiting := sorted(name for name, task in crowd.tasks.items() if not task.done()):
                    gone = chance.choice(waiting)
                    await crowd.cancel(gone)
                    del weights[gone], crowd.tasks[gone]
            inside = sum(weights[name] for name in crowd.inside)
            assert inside <= limit or len(crowd.inside) == 1
        while crowd.inside:
            await crowd.end(next(iter(crowd.inside)))
        assert set(crowd.entered) == set(crowd.tasks)

    asyncio.run(play())
