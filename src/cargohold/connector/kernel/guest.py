"""The port through which features hear of what the kernel does, and answer its questions.

The kernel moves chunks between the device and host memory and knows no feature by name. A *guest* is one feature: it overrides
the facts that it wants to hear, keeps its own record of requests, and can be left out; then it costs nothing.

::

    facts       request_new | request_placed | request_asked | request_admitted | request_ended     chunks_used
                load_ended     chunks_offered | store_begins | store_ended | stores_abandoned
                step_begins | step_ends     reset     worker_reported
    questions   must_wait | origins | where_is | worth | may_store | may_reset | offer_again | response_params | worker_message
                is_busy

Guests are told in the order of the list that the kernel is given: each finds done what those before it do for the same fact.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from cargohold.cache.manager import OffloadKey
from cargohold.cache.retention import NORMAL
from cargohold.connector.kernel.jobs import Load, Origins, Store
from cargohold.connector.kernel.requests import RequestState
from cargohold.errors import RequestError
from cargohold.protocol import (
    NOT_CONTAINED,
    BlockIds,
    Clock,
    KVCacheLayout,
    KVConnectorOutput,
    Series,
    StepView,
    TransferOutcome,
)

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class GuestView:
    """What a guest of somebody else's may see.

    Attributes:
        layout: the engine's paged KV.
        clock: monotonic time in seconds.
        lookup: returns one byte per chunk, ``cargohold.blocks.READY`` for those that host memory has; changes nothing.
        count: adds to a time series, of a family that the guest's module declares; see ``cargohold.protocol.metrics``.
    """

    layout: KVCacheLayout
    clock: Clock
    lookup: Callable[[Sequence[OffloadKey]], bytes]
    count: Callable[[Series, float], None]


@dataclass(frozen=True, slots=True)
class AdmissionReport:
    """What a request has found when the engine admits it.

    Attributes:
        num_computed_tokens: number of its leading tokens that are on the device.
        num_hit_tokens: number of its leading tokens that are on the device, or are loaded now.
        sources: number of tokens to be loaded, by the tier they came from.
        is_first: whether it had not been admitted before; a request that starts over is admitted again.
    """

    num_computed_tokens: int
    num_hit_tokens: int
    sources: Mapping[str, int]
    is_first: bool


@dataclass(frozen=True, slots=True)
class Part:
    """Chunks of one request in one group that are offered to host memory, or that a store copies.

    Attributes:
        state: the request.
        group: index of the group.
        keys: the chunks, in prefix order.
        first_chunk: number of a chunk in the group that is at or before the first of them.
    """

    state: RequestState
    group: int
    keys: Sequence[OffloadKey]
    first_chunk: int

    def parents(self) -> dict[OffloadKey, OffloadKey | None]:
        """Return the chunk before each of them in its prefix, or ``None``; also of those between the first and the last."""
        if not self.keys:
            return {}
        of_group = self.state.keys[self.group].keys
        first = of_group.index(self.keys[0], self.first_chunk)
        span = of_group[first : of_group.index(self.keys[-1], first) + 1]
        return dict(zip(span, [of_group[first - 1] if first else None, *span], strict=False))


@dataclass(frozen=True, slots=True)
class Worth:
    """What a request's chunks are worth.

    Attributes:
        level: the level with which they are offered to host memory; see ``cargohold.cache.shares``.
        must_keep: whether none may be lost: the blocks of those that are not stored when the request ends are held until they
            are.
    """

    level: int = NORMAL
    must_keep: bool = False


ORDINARY: Final = Worth()
"""What is answered for nearly every request."""


class Guest:
    """Hears what the kernel does. Every method does nothing by default, and then is not called.

    One of your own is a class that is called with a ``GuestView``, and that options name as ``MODULE:CLASS``. Its methods are
    called in the scheduler's thread, so they must be quick; ``GuestConformance`` tests it.

    Attributes:
        name: its name in log lines.
    """

    name: str = "guest"

    # --- facts --------------------------------------------------------------------------------------------------------

    def request_new(self, state: RequestState) -> None:
        """Learn of a request; ``state.is_awaited`` may be set now. Raise ``RequestError`` to refuse it for its parameters."""

    def request_placed(self, state: RequestState, block_ids: BlockIds) -> None:
        """Learn which blocks a request has got, before it is in a step. Another connector may fill them."""

    def request_asked(self, state: RequestState, is_known: bool) -> None:  # the answer itself
        """Learn that the engine has asked for a waiting request, and whether the answer was other than "not yet"."""

    def request_admitted(self, state: RequestState, admission: AdmissionReport) -> None:
        """Learn that the engine has admitted a request, whose load is planned now."""

    def request_ended(self, state: RequestState, block_ids: BlockIds) -> None:
        """Learn that a request has ended; its blocks may be free from now on."""

    def chunks_used(self, state: RequestState) -> None:
        """Learn that a request uses its chunks; those in host memory are marked as used."""

    def load_ended(self, load: Load, since: float | None, outcome: TransferOutcome) -> None:
        """Learn that a load has ended that began at ``since``; ``None`` if nobody waited for it any more."""

    def chunks_offered(self, parts: Sequence[Part]) -> None:
        """Learn that chunks which somebody waits for are offered to host memory next; some may be there."""

    def store_begins(self, store: Store, parts: Sequence[Part]) -> None:
        """Learn that a store begins, and of which requests its chunks are; of none if it saves what is about to be evicted."""

    def store_ended(self, store: Store, since: float | None, outcome: TransferOutcome) -> None:
        """Learn that a store has ended that began at ``since``; ``None`` if nobody waited for it any more."""

    def stores_abandoned(self, state: RequestState) -> None:
        """Learn that nothing is held any more for those chunks of an ended request that were not stored."""

    def step_begins(self, step: StepView) -> None:
        """Learn of a step, before its stores are planned."""

    def step_ends(self) -> None:
        """Learn that a step is over."""

    def reset(self) -> None:
        """Learn that every chunk is forgotten."""

    def worker_reported(self, output: KVConnectorOutput) -> None:
        """Learn what all workers have reported, before the kernel does."""

    def shutdown(self) -> Guest | None:
        """Release everything. Called once, also when it is turned off.

        Slots of host memory that workers still read or write cannot be released now. Return a guest that does it when they have
        reported their end: it takes this one's place.
        """
        return None

    # --- questions ----------------------------------------------------------------------------------------------------

    def must_wait(
        self, state: RequestState, num_computed_tokens: int, limit_tokens: int, num_found_tokens: int | None
    ) -> bool:
        """Whether a request must wait, because chunks of it are coming into host memory. It is asked again in the next step.

        Args:
            state: the request. Mutate nothing but what you know of it: the same may be asked any number of times in a step.
            num_computed_tokens: number of its leading tokens that are on the device.
            limit_tokens: maximum number of leading tokens that it can use.
            num_found_tokens: number of leading tokens that are on the device or in host memory; ``None`` before it is looked
                up there, which is left out if the answer is yes.
        """
        return False

    def origins(self, state: RequestState, num_computed_tokens: int, num_hit_tokens: int) -> Origins | None:
        """Where the tokens of a load came from before they were in host memory; ``None`` if from nowhere else."""
        return None

    def where_is(self, key: OffloadKey) -> str:
        """Where a chunk is that host memory lacks, as the end of a sentence, such as "is on its way"; empty if not known."""
        return ""

    def worth(self, state: RequestState) -> Worth:
        """What a request's chunks are worth. Of several answers, the highest level counts, and every "must be kept"."""
        return ORDINARY

    def may_store(self, key: OffloadKey, block_id: int) -> bool:
        """Whether a device block may be stored that holds this chunk, and that no request holds any more. All must say yes."""
        return True

    def may_reset(self) -> bool:
        """Whether every chunk may be forgotten now. All must say yes."""
        return True

    def worker_message(self) -> object:
        """What your part on the workers is told with this step; ``None`` if nothing. See ``worker.WorkerPart``."""
        return None

    def is_busy(self) -> bool:
        """Whether the engine is to step on for you although it has nothing to compute."""
        return False

    def offer_again(self, part: Part) -> AbstractSet[OffloadKey]:
        """Which of these chunks are to be offered again: somebody waits for them, and they have found no place."""
        return frozenset()

    def response_params(self, state: RequestState) -> Mapping[str, Any] | None:
        """What the client of a request that has ended is told, as ``kv_transfer_params``. Told to all guests before."""
        return None


def _told(fact: str) -> Callable[..., None]:
    """Return a method that tells the guests which override it."""

    def tell(self: Guests, *args: Any) -> None:
        for guest, hear in self.hearers[fact]:
            try:
                hear(*args)
            except NOT_CONTAINED:
                raise
            except BaseException as error:  # noqa: BLE001  # somebody's feature: whatever it raises must not stop the kernel
                successor = self.note_raised(guest, fact, error)
                if successor is not None:
                    self.call(successor, getattr(successor, fact), args)

    return tell


def _any_of(question: str, nobody: object) -> Callable[..., Any]:
    """Return a method that asks the guests which override it, until one says something; else the answer is ``nobody``."""

    def ask_all(self: Guests, *args: Any) -> Any:
        for guest, ask in self.hearers[question]:
            try:  # as ``call``, in a call less: nearly every look-up comes here
                answer = ask(*args)
            except NOT_CONTAINED:
                raise
            except BaseException as error:  # noqa: BLE001  # somebody's feature: whatever it raises must not stop the kernel
                self.note_raised(guest, question, error)
            else:
                if answer:
                    return answer
        return nobody

    return ask_all


def _all_of(question: str) -> Callable[..., bool]:
    """Return a method that asks the guests which override it, until one says no. One that raises has no say."""

    def ask_all(self: Guests, *args: Any) -> bool:
        return all(self.call(guest, ask, args) is not False for guest, ask in self.hearers[question])

    return ask_all


_ANY: Final[Mapping[str, object]] = {
    "must_wait": False,
    "origins": None,
    "where_is": "",
    "worker_message": None,
    "is_busy": False,
}
"""Questions of which the first answer counts that says something; and the answer if nobody does."""
_ALL: Final = ("may_store", "may_reset")
"""Questions to which all must say yes."""
QUESTIONS: Final = (*_ANY, *_ALL, "worth", "offer_again", "response_params")
"""The names of all questions."""
FACTS: Final = tuple(name for name, value in vars(Guest).items() if callable(value) and name not in QUESTIONS)
"""The names of all facts."""


class Guests(Guest):
    """Tells all guests. One that raises is turned off alone: it hears nothing any more, and releases what it held.

    Args:
        guests: in the order in which they are told.

    Attributes:
        hearers: by fact, the guests that want to hear it, each with its method.
    """

    name = "guests"

    def __init__(self, guests: Sequence[Guest] = ()) -> None:
        self._guests = tuple(guests)
        self.hearers: dict[str, tuple[tuple[Guest, Callable[..., Any]], ...]] = {}
        self._note_hearers()

    def _note_hearers(self) -> None:
        self.hearers = {
            fact: tuple(
                (guest, getattr(guest, fact))
                for guest in self._guests
                if getattr(type(guest), fact) is not getattr(Guest, fact)
            )
            for fact in (*FACTS, *QUESTIONS)
        }

    def worth(self, state: RequestState) -> Worth:
        """Ask all guests. One that raises has no say."""
        worth = ORDINARY
        for guest, ask in self.hearers["worth"]:
            answer = self.call(guest, ask, (state,))
            if answer is not None and answer is not ORDINARY:
                worth = Worth(max(worth.level, answer.level), worth.must_keep or answer.must_keep)
        return worth

    def offer_again(self, part: Part) -> AbstractSet[OffloadKey]:
        """Ask all guests. What one of them wants offered again is."""
        answers = [self.call(guest, ask, (part,)) for guest, ask in self.hearers["offer_again"]]
        return frozenset[OffloadKey]().union(*filter(None, answers))

    def response_params(self, state: RequestState) -> Mapping[str, Any] | None:
        """Ask all guests; put their answers together."""
        answers = [self.call(guest, ask, (state,)) for guest, ask in self.hearers["response_params"]]
        told = {key: value for answer in answers if answer for key, value in answer.items()}
        return told or None

    def add(self, guests: Sequence[Guest]) -> None:
        """Add guests behind those that are there."""
        self._guests += tuple(guests)
        self._note_hearers()

    def through(self, guest: Guest, method: Callable[..., Answer], otherwise: Answer) -> Callable[..., Answer]:
        """Return a call of one guest's method for others: ``otherwise`` is the answer if it raises, or is turned off."""

        def call(*args: Any) -> Answer:
            answer: Answer | None = self.call(guest, method, args) if guest in self._guests else None
            return otherwise if answer is None else answer

        return call

    def call(self, guest: Guest, ask: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Ask one guest; return what it answers, or ``None`` if it raises."""
        try:
            return ask(*args)
        except NOT_CONTAINED:
            raise
        except BaseException as error:  # noqa: BLE001  # somebody's feature: whatever it raises must not stop the kernel
            self.note_raised(guest, ask.__name__, error)
            return None

    def note_raised(self, guest: Guest, fact: str, error: BaseException) -> Guest | None:
        """Turn a guest off: tell it nothing any more, with one loud line, and let it release what it held.

        A ``RequestError`` of ``request_new`` is raised instead: it is the request's fault.

        Returns:
            The guest that has taken its place, if there is one; see ``Guest.shutdown``.
        """
        if isinstance(error, RequestError) and fact == "request_new":
            raise error
        if guest not in self._guests:
            return None  # it has raised again on its way out
        logger.error(
            "guest %s is turned off: it raised in %s; the connector goes on without it",
            guest.name,
            fact,
            exc_info=error,
        )
        self._guests = tuple(other for other in self._guests if other is not guest)
        successor = None
        try:
            successor = guest.shutdown()
        except NOT_CONTAINED:
            raise
        except BaseException:  # somebody's feature: whatever it raises must not stop the kernel
            logger.exception("guest %s raised again while it released what it held", guest.name)
        if successor is not None:
            self._guests += (successor,)
        self._note_hearers()
        return successor


for _fact in FACTS:
    setattr(Guests, _fact, _told(_fact))
for _question, _nobody in _ANY.items():
    setattr(Guests, _question, _any_of(_question, _nobody))
for _question in _ALL:
    setattr(Guests, _question, _all_of(_question))
