"""What the interfaces of OpenAI and Anthropic share: fields that clients send, conversations, answers whole or streamed."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict
from difflib import get_close_matches
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cargohold.base_llm import RequestOptions
from cargohold.engine.core.request import SamplingParams
from cargohold.engine.outputs import RequestMetrics, RequestOutput
from cargohold.errors import PromptTooLongError
from cargohold.llm import AsyncLLM
from cargohold.protocol import EXPLAIN, FRONT_KEY
from cargohold.serve.access import Client
from cargohold.serve.admission import Job, Outputs, client_of, context_of, size_of, unless_gone
from cargohold.serve.errors import ApiError, api_error, invalid

T = TypeVar("T")

WITHOUT_EFFECT: Final = frozenset(
    {
        "agent_hint",
        "cache_control",
        "inference_geo",
        "metadata",
        "nvext",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "safety_identifier",
        "service_tier",
        "session_id",
        "user",
        "user_profile_id",
        "workspace_id",
    }
)
"""They name the client or its place; every prompt is cached anyway. No answer depends on them."""

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "container": (),
    "diagnostics": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "mcp_servers": ([],),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "output_config": ({},),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "speed": ("standard",),
    "store": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""What the engine has not, each with the values besides null that ask for nothing. Others are refused: an answer that was made
without them would pass for one that was made with them."""


# pydantic makes an error of each item that is wrong, and a body has room for millions of them.
Items = Annotated[list[T], Field(fail_fast=True)]
# After every token, the engine looks for all of them, in all requests' time.
StopString = Annotated[str, Field(max_length=256)]
StopStrings = Annotated[Items[StopString], Field(max_length=16)]


class Body(BaseModel):
    """The body of a request. Fields that it does not declare are looked up above."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str

    def check_others(self) -> None:
        """Raise ``ApiError`` for fields that the engine has not."""
        for name, value in (self.model_extra or {}).items():
            if name in WITHOUT_EFFECT or value is None:
                continue
            if name not in NEUTRAL:
                known = [*type(self).model_fields, *NEUTRAL, *WITHOUT_EFFECT]
                close = get_close_matches(name[:80], known, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise invalid(f"there is no field {name!r:.80} here{hint}", name[:80], "unknown_field")
            if not any(_is(value, neutral) for neutral in NEUTRAL[name]):
                raise invalid(f"this engine does not support {name}: remove it", name, "unsupported_field")


class CachedBody(Body):
    """A request that says something to the cache.

    Attributes:
        cache_salt: requests share cached KV only with requests of the same salt.
        kv_transfer_params: what the client asks of the connectors.
        cargohold_hints: hints as routers and other programs send them: an envelope, or actions.
    """

    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    cargohold_hints: dict[str, Any] | Items[dict[str, Any]] | None = None

    def options(self, client: Client) -> RequestOptions:
        """Options of the request, into which the front has put the client's salt, and hints where the client gives none."""
        params = dict(self.kv_transfer_params or {})
        of_front = params.pop(FRONT_KEY, None)
        hints: Any = of_front if self.cargohold_hints is None else self.cargohold_hints
        return {
            "salt": self.cache_salt,
            "tenant": client.tenant,
            "kv_transfer_params": params or None,
            "hints": hints,
        }

    def of_cache(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """What the response says of the cache: what connectors return, and, if requested, an explanation and hints' outcomes.

        Of several answers, the first is meant: there is one place for it.
        """
        first = outputs[0]
        params = dict(next((output.kv_transfer_params for output in outputs if output.kv_transfer_params), {}))
        if (self.kv_transfer_params or {}).get(EXPLAIN):
            restored = dict(first.metrics.restored_tokens)
            params[EXPLAIN] = {"restored_tokens": restored, "notes": list(first.cache_notes)}
        found: dict[str, Any] = {"kv_transfer_params": params} if params else {}
        if self.cargohold_hints is not None:
            found["cargohold_hints"] = [asdict(outcome) for outcome in first.hint_outcomes]
        return found


class StreamOptions(BaseModel):
    """How a stream is written."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool | None = None


class OpenAIBody(CachedBody):
    """What completions of text and of conversations have in common. Further fields than OpenAI's are those of vLLM."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=1024)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[Items[int], Field(max_length=1024)] | None = None
    ignore_eos: bool = False
    priority: int = 0
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    def check_others(self) -> None:
        super().check_others()
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options are for streams: set stream to true", "stream_options")

    def sampling(self, max_tokens: int) -> list[SamplingParams]:
        """Sampling parameters, one per answer to one prompt.

        Several answers with one seed differ, and each is the same whenever the request is repeated.

        Raises:
            ConfigError: a value is impossible.
        """
        temperature = 1.0 if self.temperature is None else self.temperature
        is_greedy = temperature == 0  # then the likeliest token is taken, whatever these say
        params: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": 1.0 if self.top_p is None or is_greedy else self.top_p,
            "top_k": 0 if self.top_k in {None, -1} or is_greedy else self.top_k,
            "stop": self.stop or (),
            "stop_token_ids": self.stop_token_ids or (),
            "ignore_eos": self.ignore_eos,
        }
        seeds = [None if self.seed is None else self.seed + at for at in range(self.n or 1)]
        return [SamplingParams(**params, seed=seed) for seed in seeds]


def _is(value: object, neutral: object) -> bool:
    """Whether they are equal, and alike: in Python, 0 equals False, but ``logprobs=0`` asks for something."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


ToolChoice = Literal["none", "auto", "required"] | dict[str, Any] | None


# --- conversations ----------------------------------------------------------------------------------------------------


class Message(BaseModel):
    """One message. Fields that are not declared here say nothing to a template; those that are always null no longer."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: Items[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    audio: None = None
    function_call: None = None

    def for_template(self, param: str) -> dict[str, Any]:
        """The message as templates know it. Raises ``ApiError`` for what is no text."""
        # Templates know the older name of that role.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text_of(self.content, f"{param}.content")}
        if self.content is None and not self.tool_calls:
            raise invalid(f"{param} has no content", param)
        if self.tool_calls:
            message["tool_calls"] = [
                _call(call, f"{param}.tool_calls[{at}]") for at, call in enumerate(self.tool_calls)
            ]
        for key in ("name", "tool_call_id"):
            if getattr(self, key) is not None:
                message[key] = getattr(self, key)
        return message


def text_of(content: str | list[Any] | None, param: str) -> str:
    """The text of a message's content, whose parts are joined. Raises ``ApiError`` for parts that are no text."""
    if content is None or isinstance(content, str):
        return content or ""
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise invalid(
                f"{param}[{at}] is of type {kind!r:.40}: this server reads text only", param, "unsupported_content"
            )
    return "".join(part["text"] for part in content)


def _call(call: dict[str, Any], param: str) -> dict[str, Any]:
    """A call of a function. Clients send arguments as JSON in a string; templates want them as an object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{param}.function needs a name", param)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise invalid(f"{param}.function.arguments is not JSON", param) from error
    return {"type": "function", "id": call.get("id"), "function": {"name": function["name"], "arguments": arguments}}


def offered_tools(tools: list[dict[str, Any]] | None, choice: ToolChoice = None) -> list[dict[str, Any]] | None:
    """The tools that the model may call. Raises ``ApiError`` if it must call one: nothing here can make it.

    ``strict`` is taken, though nothing holds the model to a schema: kits for agents ask for it where their users have not, and
    check what they are given.
    """
    if choice == "required" or isinstance(choice, dict):
        raise invalid("tool_choice: the model decides itself whether it calls a tool; use auto or none", "tool_choice")
    for at, tool in enumerate(tools or ()):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise invalid(f"tools[{at}] must be of type function, with a function that has a name", f"tools[{at}]")
    return None if choice == "none" else tools


def tool_names(tools: list[dict[str, Any]] | None) -> list[str]:
    """Names by which a model may call tools that it was offered, as templates know them."""
    return [tool["function"]["name"] for tool in tools or ()]


def begin(request: Request, body: Body) -> AsyncLLM:
    """Return the model. Raises ``ApiError`` if it is not served under this name, or the engine lacks something."""
    context = context_of(request)
    llm = context.admission.llm
    context.check_model(body.model)
    body.check_others()
    return llm


Events = Callable[[Outputs], AsyncGenerator[bytes]]


def fitting(llm: AsyncLLM, make: Callable[[int], list[int]]) -> list[int]:
    """Make the tokens of a prompt, given how many it may have. For a thread: a long one takes seconds.

    Raises:
        RequestError: it cannot be made.
        ApiError: it is longer than what the engine serves, in words that clients of OpenAI and Anthropic look for.
    """
    limits = llm.plan.limits
    try:
        prompt = make(limits.max_prompt_tokens)
        if len(prompt) > limits.max_prompt_tokens:
            raise limits.too_long(len(prompt))
    except PromptTooLongError as error:
        cause = f": {limits.limited_by}" if limits.limited_by else ""
        message = (
            f"prompt is too long: {'' if error.is_counted else 'at least '}{error.num_tokens} tokens > {error.most} "
            f"maximum; this model's maximum context length is {error.most + 1} tokens, the answer included{cause}"
        )
        raise invalid(message, code="context_length_exceeded") from error
    return prompt


async def in_turn(request: Request, work: Callable[[], T]) -> T:
    """Do work on the text of a request that wants no answer of the model, unless its client goes away before it begins."""
    admission = context_of(request).admission
    return await unless_gone(request.receive, admission.tokenized(client_of(request), size_of(request), work))


async def whole(request: Request, job: Job) -> list[RequestOutput]:
    """The last output of each answer. Ends the request when its client goes away."""
    return await unless_gone(request.receive, _last_outputs(context_of(request).admission.outputs(job)))


async def _last_outputs(outputs: Outputs) -> list[RequestOutput]:
    done: dict[int, RequestOutput] = {}
    async with aclosing(outputs):
        async for at, output in outputs:
            if output.finished:
                done[at] = checked(output)
    return [done[at] for at in range(len(done))]


def checked(output: RequestOutput) -> RequestOutput:
    """The output. Raises ``ApiError`` if its request has failed."""
    if output.finish_reason == "error":
        raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, output.error or "the request has failed")
    if output.finish_reason == "abort":
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the request was ended by the server")
    return output


async def streamed(request: Request, job: Job, events: Events) -> Response:
    """A stream of events.

    It begins when there is a first output: a request that is refused gets a status that says so.
    """
    outputs = context_of(request).admission.outputs(job)
    try:
        first = await unless_gone(request.receive, anext(outputs))
    except BaseException:
        await outputs.aclose()
        raise
    return EventStream(outputs, events(_with_first(first, outputs)))


async def _with_first(first: tuple[int, RequestOutput], outputs: Outputs) -> Outputs:
    yield first
    async for output in outputs:
        yield output


class EventStream(Response):
    """Server-sent events. However it ends, the request has ended then.

    Args:
        outputs: of the engine; they have begun.
        events: what is sent for them.
    """

    media_type = "text/event-stream"

    def __init__(self, outputs: Outputs, events: AsyncGenerator[bytes]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._outputs = outputs
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come."""
        async with aclosing(self._outputs), aclosing(self._events):
            with suppress(ClientDisconnect):
                await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def cached_tokens(metrics: RequestMetrics) -> int:
    """Tokens of the prompt that were not computed for it, wherever they were found."""
    return min(metrics.prompt_tokens, metrics.device_tokens + sum(metrics.restored_tokens.values()))


async def with_errors(events: AsyncGenerator[bytes], describe: Callable[[ApiError], bytes]) -> AsyncGenerator[bytes]:
    """The events; an error, after which there are no more, is one of them: the status was sent long ago."""
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except Exception as error:  # noqa: BLE001  # the client gets it
        yield describe(api_error(error))
