"""The scheduler under random requests, locks, loads and aborts, against two naive models.

One predicts every decision: who computes how many tokens, who loses its blocks, who ends. The other knows only who holds which
block, and so serves for windows, prefix caching and loads as well.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cargohold.engine.core.request import FinishReason
from cargohold.engine.core.request_queues import QueuePolicy
from cargohold.lab.simulation import SimulatedEngine, simulated_layout
from cargohold.lab.simulation.fingerprints import tokens_alone
from cargohold.lab.simulation.replica import VOCAB_SIZE
from cargohold.protocol import NULL_BLOCK_ID
from tests.effort import examples
from tests.engine.scripted import Load, Script, fill, scripted_connector

BLOCK_TOKENS = 4
NUM_BLOCKS = 1 + 14
MAX_LEN = 40
SHARED = [random.Random(1).randrange(VOCAB_SIZE) for _ in range(MAX_LEN)]


def num_blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


# --- every decision ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class NaiveRequest:
    request_id: str
    urgency: tuple[int, int]
    known: int
    max_tokens: int
    computed: int = 0
    output: int = 0
    blocks: list[int] = field(default_factory=list)


class NaiveScheduler:
    """The rules of scheduling for full attention without reuse, written down as plainly as possible."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[NaiveRequest] = []
        self.running: list[NaiveRequest] = []
        self.locks: Counter[int] = Counter()
        self.preempted: set[str] = set()

    def num_free(self) -> int:
        held = {block for request in self.running for block in request.blocks}
        return NUM_BLOCKS - 1 - len(held | set(+self.locks))

    def schedule(self) -> list[tuple[NaiveRequest, int]]:
        """Who computes how many tokens. The blocks that they get for it are noted later, when it is known which they are."""
        self.preempted = set()
        self.plan: list[tuple[NaiveRequest, int]] = []
        self.promised = 0
        if self.schedule_running():
            self.admit()
        return self.plan

    def schedule_running(self) -> bool:
        """Whether nobody lacked room."""
        lacked_room = False
        for request in self.by_urgency(self.running):
            if not self.budget or request not in self.running:
                break
            num_new = min(request.known - request.computed, self.budget)
            while not self.has_room(request, request.computed + num_new):
                lacked_room = True
                victim = self.by_urgency(self.running)[-1]
                if victim is request and len(self.running) == 1 and +self.locks:
                    return False  # it keeps its blocks and waits for those that are locked
                self.preempt(victim)
                if victim is request:
                    return False
            self.run(request, num_new)
        return not lacked_room

    def admit(self) -> None:
        for request in self.by_urgency(self.waiting):
            num_new = min(request.known, self.budget)
            if not self.budget or len(self.running) >= self.max_num_seqs:
                break
            if not self.has_room(request, num_new, spare=len(self.running)):
                break
            self.waiting.remove(request)
            self.running.append(request)
            self.run(request, num_new)

    def run(self, request: NaiveRequest, num_new: int) -> None:
        self.plan.append((request, num_new))
        self.promised += num_blocks_of(request.computed + num_new) - len(request.blocks)

    def has_room(self, request: NaiveRequest, num_tokens: int, spare: int = 0) -> bool:
        missing = num_blocks_of(num_tokens) - len(request.blocks)
        return missing + spare <= self.num_free() - self.promised

    def by_urgency(self, requests: list[NaiveRequest]) -> list[NaiveRequest]:
        return sorted(requests, key=lambda one: one.urgency)

    @property
    def budget(self) -> int:
        return self.max_num_batched_tokens - sum(num_new for _, num_new in self.plan)

    def preempt(self, victim: NaiveRequest) -> None:
        self.running.remove(victim)
        self.waiting.append(victim)
        victim.blocks, victim.computed = [], 0
        self.preempted.add(victim.request_id)

    def finish_step(self, plan: list[tuple[NaiveRequest, int]]) -> set[str]:
        """Who has ended."""
        ended = set()
        for request, num_new in plan:
            request.computed += num_new
            if request.computed == request.known:
                request.known += 1
                request.output += 1
                if request.output == request.max_tokens or request.known == MAX_LEN:
                    self.remove(request)
                    ended.add(request.request_id)
        return ended

    def remove(self, request: NaiveRequest) -> None:
        (self.running if request in self.running else self.waiting).remove(request)

    def find(self, request_id: str) -> NaiveRequest:
        return next(one for one in [*self.waiting, *self.running] if one.request_id == request_id)


class DecisionMachine(RuleBasedStateMachine):
    """Predicts every step."""

    @initialize(
        policy=st.sampled_from(QueuePolicy), max_num_seqs=st.integers(1, 4), max_num_batched_tokens=st.integers(1, 24)
    )
    def start(self, policy: QueuePolicy, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.policy = policy
        self.script = Script()
        self.engine = SimulatedEngine(
            simulated_layout(NUM_BLOCKS),
            scripted_connector(self.script),
            policy=policy,
            prefix_caching=False,
            max_model_len=MAX_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self.naive = NaiveScheduler(max_num_seqs, max_num_batched_tokens)
        self.prompts: dict[str, tuple[list[int], int]] = {}

    @rule(length=st.integers(1, MAX_LEN - 1), max_tokens=st.integers(1, 12), priority=st.integers(0, 2))
    def add(self, length: int, max_tokens: int, priority: int) -> None:
        at = len(self.prompts)
        tokens = [random.Random(at).randrange(VOCAB_SIZE) for _ in range(length)]
        self.prompts[f"r{at}"] = (tokens, min(max_tokens, MAX_LEN - length))
        self.engine.add(f"r{at}", tokens, max_tokens, priority=priority)
        urgency = (priority if self.policy is QueuePolicy.PRIORITY else 0, at)
        self.naive.waiting.append(NaiveRequest(f"r{at}", urgency, length, max_tokens))

    @precondition(lambda self: self.naive.waiting or self.naive.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        alive = sorted(one.request_id for one in [*self.naive.waiting, *self.naive.running])
        request_id = data.draw(st.sampled_from(alive))
        self.engine.abort(request_id)
        self.naive.remove(self.naive.find(request_id))

    @rule(block_ids=st.lists(st.integers(1, NUM_BLOCKS - 1), max_size=3))
    def lock(self, block_ids: list[int]) -> None:
        self.script.locks += block_ids

    @precondition(lambda self: +self.naive.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        held = sorted((self.naive.locks - Counter(self.script.unlocks)).elements())
        if held:
            self.script.unlocks.append(data.draw(st.sampled_from(held)))

    @precondition(lambda self: self.engine.scheduler.has_work())
    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.one_step()

    def one_step(self) -> None:
        locks, unlocks = list(self.script.locks), list(self.script.unlocks)
        before = set(self.engine.outputs)
        expected = self.naive.schedule()
        step, _ = self.engine.step()
        assert [(share.request_id, share.num_scheduled_tokens) for share in step.scheduled] == [
            (request.request_id, num_new) for request, num_new in expected
        ]
        assert step.preempted_req_ids == self.naive.preempted
        for request, num_new in expected:
            share = next(share for share in step.scheduled if share.request_id == request.request_id)
            request.blocks = self.blocks_given(request, request.computed + num_new, list(share.block_ids[0]))
        assert set(self.engine.outputs) - before == self.naive.finish_step(expected)
        self.naive.locks.update(locks)
        self.naive.locks.subtract(unlocks)

    def blocks_given(self, request: NaiveRequest, num_tokens: int, given: list[int]) -> list[int]:
        """Check that a request keeps its blocks, and gets just as many new ones as it needs, which nobody holds."""
        kept, new = given[: len(request.blocks)], given[len(request.blocks) :]
        assert kept == request.blocks
        assert len(given) == num_blocks_of(num_tokens)
        others = {block for one in self.naive.running if one is not request for block in one.blocks}
        assert not (others | set(+self.naive.locks) | {NULL_BLOCK_ID}) & set(new), "somebody's block was given away"
        return given

    @invariant()
    def agree(self) -> None:
        self.engine.scheduler.kv.check()
        assert self.engine.scheduler.kv.pool.num_free_blocks == self.naive.num_free()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.script.unlocks += (self.naive.locks - Counter(self.script.unlocks)).elements()
            self.script.unlocks += self.script.locks
            self.engine.run()
            self.engine.scheduler.check_settled()
            for request_id, update in self.engine.outputs.items():
                if update.request.finish_reason is not FinishReason.ABORT:
                    expected = tokens_alone(*self.prompts[request_id], VOCAB_SIZE)
                    assert self.engine.tokens(request_id) == expected


TestEveryDecision = DecisionMachine.TestCase
TestEveryDecision.settings = examples(25, stateful_step_count=40)


# --- who holds what ---------------------------------------------------------------------------------------------------


class OwnershipMachine(RuleBasedStateMachine):
    """Knows who holds which block, and what must be in it."""

    @initialize(
        windows=st.sampled_from([(None,), (6,), (None, 6)]),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.integers(2, 32),
    )
    def start(self, windows: tuple[int | None, ...], max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.script = Script(self.fill)
        self.engine = SimulatedEngine(
            simulated_layout(1 + (NUM_BLOCKS - 1) * len(windows), windows=windows),
            scripted_connector(self.script),
            max_model_len=MAX_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self.pool = self.engine.scheduler.kv.pool
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.locked: Counter[int] = Counter()
        self.touched: Counter[int] = Counter()
        self.contents: dict[int, Any] = {}  # of protected blocks that are full

    def fill(self, load: Load) -> None:
        fill(self.engine, load)

    @rule(
        shared=st.integers(0, MAX_LEN // 2),
        own=st.integers(1, MAX_LEN // 2 - 1),
        max_tokens=st.integers(1, 8),
        offered_blocks=st.integers(0, 6),
        is_async=st.booleans(),
        keeps=st.booleans(),
    )
    def add(  # what a request is
        self, shared: int, own: int, max_tokens: int, offered_blocks: int, is_async: bool, keeps: bool
    ) -> None:
        at = len(self.prompts)
        request_id = f"r{at}"
        tokens = SHARED[:shared] + [random.Random(at).randrange(VOCAB_SIZE) for _ in range(own)]
        self.prompts[request_id] = (tokens, min(max_tokens, MAX_LEN - len(tokens)))
        self.script.offers[request_id] = (min(offered_blocks, len(tokens) // BLOCK_TOKENS) * BLOCK_TOKENS, is_async)
        if keeps:
            self.script.keeps.add(request_id)
        self.engine.add(request_id, tokens, max_tokens)

    @precondition(lambda self: self.engine.scheduler.unfinished_ids)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(self.engine.scheduler.unfinished_ids)))

    @precondition(lambda self: self.script.loading)
    @rule(data=st.data(), failed=st.booleans())
    def end_load(self, data: st.DataObject, failed: bool) -> None:
        self.script.end_load(data.draw(st.sampled_from(sorted(self.script.loading))), failed=failed)

    @precondition(lambda self: self.script.sending)
    @rule(data=st.data())
    def end_send(self, data: st.DataObject) -> None:
        self.script.end_send(data.draw(st.sampled_from(sorted(self.script.sending))))

    @rule(hesitates=st.booleans())
    def hesitate(self, hesitates: bool) -> None:
        self.script.hesitates = hesitates

    @rule(data=st.data(), by_lock=st.booleans())
    def protect(self, data: st.DataObject, by_lock: bool) -> None:
        block_ids = data.draw(st.lists(st.integers(1, self.pool.num_blocks - 1), max_size=3))
        if by_lock:
            self.script.locks += block_ids
        else:
            assert self.script.context is not None
            self.script.context.touch_ids(block_ids)
            self.touched.update(block_ids)

    @precondition(lambda self: +self.touched)
    @rule(data=st.data(), evict_first=st.booleans())
    def free(self, data: st.DataObject, evict_first: bool) -> None:
        block_id = data.draw(st.sampled_from(sorted(+self.touched)))
        assert self.script.context is not None
        self.script.context.free_ids([block_id], evict_first=evict_first)
        self.touched[block_id] -= 1

    @precondition(lambda self: +(self.locked - Counter(self.script.unlocks)))
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        held = sorted((self.locked - Counter(self.script.unlocks)).elements())
        self.script.unlocks.append(data.draw(st.sampled_from(held)))

    @precondition(lambda self: self.engine.scheduler.has_work())
    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            locks, unlocks = list(self.script.locks), list(self.script.unlocks)
            self.engine.step()
            self.locked.update(locks)
            self.locked.subtract(unlocks)
            self.agree()

    @rule()
    def reset(self) -> None:
        is_free = not (self.engine.scheduler.unfinished_ids or self.script.sending or self.script.loading)
        is_told = self.script.ended.finished_sending | self.script.ended.finished_recving
        could = self.engine.scheduler.reset_cache()
        assert could == (is_free and not is_told and not +self.locked and not +self.touched)
        if could:
            assert not any(self.pool.get_block(at).prefix for at in range(1, self.pool.num_blocks))

    @invariant()
    def agree(self) -> None:
        scheduler = self.engine.scheduler
        assert scheduler.connector.broken is None
        scheduler.kv.check()
        expected = scheduler.kv.reference_counts() + self.locked + self.touched
        assert (
            expected
            == Counter({at: self.pool.get_block(at).ref_cnt for at in range(1, self.pool.num_blocks)}) + Counter()
        )
        protected = +self.locked + +self.touched
        for block_id, content in self.contents.items():
            if block_id in protected:
                assert (self.engine.runner.memory[block_id] == content).all(), "a protected block was overwritten"
        self.contents = {
            block_id: self.contents.get(block_id, self.engine.runner.memory[block_id].copy())
            for block_id in protected
            if self.pool.get_block(block_id).prefix is not None
        }

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.script.hesitates = False
        self.script.unlocks += [*(self.locked - Counter(self.script.unlocks)).elements(), *self.script.locks]
        assert self.script.context is not None
        self.script.context.free_ids([*self.touched.elements()])
        while self.engine.scheduler.has_work():
            for request_id in sorted(self.script.loading):
                self.script.end_load(request_id, failed=False)
            for request_id in sorted(self.script.sending):
                self.script.end_send(request_id)
            self.engine.step()
        assert self.engine.scheduler.connector.broken is None, "it reported everything, so nobody waited for it in vain"
        self.engine.scheduler.check_settled()
        assert self.engine.outputs.keys() == self.prompts.keys()
        for request_id, update in self.engine.outputs.items():
            if update.request.finish_reason is not FinishReason.ABORT:
                assert self.engine.tokens(request_id) == tokens_alone(*self.prompts[request_id], VOCAB_SIZE)


TestWhoHoldsWhat = OwnershipMachine.TestCase
TestWhoHoldsWhat.settings = examples(25, stateful_step_count=40)
