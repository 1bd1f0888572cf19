"""Fields of requests that clients send: which the engine has, which it has not, and which change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from cargohold.engine.sampling_params import SamplingParams
from cargohold.serve.errors import invalid

WITHOUT_EFFECT: Final = frozenset(
    {
        "cache_control",
        "inference_geo",
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
        "user_profile_id",
        "workspace_id",
    }
)
"""They say who asks, or where; every prompt is cached anyway. No answer depends on them."""

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


# After every token, the engine looks for all of them, in all requests' time.
StopString = Annotated[str, Field(max_length=256)]
StopStrings = Annotated[list[StopString], Field(max_length=16)]


class Body(BaseModel):
    """The body of a request. Fields that it does not declare are looked up above."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    def check_others(self) -> None:
        """Raise ``ApiError`` for fields that the engine has not."""
        for name, value in (self.model_extra or {}).items():
            if name in WITHOUT_EFFECT or value is None:
                continue
            if name not in NEUTRAL:
                known = [*type(self).model_fields, *NEUTRAL, *WITHOUT_EFFECT]
                close = get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise invalid(f"there is no field {name!r:.80} here{hint}", name[:80], "unknown_field")
            if not any(_is(value, neutral) for neutral in NEUTRAL[name]):
                raise invalid(f"this engine has no {name}: leave it out", name, "unsupported_field")


class StreamOptions(BaseModel):
    """How a stream is written."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool = False


class OpenAIBody(Body):
    """What completions of text and of conversations have in common. Further fields than OpenAI's are those of vLLM."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=1024)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] | None = None
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None

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
