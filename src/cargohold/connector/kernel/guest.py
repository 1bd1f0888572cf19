"""The port of features: the kernel moves chunks between the device and host memory, and knows no feature by name.

A *guest* is a feature: it overrides the facts and questions that it needs, keeps its own record of requests, and can be left
out; then it costs nothing. Guests are called in the order of the list that the kernel is given.

::

    facts       request_new | request_admitted | request_ended
                load_ended     chunks_listed | store_begins | store_ended     step_begins     reset     shutdown
    questions   worth | is_busy

Three collaborators of the kernel are more than guests, and there is one of each: ``Below``, where chunks come from that host
memory lacks; ``Consumer``, which waits for all chunks of a request; and ``Checker``, which compares what host memory has with
what is computed again. By default they are nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from cargohold.cache.manager import OffloadKey
from cargohold.cache.retention import HELD, NORMAL
from cargohold.connector.kernel.jobs import Load, Store
from cargohold.connector.kernel.requests import Offer, RequestState
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
    metrics,
)
from cargohold.transfer import CopyJob

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GuestView:
    """What a third-party guest may see.

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
    """A feature of the connector. Every method does nothing by default, and then is not called.

    A guest of your own is a class that is called with a ``GuestView``, and that options name as ``MODULE:CLASS``. Its methods
    are called in the scheduler's thread, so they must be quick. If one raises, the guest is turned off, and the connector goes
    on without it. ``GuestConformance`` tests it.

    Attributes:
        name: its name in log lines.
    """

    name: str = "guest"

    # --- facts --------------------------------------------------------------------------------------------------------

    def request_new(self, state: RequestState) -> None:
        """Note a new request; ``state.is_awaited`` may be set now. Raise ``RequestError`` to refuse it for its parameters."""

    def request_admitted(self, state: RequestState, admission: AdmissionReport) -> None:
        """Note that the engine has admitted a request, whose load is planned now."""

    def request_ended(self, state: RequestState, block_ids: BlockIds) -> None:
        """Note that a request has ended; its blocks may be free from now on."""

    def load_ended(self, load: Load, since: float | None, outcome: TransferOutcome) -> None:
        """Note that a load has ended that began at ``since``; ``None`` if no request waited for it any more."""

    def chunks_listed(self, offers: Sequence[Offer]) -> None:
        """Note chunks that stay on the device for now, and may be stored when it loses them."""

    def store_begins(self, store: Store, offers: Sequence[Offer]) -> None:
        """Note that a store begins, and of which requests its chunks are; of none if they were listed before."""

    def store_ended(self, store: Store, since: float | None, outcome: TransferOutcome) -> None:
        """Note that a store has ended that began at ``since``; ``None`` if it was given up before."""

    def step_begins(self, step: StepView) -> None:
        """Note a step, before its stores are planned."""

    def reset(self) -> None:
        """Note that every chunk is forgotten."""

    def shutdown(self) -> None:
        """Release everything. Called once, also when it is turned off."""

    # --- questions ----------------------------------------------------------------------------------------------------

    def worth(self, state: RequestState) -> Worth:
        """What a request's chunks are worth. Of several answers, the highest level counts, and every "must be kept"."""
        return ORDINARY

    def is_busy(self) -> bool:
        """Whether the engine is to step on for you although it has nothing to compute."""
        return False


def counted_by_guests(count: Callable[[Series, float], None]) -> Callable[[Series, float], None]:
    """Return ``count`` for guests: it raises in the guest that counts what no metrics endpoint can show."""

    def counted(series: Series, amount: float) -> None:
        if not metrics.is_countable(series, amount):
            raise ValueError(
                f"{amount!r:.80} cannot be added to {series!r:.80}: counters take finite numbers from 0 on"
            )
        count(series, amount)

    return counted


PORT: Final = tuple(name for name, value in vars(Guest).items() if callable(value))
"""The names of all methods, in the order above."""


class Below(Guest):
    """What lies below host memory, as the kernel sees it. This one is nothing.

    Attributes:
        tiers: names of the tiers, in order.
    """

    tiers: Sequence[str] = ()

    @property
    def wants_all(self) -> bool:
        """Whether it is to have all chunks that are computed, soon."""
        return False

    def begin_step(self, step: StepView) -> None:
        """Do what waiting requests need, once guests know of a step, and before its stores are planned."""

    def still_wants(self, keys: Sequence[OffloadKey]) -> AbstractSet[OffloadKey]:
        """Return those of the chunks that are still to be written down, so that host memory must keep them."""
        return frozenset()

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

    def origins(self, state: RequestState, num_computed_tokens: int, num_hit_tokens: int) -> bytes:
        """Return which tier each token of a load was brought up from: a byte each, the tier's number from 1; 0 if from none."""
        return bytes(num_hit_tokens - num_computed_tokens)

    def where_is(self, key: OffloadKey) -> str:
        """Return where a chunk is that host memory lacks, as the end of a sentence, such as "is on its way"; or nothing."""
        return ""

    def chunks_used(self, state: RequestState) -> None:
        """Note that a request uses its chunks; those in host memory are marked as used."""

    def worker_message(self) -> Sequence[object]:
        """Return what your part on the workers is to do in this step. See ``worker.WorkerPart``."""
        return ()

    def worker_reported(self, output: KVConnectorOutput) -> None:
        """Note what all workers have reported, before the kernel does."""

    def step_ends(self) -> None:
        """Note that a step is over."""

    def may_reset(self) -> bool:
        """Whether every chunk may be forgotten now."""
        return True


class Consumer(Guest):
    """What waits for all chunks of a request (see ``RequestState.is_awaited``). This one waits for none."""

    def chunks_offered(self, offers: Sequence[Offer]) -> None:
        """Note that awaited chunks are offered to host memory next; some may be there."""

    def offer_again(self, state: RequestState, keys: Sequence[OffloadKey]) -> AbstractSet[OffloadKey]:
        """Return those of a request's chunks that are to be offered again, although they have found no slot."""
        return frozenset()

    def stores_abandoned(self, state: RequestState) -> None:
        """Note that nothing is held any more for those chunks of an ended request that were not stored."""

    def response_params(self, state: RequestState) -> Mapping[str, Any] | None:
        """Return what the client of a request that has ended gets as ``kv_transfer_params``; ``None`` if nothing."""
        return None


class Checker(Guest):
    """What compares chunks that were computed although host memory has them with what it has. This one compares none.

    Attributes:
        comparing: the comparisons in flight, by job.
    """

    comparing: Mapping[int, Store] = MappingProxyType({})

    def chunks_found(self, state: RequestState, num_computed_tokens: int, num_found_tokens: int) -> None:
        """Note what was found of a request that computes it all the same (see ``RequestState.is_recomputed``)."""

    def compare(self, offers: Sequence[Offer], num_allowed: int) -> list[CopyJob]:
        """Return the store into spare rows that compares those of a step's chunks that are there, if any is to be compared.

        Args:
            offers: what the step has completed.
            num_allowed: how many more chunks stores may hold.
        """
        return []

    def note_compared(self, output: KVConnectorOutput) -> None:
        """End the comparisons that all workers have ended, while there are any in flight, before the kernel ends its jobs."""


# --- several guests ---------------------------------------------------------------------------------------------------


def _own(guest: Guest, name: str) -> Callable[..., Any] | None:
    """Return the guest's own method; ``None`` if it is the port's, which does nothing."""
    method: Callable[..., Any] = getattr(guest, name)
    return None if getattr(method, "__func__", None) is getattr(Guest, name) else method


def _all_worth(answers: Sequence[Worth]) -> Worth:
    return Worth(max([of.level for of in answers]), any(of.must_keep for of in answers))


def _is_worth(answer: object) -> bool:
    """Whether this says what chunks are worth, with a level that a third-party guest may give."""
    return isinstance(answer, Worth) and type(answer.level) is int and 0 <= answer.level < HELD


def _checked(name: str, answer: object) -> object:
    """Return a guest's answer, unless it would be refused where it is used."""
    if (name == "worth" and not _is_worth(answer)) or (name == "is_busy" and not isinstance(answer, bool)):
        raise TypeError(f"{name} cannot answer {answer!r:.80}")
    return answer


_MERGES: Final[Mapping[str, Callable[[Sequence[Any]], Any]]] = {"worth": _all_worth, "is_busy": any}


class Guests(Guest):
    """Calls all guests, in their order. What one guest alone overrides is that guest's method, so it costs no call more."""

    name = "guests"

    def __init__(self, guests: Sequence[Guest] = ()) -> None:
        self._guests: tuple[Guest, ...] = ()
        self.add(guests)

    def add(self, guests: Sequence[Guest]) -> None:
        """Add guests after those that are there."""
        self._guests += tuple(guests)
        for name in PORT:
            methods = [method for guest in self._guests if (method := _own(guest, name)) is not None]
            if len(methods) > 1:
                setattr(self, name, _of_several(methods, _MERGES.get(name)))
            elif methods:
                setattr(self, name, methods[0])


def _of_several(
    methods: Sequence[Callable[..., Any]], merge: Callable[[Sequence[Any]], Any] | None
) -> Callable[..., Any]:
    def ask(*args: Any) -> Any:
        answers = [method(*args) for method in methods]
        return None if merge is None else merge(answers)

    def call(*args: Any) -> None:
        for method in methods:
            method(*args)

    return call if merge is None else ask


class ContainedGuest(Guest):
    """A guest that options name: one that raises is turned off with one loud line, and releases what it held."""

    def __init__(self, inner: Guest) -> None:
        self._inner: Guest | None = inner
        self.name = inner.name
        for name in PORT:
            if (method := _own(inner, name)) is not None:
                setattr(self, name, self._contained(name, method))

    def _contained(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        otherwise = getattr(super(), name)

        def call(*args: Any) -> Any:
            if self._inner is None:
                return otherwise(*args)
            try:
                return _checked(name, method(*args))
            except NOT_CONTAINED:
                raise
            except BaseException as error:  # a stranger's: whatever it raises must not stop the connector
                if isinstance(error, RequestError) and name == "request_new":
                    raise  # the request's fault
                self._turn_off(name, error)
                return otherwise(*args)

        return call

    def _turn_off(self, name: str, error: BaseException) -> None:
        line = "guest %s is turned off: it raised in %s; the connector continues without it"
        logger.error(line, self.name, name, exc_info=error)
        inner, self._inner = self._inner, None
        if inner is None or name == "shutdown":
            return
        try:
            inner.shutdown()
        except NOT_CONTAINED:
            raise
        except BaseException:  # as above
            logger.exception("guest %s raised again while it released what it held", self.name)
