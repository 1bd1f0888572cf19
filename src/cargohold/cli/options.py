"""Options that several subcommands share, in groups; a subcommand takes a group as one parameter."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, get_type_hints

import typer

from cargohold.connector.offloading import OffloadConfig
from cargohold.engine.sampling_params import SamplingParams
from cargohold.errors import ConfigError
from cargohold.tiers import DiskTierConfig, SharedTierConfig, TierConfig

DEFAULT_DISK_BYTES: Final = "20GiB"

ModelArgument = Annotated[
    str, typer.Argument(help="A directory, a GGUF file, a Hugging Face hub id, or smollm2.", metavar="MODEL")
]


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are chosen; see ``SamplingParams``."""

    max_tokens: Annotated[int, typer.Option(help="Generate at most so many tokens.")] = 128
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; higher is more random.")] = 0.0
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this total probability.")] = 1.0
    top_k: Annotated[int, typer.Option(help="Sample among so many likeliest tokens; 0 for all.")] = 0
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None

    def params(self) -> SamplingParams:
        """The options as sampling parameters. Raises ``ConfigError`` for impossible ones."""
        return SamplingParams(**dataclasses.asdict(self))


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the model is loaded and what is kept; see ``EngineConfig`` and ``OffloadConfig``."""

    host_bytes: Annotated[
        str | None, typer.Option(help="Host memory for KV, such as 2GiB. Without it nothing is offloaded.")
    ] = None
    disk_dir: Annotated[
        str | None, typer.Option(metavar="DIRECTORY", help="Keep KV here, too: it is found again by the next run.")
    ] = None
    disk_bytes: Annotated[
        str | None, typer.Option(help=f"What the directory may take at most; by default {DEFAULT_DISK_BYTES}.")
    ] = None
    shared_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Share KV with others: s3://bucket/prefix, redis://host:6379, ...")
    ] = None
    num_device_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the device pool; by default 2 GiB worth of them.")
    ] = None
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest sequence; by default what the model or the device pool allows.")
    ] = None
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto for the type it was saved in.")] = (
        "auto"
    )
    device: Annotated[str, typer.Option(help="cpu or a CUDA device.")] = "cpu"
    record: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a block trace for cargohold replay: hashes, no text.")
    ] = None

    traces: Annotated[
        bool, typer.Option("--traces", help="Make OpenTelemetry spans of what is done for each request.")
    ] = False

    def llm_options(self) -> dict[str, Any]:
        """Keyword arguments for ``LLM``. Raises ``ConfigError`` for impossible options."""
        own = ("host_bytes", "disk_dir", "disk_bytes", "shared_url")
        options = {key: value for key, value in dataclasses.asdict(self).items() if key not in own}
        return {**options, "offload": self._offload()}

    def _offload(self) -> OffloadConfig | None:
        tiers: list[TierConfig] = []
        if self.disk_dir is not None:
            max_bytes = DEFAULT_DISK_BYTES if self.disk_bytes is None else self.disk_bytes
            tiers.append(DiskTierConfig(directory=self.disk_dir, max_bytes=max_bytes))
        elif self.disk_bytes is not None:
            raise ConfigError("disk_bytes", self.disk_bytes, "it needs --disk-dir")
        if self.shared_url is not None:
            tiers.append(SharedTierConfig(url=self.shared_url))
        if self.host_bytes is not None:
            return OffloadConfig(host_bytes=self.host_bytes, tiers=tiers)
        if tiers:
            expected = "--disk-dir and --shared-url need --host-bytes too: give a size, such as 1GiB"
            raise ConfigError("host_bytes", None, expected)
        return None


def takes_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Let a subcommand take groups of options.

    A parameter whose type and default are a dataclass is replaced by one parameter per field, whose defaults are the values in
    the parameter's default.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        parameter.name: parameter.annotation
        for parameter in signature.parameters.values()
        if dataclasses.is_dataclass(parameter.annotation)
    }

    @functools.wraps(command)
    def flat(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        command(**values)

    parameters = [flat for parameter in signature.parameters.values() for flat in _flattened(parameter)]
    flat.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # what inspect looks for
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def _flattened(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    if not dataclasses.is_dataclass(parameter.annotation):
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    hints = get_type_hints(parameter.annotation, include_extras=True)
    for field in dataclasses.fields(parameter.annotation):
        default = getattr(parameter.default, field.name)
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
        )
