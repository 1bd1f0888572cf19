"""What ``replay`` and ``plan`` share: options for traces and costs, and reading and replaying with a progress bar."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn

from cargohold.cache.policies import POLICY_NAMES, find_policy
from cargohold.cli.app import progress, quiet_transformers, remark
from cargohold.engine.model.info import describe_model
from cargohold.engine.model.tokenizer import Tokenizer
from cargohold.errors import ConfigError, TraceError
from cargohold.lab.replay.costs import DEFAULT_BYTES_PER_S, CostModel, describe_kv, parse_size
from cargohold.lab.replay.replaying import OPTIMUM, Capacities, ReplayResult, plan_tasks, run_tasks
from cargohold.lab.replay.report import remarks_on
from cargohold.lab.replay.tiers import DEFAULT_DISK_POLICY, DISK, HOST
from cargohold.lab.replay.traces import STDIN, RequestLogDecoder, TraceRequest, read_trace, stop
from cargohold.lab.replay.workload import Workload, WorkloadOptions, load_workload
from cargohold.option_values import SIZE_UNITS, format_count, parse_bytes, search_current_directory

DEFAULT_LOG_BLOCK_TOKENS = 16


TracesArgument = Annotated[
    list[str], typer.Argument(help="Files of one trace: JSON lines, plain, gz or zst; - for standard input.")
]


def look_here_for(policies: Sequence[str]) -> None:
    """If a policy is the user's own, ``MODULE:CLASS``, let modules be found in the current directory, too."""
    if any(":" in policy for policy in policies):
        search_current_directory()


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """The tier below host memory."""

    disk_policy: Annotated[str, typer.Option(help=f"Policy of the disk: {POLICY_NAMES}.")] = DEFAULT_DISK_POLICY

    def checked_policy(self, size_option: str, size: str | None) -> str:
        """The policy's name.

        Args:
            size_option: the option that makes a disk.
            size: its value.

        Raises:
            ConfigError: there is no such policy, or one was chosen without a disk.
        """
        look_here_for([self.disk_policy])
        find_policy(self.disk_policy, "disk_policy")
        if self.disk_policy != DEFAULT_DISK_POLICY and size is None:
            raise ConfigError("disk_policy", self.disk_policy, f"there is no disk; give its size, too: {size_option}")
        return self.disk_policy


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How a trace is read and cut; see ``WorkloadOptions``."""

    blocks_per_chunk: Annotated[int, typer.Option(help="Number of blocks that are kept as one chunk.")] = 1
    block_tokens: Annotated[
        int | None, typer.Option(help="Tokens per block, if the trace does not say; 16 for texts and tokens.")
    ] = None
    tokenizer: Annotated[
        str | None, typer.Option(help="Model whose tokenizer to use for the trace's texts.", metavar="MODEL")
    ] = None
    rate: Annotated[
        float, typer.Option(help="Tokens per second of an answer, if the trace does not say when it was complete.")
    ] = 80.0
    on_bad_line: Annotated[str, typer.Option(help="stop or skip.")] = "stop"

    def workload_options(self) -> WorkloadOptions:
        """The options for a workload. Raises ``ConfigError`` for impossible ones."""
        if self.on_bad_line not in ("stop", "skip"):
            raise ConfigError("on_bad_line", self.on_bad_line, "it must be stop or skip")
        return WorkloadOptions(blocks_per_chunk=self.blocks_per_chunk, block_tokens=self.block_tokens, rate=self.rate)


@dataclass(frozen=True, slots=True)
class CostOptions:
    """Bytes of a token's KV, and how fast it is computed and loaded; see ``CostModel``."""

    bytes_per_token: Annotated[int | None, typer.Option(help="KV bytes per token.")] = None
    kv_dtype_bytes: Annotated[
        int | None, typer.Option(help="Bytes per number of KV, if different from the model's: 1 for fp8.")
    ] = None
    prefill_tokens_per_s: Annotated[
        float | None, typer.Option(help="Prompt tokens that the accelerator computes per second.")
    ] = None
    host_bandwidth: Annotated[str, typer.Option(help="Bytes per second from host memory.")] = "20GB"
    disk_bandwidth: Annotated[str, typer.Option(help="Bytes per second from disk.")] = "3GB"

    def costs(self, model: str | None) -> CostModel:
        """The cost model, with bytes per token from the model's configuration if a model is given.

        Raises:
            ConfigError: an option is impossible.
        """
        per_token = self.bytes_per_token
        if model is not None:
            if per_token is not None:
                raise ConfigError("bytes_per_token", per_token, "use either this or --model")
            quiet_transformers()
            per_token = describe_kv(model, self.kv_dtype_bytes).bytes_per_token
        elif self.kv_dtype_bytes is not None:
            raise ConfigError("kv_dtype_bytes", self.kv_dtype_bytes, "it changes the value from --model; add --model")
        return CostModel(
            bytes_per_token=per_token,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            bytes_per_s={
                **DEFAULT_BYTES_PER_S,
                HOST: parse_bandwidth("host_bandwidth", self.host_bandwidth),
                DISK: parse_bandwidth("disk_bandwidth", self.disk_bandwidth),
            },
        )


def parse_bandwidth(key: str, text: str) -> int:
    """Bytes per second from text such as ``20GB``. Raises ``ConfigError``."""
    try:
        return parse_bytes(key, text)
    except ConfigError as error:
        expected = f"it must be a number of bytes per second above 0, such as 20GB; {SIZE_UNITS}"
        raise ConfigError(key, text, expected) from error


@dataclass(frozen=True, slots=True)
class LoadedTrace:
    """A trace that was read, with remarks about it.

    Attributes:
        workload: its requests.
        is_trie: whether ids stand for whole prefixes.
        remarks: sentences that the user saw.
    """

    workload: Workload
    is_trie: bool
    remarks: tuple[str, ...]

    def behind(self, device: str | None, costs: CostModel) -> LoadedTrace:
        """The same trace behind a device pool of a size, with what that finds by itself as a remark."""
        if device is None:
            return self
        workload = self.workload
        size = parse_size("device", device).chunks_for(workload, costs.chunk_bytes(workload.chunk_tokens))
        workload = workload.behind(size)
        share = int(workload.on_device.sum()) / workload.num_lookups
        text = f"the device pool alone finds {share:.1%} of the blocks asked for; hits are what offloading adds to that"
        remark(f"note: {text}", style="yellow")
        return replace(self, workload=workload, remarks=(*self.remarks, text))

    def replayable(self, policies: Sequence[str]) -> list[str]:
        """The policies that can be replayed: all but the optimum, which needs ids that form a trie."""
        return [policy for policy in policies if self.is_trie or policy != OPTIMUM]


@dataclass(slots=True)
class _Skipped:
    """Counts broken lines. Keeps only the first error's text: errors hold on to their lines, and there may be millions."""

    count: int = 0
    first: str = ""

    def add(self, error: TraceError) -> None:
        self.first = self.first or str(error)
        self.count += 1


def load_trace(files: Sequence[str], options: TraceOptions) -> LoadedTrace:
    """Read a trace behind a progress bar.

    Raises:
        ConfigError: an option is impossible, or leaves nothing to replay.
        TraceError: a file cannot be read, a line is broken, or there is nothing to replay.
    """
    workload_options = options.workload_options()
    decode = _decoder(options)
    skipped = _Skipped()
    with progress(BarColumn()) as bar:
        task = bar.add_task("reading", total=_total_bytes(files))
        requests = read_trace(
            files,
            on_bad_line=stop if options.on_bad_line == "stop" else skipped.add,
            on_progress=lambda num_bytes: bar.advance(task, num_bytes),
            decode=decode,
        )
        try:
            workload = load_workload(_counted(requests, files, skipped), workload_options)
        except ConfigError as error:
            if error.key != "trace":
                raise
            if 0 < decode.longest < decode.block_tokens:
                expected = (
                    f"the longest prompt has {format_count(decode.longest, 'token')}, less than a block of "
                    f"{decode.block_tokens}; give a smaller --block-tokens"
                )
                raise ConfigError("block_tokens", options.block_tokens, expected) from error
            raise TraceError(" ".join(files), None, error.expected) from error
    num_misplaced = workload.count_misplaced()
    remarks = remarks_on(workload, num_misplaced, skipped.count)
    if skipped.count:
        remarks.append(f"the first of them: {skipped.first}")
    if options.tokenizer is not None and not decode.has_texts:
        remarks.append("the trace has no texts, so --tokenizer made no difference")
    for text in remarks:
        remark(f"note: {text}", style="yellow")
    return LoadedTrace(workload, num_misplaced == 0, tuple(remarks))


def replay_all(
    workload: Workload,
    policies: Sequence[str],
    sizes: Sequence[Capacities],
    disk_policy: str,
    jobs: int | None,
    *,
    learns_first: bool = False,
) -> list[ReplayResult]:
    """Replay every policy at every size behind a progress bar; by default on all cores, or here if that is quicker."""
    tasks = plan_tasks(policies, sizes, disk_policy, learns_first=learns_first)
    num_processes = _num_processes(workload, len(tasks), jobs)
    results: list[ReplayResult] = []
    with progress(BarColumn(), MofNCompleteColumn()) as bar:
        bar_id = bar.add_task("replaying", total=sum(len(task.capacities) for task in tasks))
        with closing(run_tasks(workload, tasks, num_processes)) as finds:
            for found in finds:
                results += found
                bar.advance(bar_id, len(found))
    return results


def _num_processes(workload: Workload, num_tasks: int, jobs: int | None) -> int:
    if jobs is not None:
        return jobs
    # A process takes about a second to start.
    is_short = workload.num_requests * num_tasks < 20_000
    return 1 if is_short else os.cpu_count() or 1


def _counted(requests: Iterator[TraceRequest], files: Sequence[str], skipped: _Skipped) -> Iterator[TraceRequest]:
    """Pass requests on. Raises ``TraceError`` if there are none."""
    request = next(requests, None)
    if request is None:
        lines = f"{format_count(skipped.count, 'line')}, and none is a request; the first: {skipped.first}"
        raise TraceError(" ".join(files), None, lines if skipped.count else "the trace is empty")
    yield request
    yield from requests


def _decoder(options: TraceOptions) -> RequestLogDecoder:
    tokenizer = None
    if options.tokenizer is not None:
        quiet_transformers()
        tokenizer = Tokenizer.load(describe_model(options.tokenizer))
        if tokenizer is None:
            raise ConfigError("tokenizer", options.tokenizer, "this model has no tokenizer that can be used")
    return RequestLogDecoder(options.block_tokens or DEFAULT_LOG_BLOCK_TOKENS, tokenizer)


def _total_bytes(files: Sequence[str]) -> int | None:
    if STDIN in files:
        return None
    return sum(Path(file).stat().st_size for file in files if Path(file).is_file())
