"""The engine: requests in, steps, outputs out."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from cargohold.blocks import extend_hashes, root_hash
from cargohold.engine.config import EngineLimits
from cargohold.engine.core.request import FinishReason, Request, RequestTimes, SamplingParams
from cargohold.engine.core.scheduler import RequestUpdate, Scheduler
from cargohold.engine.events import MAX_KEPT_EVENTS, KeptEvents, ZmqEventPublisher
from cargohold.engine.executor import Executor
from cargohold.engine.model.tokenizer import Tokenizer
from cargohold.engine.outputs import EngineStatus, RequestMetrics, RequestOutput, TextStream
from cargohold.errors import EngineDeadError, PromptTooLongError, RequestError, one_line
from cargohold.option_values import is_int
from cargohold.protocol import (
    Clock,
    Hint,
    HintEvent,
    HintOutcome,
    HintStatus,
    KVEvent,
    Prefix,
    Stats,
    Tally,
    TierContents,
    add_stats,
    hints_in,
    metrics,
    parse_hints,
)


@dataclass(slots=True)
class _Live:
    """A request on its way, and its text so far."""

    request: Request
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    stream: TextStream


class LLMEngine:
    """Serves requests, step by step. One thread owns it.

    For every request that was added, ``step`` returns outputs. The last one is ``finished``, however the request ends, unless
    the engine itself ends first.

    Args:
        scheduler: decides what each step computes.
        executor: runs steps on the workers; shut down when the engine ends.
        tokenizer: text to tokens and back; ``None`` if the model has none.
        limits: limits that a request must fit into.
        clock: monotonic time in seconds.
        publisher: where KV events go after each step; closed when the engine ends. Without one, ``take_events`` has them.

    Attributes:
        made_progress: whether the last step computed something, ended something, or received the end of a transfer. If not,
            there is no hurry to make the next one: transfers run meanwhile.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        tokenizer: Tokenizer | None,
        limits: EngineLimits,
        *,
        clock: Clock = time.monotonic,
        publisher: ZmqEventPublisher | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.limits = limits
        self._executor: Executor | None = executor
        self._clock = clock
        self._publisher = publisher
        self._events = KeptEvents(MAX_KEPT_EVENTS)
        self._stats: Stats = {}
        self._live: dict[str, _Live] = {}
        self._undelivered: list[RequestOutput] = []
        self._num_requests = 0
        self._own_stats = Tally()
        self._end: BaseException | None = None
        self.made_progress = False

    # --- requests -----------------------------------------------------------------------------------------------------

    def add_request(  # noqa: PLR0913  # options that callers name
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: str | None = None,
        tenant: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        hints: object = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> str:
        """Queue a request; returns its id.

        Args:
            prompt: text, or token ids.
            sampling: how to choose tokens; greedy by default.
            request_id: unique among the requests whose last output has not been returned, and those whose blocks are still
                being copied; made up if ``None``.
            priority: lower is served first, under the ``priority`` policy.
            salt: requests share cached KV only with requests of the same salt.
            tenant: whose request it is, for quotas and hints; by default the salt.
            kv_transfer_params: what to ask of the connectors; see the documentation of the connector.
            hints: what is known of the prompt's future: a ``Hint``, several, or an envelope as routers send it. The outcomes
                are in the request's outputs; none fails the request.
            trace_headers: the trace that it belongs to, as HTTP headers: ``{"traceparent": ...}``. Needs ``traces``.

        Raises:
            RequestError: the request cannot be served; nothing was queued.
            EngineDeadError: the engine has stopped.
        """
        self._check_alive()
        sampling = SamplingParams() if sampling is None else sampling
        _check_options(sampling, request_id, priority, salt, tenant, kv_transfer_params)
        # What is checked may be of a subclass, such as numpy's. Neither workers nor connectors know those.
        request_id, salt, tenant = _plain_text(request_id), _plain_text(salt), _plain_text(tenant)
        text = _plain_text(prompt) if isinstance(prompt, str) else None
        if sampling.stop and self.tokenizer is None:
            raise RequestError(
                "this model has no tokenizer, so it cannot stop at strings; use stop_token_ids", request_id
            )
        token_ids = self._token_ids(prompt if text is None else text, request_id)
        params = _copied(kv_transfer_params, request_id)
        asked, rejected = self._read_hints(hints_in(params) if hints is None else hints)
        request = Request(
            request_id=self._unused_id() if request_id is None else request_id,
            all_token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=sampling,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,  # one that cannot be predicted
            times=RequestTimes(arrived=self._clock()),
            hash_block_tokens=self.limits.hash_block_tokens,
            priority=int(priority),
            salt=salt,
            tenant=tenant,
            trace_headers=trace_headers,
            kv_transfer_params=params,
            hint_outcomes=tuple(rejected),
            stop_token_ids=self._stop_token_ids(sampling),
        )
        if self._is_taken(request.request_id):
            raise RequestError("a request with this id is being served already", request.request_id)
        # Whatever can be refused has been before the scheduler knows the request.
        about_others = [(self._prefix(hint.token_ids, salt, tenant), hint) for hint in asked if hint.token_ids]
        decoder = None if self.tokenizer is None else self.tokenizer.piece_decoder(token_ids)
        live = _Live(request, text, tuple(token_ids), TextStream(decoder, tuple(sampling.stop)))
        with self._taken_out_on_error(request):
            self.scheduler.add_request(request, [hint for hint in asked if not hint.token_ids])
            for prefix, hint in about_others:
                request.hint_outcomes += tuple(self.scheduler.hint(prefix, [hint.without_tokens()]))
        self._count(request.hint_outcomes)
        self._live[request.request_id] = live
        return request.request_id

    @contextmanager
    def _taken_out_on_error(self, request: Request) -> Iterator[None]:
        """Take a request out of the queue if something raises: otherwise no one would see it end."""
        try:
            yield
        except BaseException:
            self.scheduler.finish_request(request.request_id, FinishReason.ABORT)
            raise

    def hint(
        self,
        hints: object,
        *,
        prompt: str | Sequence[int] | None = None,
        request_id: str | None = None,
        salt: str | None = None,
        tenant: str | None = None,
    ) -> list[HintOutcome]:
        """Tell the connector what is known of the future of a prefix; return an outcome for each hint.

        Args:
            hints: a ``Hint``, several, or an envelope as routers send it.
            prompt: the prefix: text, or token ids.
            request_id: in place of ``prompt``, a request that is being served.
            salt: the salt of the requests that have the prefix.
            tenant: the sender; by default the salt. Not needed with ``request_id``.

        Raises:
            RequestError: the prompt is not possible.
            EngineDeadError: the engine has stopped.
        """
        self._check_alive()
        _check_options(SamplingParams(), request_id, 0, salt, tenant, None)
        salt, tenant = _plain_text(salt), _plain_text(tenant)
        subject: str | Prefix
        if request_id is not None:
            subject = str.__str__(request_id)
        else:
            subject = self._prefix([] if prompt is None else self._token_ids(prompt, None), salt, tenant)
        asked, rejected = self._read_hints(hints)
        outcomes = [*rejected, *self.scheduler.hint(subject, [hint.without_tokens() for hint in asked])]
        self._count(outcomes)
        return outcomes

    def _prefix(self, token_ids: Sequence[int], salt: str | None, tenant: str | None) -> Prefix:
        """What hints are about that are not about a request."""
        hashes: list[bytes] = []
        extend_hashes(hashes, token_ids, self.limits.hash_block_tokens, root_hash(salt=salt))
        return Prefix(hashes, token_ids, len(token_ids), salt, salt if tenant is None else tenant)

    def take_hint_events(self) -> list[HintEvent]:
        """How hints have ended since the last call."""
        return list(self.scheduler.connector.take_hint_events())

    def abort(self, request_id: str) -> None:
        """End a request, if it is alive; the next step returns its last output. Its blocks are freed when no copy uses them."""
        request_id = str.__str__(request_id)  # what was added under a subclass's value has the plain one
        update = None if self._end is not None else self.scheduler.finish_request(request_id, FinishReason.ABORT)
        if update is not None:
            self._undelivered += self._outputs([update])

    def abort_all(self) -> None:
        """End all requests."""
        for request_id in self.scheduler.unfinished_ids:
            self.abort(request_id)

    def take_outputs(self) -> list[RequestOutput]:
        """The last outputs of requests that were aborted since the last step; the next one does not return them any more."""
        outputs, self._undelivered = self._undelivered, []
        return outputs

    # --- stepping -----------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether another ``step`` is needed: requests, outputs, transfers or references are pending."""
        return self._end is None and (bool(self._undelivered) or self.scheduler.has_work())

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return self.scheduler.num_unfinished

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns outputs of the requests that it changed, and of those aborted before.

        Raises:
            EngineDeadError: the step failed; what it left behind cannot be trusted, so the engine has ended.
        """
        self._check_alive()
        outputs = self.take_outputs()
        try:
            return outputs + self._step()
        except BaseException as error:
            self._stop(error)
            if isinstance(error, Exception):
                raise EngineDeadError(f"a step failed, the engine has stopped: {one_line(error)}") from error
            raise  # the user has interrupted, or the program exits

    def reset_cache(self) -> bool:
        """Forget all cached KV, on the device and below; ``False`` if requests or transfers are in flight."""
        self._check_alive()
        is_reset = self.scheduler.reset_cache()
        if self._publisher is not None:
            # The next step, which would publish what was forgotten, may be far off.
            self._publish(self._publisher)
        return is_reset

    def take_events(self) -> list[KVEvent]:
        """KV events since the last call; none if they are published."""
        if self._publisher is not None:
            self._publish(self._publisher)
            return []
        return [*self._events.take(), *self.scheduler.take_events()]

    def stats(self) -> Tally:
        """Counters of the connector since the start, both sides of it, summed over the workers, and of deferred look-ups."""
        self._stats = add_stats(self._stats, self.scheduler.connector.get_kv_connector_stats())
        total = Tally(add_stats(self._stats, self._own_stats))
        if num_deferred := self.scheduler.num_deferred_lookups:
            total[metrics.DEFERRED_LOOKUPS.of()] = num_deferred
        return total

    def contents(self) -> Sequence[TierContents]:
        """What the connector keeps, tier by tier: pins in force, what tenants have, and prefixes of the last requests."""
        self._check_alive()
        return self.scheduler.connector.get_contents()

    def status(self) -> EngineStatus:
        """How busy the engine is, and whether its connector works."""
        pool, broken = self.scheduler.kv.pool, self.scheduler.connector.broken
        outages = self.scheduler.connector.get_outages()
        epoch = time.time() - self._clock() if outages else 0.0
        return EngineStatus(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_loading=self.scheduler.num_loading,
            num_blocks=pool.num_usable_blocks,
            num_free_blocks=pool.num_free_blocks,
            num_cached_blocks=pool.num_cached_prefixes,
            connector_error=None if broken is None else str(broken),
            outages=tuple(outage.since_1970(epoch) for outage in outages),
        )

    def shutdown(self) -> None:
        """Stop the workers, which end the writes that they were given, and let go of them. May be called twice."""
        self._stop(EngineDeadError("it was shut down"))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _read_hints(self, given: object) -> tuple[list[Hint], list[HintOutcome]]:
        """Hints that a client has given, and outcomes of what is none, or is about a prompt that no request can have here."""
        hints, outcomes = ([], []) if given is None else parse_hints(given, self.limits.max_model_len)
        possible: list[Hint] = []
        for hint in hints:
            try:
                self._checked_token_ids(hint.token_ids or (), None)
            except RequestError as error:
                outcomes.append(HintOutcome(hint.action_id, HintStatus.REJECTED, f"token_ids: {error.reason}"))
            else:
                possible.append(hint)
        return possible, outcomes

    def _count(self, outcomes: Sequence[HintOutcome]) -> None:
        for outcome in outcomes:
            self._own_stats[metrics.HINTS.of(outcome.status.value)] += 1

    def _check_alive(self) -> None:
        if self._end is not None:
            raise EngineDeadError(f"the engine has stopped: {one_line(self._end)}") from self._end

    def _stop(self, reason: BaseException) -> None:
        """End the engine for ``reason``, and stop what it has started. Does nothing if it has ended already."""
        if self._end is None:
            self._end = reason
            self._live.clear()
            executor, self._executor = self._executor, None  # lets go of weights and KV, too
            assert executor is not None
            try:
                executor.shutdown()
            finally:
                self.scheduler.connector.shutdown()
                if self._publisher is not None:
                    self._publisher.close()

    def _step(self) -> list[RequestOutput]:
        assert self._executor is not None
        step = self.scheduler.schedule()
        output = self._executor.execute(step)
        updates = self.scheduler.update_from_output(output)
        self._stats = add_stats(self._stats, output.connector.kv_connector_stats)
        if self._publisher is not None:
            self._publish(self._publisher)
        elif self.scheduler.emits_events:
            self._events.add(self.scheduler.take_events())
        self.made_progress = bool(step.scheduled or updates) or not output.connector.is_empty()
        return self._outputs(updates)

    def _publish(self, publisher: ZmqEventPublisher) -> None:
        """Publish the KV events since the last call. An engine that has ended has no followers."""
        if self._end is None:
            publisher.publish(self.scheduler.take_events())

    def _unused_id(self) -> str:
        """An id that is not taken, whatever clients have called their requests."""
        while True:
            self._num_requests += 1
            request_id = f"request-{self._num_requests}"
            if not self._is_taken(request_id) and not self.scheduler.is_copying(request_id):
                return request_id

    def _is_taken(self, request_id: str) -> bool:
        """Whether this id is in use: its request is alive, or has a last output that was not returned yet."""
        is_undelivered = any(output.request_id == request_id for output in self._undelivered)
        return request_id in self._live or is_undelivered

    def _stop_token_ids(self, sampling: SamplingParams) -> frozenset[int]:
        token_ids = frozenset(sampling.stop_token_ids)
        if self.tokenizer is not None:
            # Special tokens are no part of the text, so there the string would never be found.
            token_ids |= self.tokenizer.special_token_ids(sampling.stop)
        return token_ids if sampling.ignore_eos else token_ids | self.limits.eos_token_ids

    def _token_ids(self, prompt: object, request_id: str | None) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer; give the prompt as token ids", request_id)
            try:
                token_ids = self.tokenizer.encode(prompt, self.limits.max_prompt_tokens)
            except PromptTooLongError as error:
                raise self.limits.too_long(error.num_tokens, request_id, is_counted=False) from None
            beyond = max(token_ids, default=0)
            if beyond >= self.limits.vocab_size:
                # Some tokenizers have such tokens: for models that see images, or added to the tokenizer but not the model.
                reason = f"the tokenizer turned it into token {beyond}, which the model lacks: it has {self.limits.vocab_size}"
                raise RequestError(f"the prompt is not possible: {reason}", request_id)
        else:
            token_ids = self._checked_token_ids(prompt, request_id)
        if not token_ids:
            raise RequestError("the prompt is empty", request_id)
        if len(token_ids) > self.limits.max_prompt_tokens:
            raise self.limits.too_long(len(token_ids), request_id)
        return token_ids

    def _checked_token_ids(self, prompt: Any, request_id: str | None) -> list[int]:
        refusal = RequestError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}", request_id)
        if isinstance(prompt, bytes | Mapping):
            raise refusal
        try:
            items = list(prompt)
        except TypeError as error:  # a tensor without dimensions has __iter__, too
            raise refusal from error
        return [self._checked_token_id(token_id, request_id) for token_id in items]

    def _checked_token_id(self, token_id: Any, request_id: str | None) -> int:
        # Integral, for what numpy has in its arrays are integers too.
        number = -1 if isinstance(token_id, bool) or not isinstance(token_id, Integral) else int(token_id)
        if not 0 <= number < self.limits.vocab_size:
            expected = f"an integer from 0 to {self.limits.vocab_size - 1}"
            raise RequestError(f"token id {token_id!r} is not {expected}", request_id)
        return number

    def _outputs(self, updates: Sequence[RequestUpdate]) -> list[RequestOutput]:
        return [output for update in updates if (output := self._output(update)) is not None]

    def _output(self, update: RequestUpdate) -> RequestOutput | None:
        """The output for an update; ``None`` for one that another update of the same step makes superfluous."""
        request = update.request
        live = self._live.get(request.request_id)
        if live is None or live.request is not request:
            return None
        for token_id in update.new_token_ids:
            # A stop token is not part of the text.
            if token_id not in request.stop_token_ids and live.stream.push(token_id) and not request.is_finished:
                ended = self.scheduler.finish_request(request.request_id, FinishReason.STOP)
                return None if ended is None else self._output(ended)
        if request.is_finished:
            if update.new_token_ids:
                return None  # the update that ended it follows
            del self._live[request.request_id]
        new_text = live.stream.release(finished=request.is_finished)
        return RequestOutput(
            request_id=request.request_id,
            prompt=live.prompt,
            prompt_token_ids=live.prompt_token_ids,
            text=live.stream.released,
            new_text=new_text,
            token_ids=tuple(request.output_token_ids),
            finished=request.is_finished,
            finish_reason=_finish_reason(live),
            error=request.error,
            metrics=_metrics(update),
            cache_notes=(*map(str, request.hint_outcomes), *update.cache_report.notes) if request.is_finished else (),
            hint_outcomes=request.hint_outcomes,
            kv_transfer_params=update.kv_transfer_params,
            stop_string=self._stop_string(live),
        )

    def _stop_string(self, live: _Live) -> str | None:
        """The stop string that ended a request: one in its text, or a special token."""
        request = live.request
        if request.finish_reason is not FinishReason.STOP or live.stream.stopped or self.tokenizer is None:
            return live.stream.stop_string
        last = request.all_token_ids[-1]
        stops = request.sampling.stop
        return next((stop for stop in stops if last in self.tokenizer.special_token_ids([stop])), None)


def _check_options(
    sampling: object, request_id: object, priority: object, salt: object, tenant: object, kv_transfer_params: object
) -> None:
    """Raise ``RequestError`` for options of a request that are not what they are declared to be."""
    for name, value, holds, expected in (
        ("sampling", sampling, isinstance(sampling, SamplingParams), "SamplingParams"),
        # The id goes to workers and into block traces.
        ("request_id", request_id, request_id is None or _is_text(request_id), "text"),
        ("priority", priority, is_int(priority), "an integer"),
        ("salt", salt, salt is None or _is_text(salt), "text"),
        ("tenant", tenant, tenant is None or _is_text(tenant), "text"),
        (
            "kv_transfer_params",
            kv_transfer_params,
            kv_transfer_params is None or isinstance(kv_transfer_params, Mapping),
            "a mapping",
        ),
    ):
        if not holds:
            raise RequestError(f"{name}={value!r} is not possible: it must be {expected}")


def _copied(params: Mapping[str, Any] | None, request_id: str | None) -> dict[str, Any] | None:
    """The parameters, read once. What a mapping of the client's own raised later would pass for the fault of a connector.

    Raises:
        RequestError: they cannot be read.
    """
    try:
        return None if params is None else dict(params)
    except Exception as error:
        raise RequestError(f"kv_transfer_params cannot be read: {one_line(error)}", request_id) from error


def _plain_text(text: str | None) -> str | None:
    """The text itself, where it is of a subclass; of a member of an enumeration its value."""
    return None if text is None else str.__str__(text)


def _is_text(value: object) -> bool:
    """Whether it is text, and valid Unicode: half a surrogate pair has no bytes."""
    return isinstance(value, str) and value == value.encode(errors="replace").decode()


def _finish_reason(live: _Live) -> str | None:
    reason = live.request.finish_reason
    if reason is FinishReason.LENGTH and live.stream.stopped:
        reason = FinishReason.STOP  # its last token completed a stop string
    return None if reason is None else reason.value


def _metrics(update: RequestUpdate) -> RequestMetrics:
    request, times = update.request, update.request.times
    return RequestMetrics(
        prompt_tokens=request.num_prompt_tokens,
        output_tokens=request.num_output_tokens,
        device_tokens=request.num_first_device_tokens,
        restored_tokens=dict(update.cache_report.restored_tokens),
        ttft_s=None if times.first_token is None else times.first_token - times.arrived,
        load_wait_s=times.load_wait_s,
        total_s=None if times.finished is None else times.finished - times.arrived,
        preemptions=request.num_preemptions,
    )
