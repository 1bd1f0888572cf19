"""On a CUDA device: the link, copies in all shapes, decoding beside copies, and contexts restored instead of recomputed.

Made for a machine that can be had for half an hour and reaches no package index: parts come in the order of what they are
worth, each is printed as soon as it is done, and what did not fit into the time is named. Copies are measured by each of the
ways over the link, not only by the one that a worker chooses at its start: a way that is nowhere the best is not needed, and
a choice that is not the best is wrong. Without a device, ``--quick`` runs the same code on the CPU, at sizes that show nothing
but that it works.
"""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, Final
from unittest.mock import patch

import torch

from benchmarks.environment import NotInstalledError
from benchmarks.transfers import carry_out
from cargohold import LLM, OffloadConfig, SamplingParams
from cargohold.tiers import HostMemory
from cargohold.transfer import CopyJob, Direction, TransferWorker
from cargohold.transfer.cpu import make_transfer_worker
from cargohold.transfer.links import Link, cuda_links

LIMIT_S: Final = 450.0
"""Seconds after which no further part is begun."""

KIB: Final = 1024
MIB: Final = 1024**2

BLOCK_BYTES: Final = (4 * KIB, 16 * KIB, 28 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
PIECES: Final = (1, 64)
"""Pieces of a block on the device: all layers together, or keys and values of 32 layers apart."""

JOB_BYTES: Final = 256 * MIB
_MAX_JOB_BLOCKS: Final = 4096

BLOCK_TOKENS: Final = 16
SAMPLING: Final = SamplingParams(max_tokens=4, ignore_eos=True)

MODELS: Final[dict[str, dict[str, int]]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
_TINY: Final = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}


def run(*, quick: bool) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not quick:
        raise NotInstalledError(
            "there is no CUDA device, or this torch is built without CUDA; --quick shows the code on a CPU"
        )
    started = time.perf_counter()
    parts: dict[str, Callable[[], Any]] = {
        "link": lambda: _rounded_link(device, 4 * MIB if quick else JOB_BYTES),
        "restore_1B": lambda: _restore("1B", device, quick=quick),
        "transfers": lambda: list(_transfers(device, quick=quick)),
        "decode_beside_stores": lambda: list(_decode_beside(Direction.STORE, device, quick=quick)),
        "restore_8B": lambda: _restore("8B", device, quick=quick),
        "decode_beside_loads": lambda: list(_decode_beside(Direction.LOAD, device, quick=quick)),
    }
    result: dict[str, Any] = {"device": _describe(device), "not_run": {}}
    for name, measure in parts.items():
        if time.perf_counter() - started > LIMIT_S:
            result["not_run"][name] = f"{LIMIT_S:g} s were over"
            continue
        try:
            result[name] = measure()
        except (RuntimeError, AssertionError) as error:  # the other parts are worth having all the same
            result["not_run"][name] = f"failed: {error}"
        print(json.dumps({name: result.get(name, result["not_run"].get(name))}), flush=True)
    return result


def _describe(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"name": "CPU", "note": "no device: these figures say nothing"}
    properties = torch.cuda.get_device_properties(0)
    query = [
        "nvidia-smi",
        "--query-gpu=driver_version,pcie.link.gen.current,pcie.link.width.current",
        "--format=csv,noheader",
    ]
    try:
        driver = subprocess.run(  # noqa: S603  # its words are ours
            query, capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        driver = f"unknown: {error}"
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver_and_link": driver,
        "cuda": torch.version.cuda,
    }


# --- the link itself --------------------------------------------------------------------------------------------------


def _rounded_link(device: str, num_bytes: int) -> dict[str, float]:
    return {name: round(rate, 2) for name, rate in _link(device, num_bytes).items()}


def _link(device: str, num_bytes: int) -> dict[str, float]:
    """GB/s of one long copy from and to locked pages: what no transfer can exceed."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return {
        "load_gigabytes_per_s": _rate(device, num_bytes, lambda: there.copy_(host, non_blocking=True)),
        "store_gigabytes_per_s": _rate(device, num_bytes, lambda: host.copy_(there, non_blocking=True)),
    }


def _rate(device: str, num_bytes: int, act: Callable[[], object]) -> float:
    return num_bytes / median(_seconds(device, act) for _ in range(7)) / 1e9


def _seconds(device: str, act: Callable[[], object]) -> float:
    _synchronize(device)
    started = time.perf_counter()
    act()
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


# --- copies -----------------------------------------------------------------------------------------------------------


def _transfers(device: str, *, quick: bool) -> Iterator[dict[str, Any]]:
    for block_bytes in (4 * KIB, 64 * KIB) if quick else BLOCK_BYTES:
        num_blocks = 16 if quick else min(_MAX_JOB_BLOCKS, JOB_BYTES // block_bytes)
        long_copies = _link(device, num_blocks * block_bytes)
        for pieces in PIECES:
            regions = [
                torch.ones((2 * num_blocks, block_bytes // pieces), dtype=torch.uint8, device=device)
                for _ in range(pieces)
            ]
            memory = HostMemory(2 * num_blocks, block_bytes)
            everything = range(2 * num_blocks)
            for name, worker, chosen in each_way(regions, memory):
                carry_out(worker, Direction.STORE, everything, everything)  # commits and locks all pages
                for places, blocks, rows in _places(num_blocks):
                    for direction in Direction:
                        times = [carry_out(worker, direction, blocks, rows) for _ in range(2 if quick else 5)]
                        rate = num_blocks * block_bytes / median(whole for _, whole in times) / 1e9
                        yield {
                            "block_bytes": block_bytes,
                            "pieces": pieces,
                            "blocks": places,
                            "direction": direction.value,
                            "by": name,
                            "is_chosen": name == chosen[direction],
                            "gigabytes_per_s": round(rate, 2),
                            "of_one_long_copy": round(rate / long_copies[f"{direction.value}_gigabytes_per_s"], 2),
                            "caller_held_up_ms": round(median(submitting for submitting, _ in times) * 1e3, 3),
                        }


def each_way(
    regions: Sequence[torch.Tensor], memory: HostMemory
) -> Iterator[tuple[str, TransferWorker, Mapping[Direction, str]]]:
    """For each way over the link, its name, a worker that knows no other, and which one a worker chooses for each direction."""
    names: list[str] = []

    def noted(*arguments: Any) -> list[Link]:
        links = cuda_links(*arguments)
        names.extend(link.name for link in links)
        return links

    def make(links: Callable[..., list[Link]]) -> TransferWorker:
        with patch("cargohold.transfer.cuda.cuda_links", links):
            return make_transfer_worker(regions, memory, time.monotonic)

    worker = make(noted)
    chosen = {direction: link_name(worker, direction) for direction in Direction}
    for name in names or [chosen[Direction.LOAD]]:  # on a CPU, there is one
        worker.shutdown()
        worker = make(lambda *arguments, only=name: [link for link in cuda_links(*arguments) if link.name == only])
        yield name, worker, chosen
    worker.shutdown()


def _places(num_blocks: int) -> Iterator[tuple[str, Sequence[int], Sequence[int]]]:
    everything = range(2 * num_blocks)
    yield "neighbours", everything[:num_blocks], everything[:num_blocks]
    generator = random.Random(num_blocks)
    yield "scattered", generator.sample(everything, num_blocks), generator.sample(everything, num_blocks)


def link_name(worker: TransferWorker, direction: Direction) -> str:
    lanes = getattr(worker, "_lanes", None)
    return "memcpy" if lanes is None else str(lanes[direction].copies.link.name)


# --- decoding beside copies -------------------------------------------------------------------------------------------


def _decode_beside(direction: Direction, device: str, *, quick: bool) -> Iterator[dict[str, Any]]:
    """How much longer steps take beside copies: steps like those of a decoding 8B model, which read all weights."""
    width, depth, block_bytes, num_blocks = (64, 2, 4 * KIB, 8) if quick else (4096, 96, 2 * MIB, 64)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    weights = [torch.randn((width, width), dtype=dtype, device=device) / width**0.5 for _ in range(depth)]
    hidden = torch.randn((32, width), dtype=dtype, device=device)
    regions = [torch.ones((num_blocks, block_bytes), dtype=torch.uint8, device=device)]
    everything = tuple(range(num_blocks))

    def steps(worker: TransferWorker, num_copied: int) -> float:
        """Median seconds of a step, each of which also copies so many blocks. Nothing is left to copy behind the last one."""
        times = []
        for at in range(4 if quick else 60):
            started = time.perf_counter()
            out = hidden
            for weight in weights:
                out = out @ weight
            if num_copied:
                worker.submit(CopyJob(at, direction, everything[:num_copied], everything[:num_copied], 60.0))
            out.sum().item()  # the token
            worker.poll()
            times.append(time.perf_counter() - started)
        worker.settle(60.0)
        worker.poll()
        return median(times)

    for name, worker, chosen in each_way(regions, HostMemory(num_blocks, block_bytes)):
        carry_out(worker, Direction.STORE, everything, everything)
        for num_copied in (0, 1, 4, num_blocks):
            pairs = [(steps(worker, 0), steps(worker, num_copied)) for _ in range(2 if quick else 5)]
            alone_s, beside_s = (median(each) for each in zip(*pairs, strict=True))
            yield {
                "by": name,
                "is_chosen": name == chosen[direction],
                "copied_mib_per_step": num_copied * block_bytes / MIB,
                "step_alone_ms": round(alone_s * 1e3, 3),
                "slower": round(median(beside / alone for alone, beside in pairs) - 1, 4),
                "submitted_gigabytes_per_s": round(num_copied * block_bytes / beside_s / 1e9, 2),
            }


# --- contexts that come back ------------------------------------------------------------------------------------------


def _restore(name: str, device: str, *, quick: bool) -> dict[str, Any]:
    """Time to first token of contexts that come back, and whether the tokens are the same."""
    lengths, repeats = ((64,), 1) if quick else ((64, 256, 2048, 8192, 32768), 3)
    link = _link(device, 4 * MIB if quick else JOB_BYTES)["load_gigabytes_per_s"]
    with _random_model(name, device, max(lengths) + 64, is_tiny=quick) as directory:
        options: dict[str, Any] = {
            "device": device,
            "block_tokens": BLOCK_TOKENS,
            "num_device_blocks": -(-max(lengths) // BLOCK_TOKENS) + 8,
            "max_num_batched_tokens": 2048,
        }
        host_bytes = "64MiB" if quick else "16GiB"
        with LLM(directory, offload=OffloadConfig(host_bytes=host_bytes, restore="always"), **options) as llm:
            rows = [_returns(llm, length, repeats, link) for length in lengths]
            differs = _control(llm, lengths[0])
    return {
        "model": name,
        "link_gigabytes_per_s": round(link, 2),
        "rows": rows,
        "zeroed_host_memory_gives_other_tokens": differs,
    }


def _returns(llm: LLM, length: int, repeats: int, link: float) -> dict[str, Any]:
    """One context, asked for again and again; between the visits it leaves the device."""
    block_bytes = llm.plan.layout.block_bytes
    times: dict[str, list[float]] = {"recomputed": [], "restored": [], "on_device": []}
    tokens: dict[str, set[tuple[int, ...]]] = {name: set() for name in times}
    for at in range(repeats):
        context = _context(length, at, llm)
        for name, taken_s in times.items():
            if name == "restored":
                _flush_device(llm, at)
            output = llm.generate([context], SAMPLING)[0]
            metrics = output.metrics
            assert metrics.ttft_s is not None
            restored = sum(metrics.restored_tokens.values())
            found = {"recomputed": length - restored - metrics.device_tokens, "restored": restored}
            assert found.get(name, metrics.device_tokens) >= length - 2 * BLOCK_TOKENS, (name, metrics)
            taken_s.append(metrics.ttft_s)
            tokens[name].add(output.token_ids)
    num_bytes = length // BLOCK_TOKENS * block_bytes
    bound_s = median(times["on_device"]) + num_bytes / (0.9 * link * 1e9) + 0.002
    return {
        "context_tokens": length,
        "kv_mib": round(num_bytes / MIB, 1),
        **{f"{name}_ms": round(median(of) * 1e3, 2) for name, of in times.items()},
        "target_ms": round(bound_s * 1e3, 2),
        "is_within_target": median(times["restored"]) <= bound_s,
        "times_sooner_than_recomputed": round(median(times["recomputed"]) / median(times["restored"]), 1),
        "tokens_of_restored_are_those_of_a_device_hit": tokens["restored"] == tokens["on_device"],
        "tokens_of_restored_are_those_recomputed": tokens["restored"] == tokens["recomputed"],
    }


def _context(length: int, seed: int, llm: LLM) -> list[int]:
    generator = random.Random(f"{length} {seed}")
    return [generator.randrange(llm.plan.info.vocab_size) for _ in range(length)]


def _flush_device(llm: LLM, seed: int) -> None:
    """Let other contexts take the whole device pool: one that nearly fills it, and one for the blocks that are left."""
    num_tokens = llm.plan.scheduler.max_model_len - 8
    for at, length in enumerate((num_tokens, min(num_tokens, 16 * BLOCK_TOKENS))):
        llm.generate([_context(length, 1000 + 2 * seed + at, llm)], SamplingParams(max_tokens=1, ignore_eos=True))


def _control(llm: LLM, length: int) -> bool:
    """Whether tokens differ when host memory was zeroed before the restore. If not, equal tokens prove nothing."""
    context = _context(length, 99, llm)
    before = llm.generate([context], SAMPLING)[0].token_ids
    _flush_device(llm, 99)
    for memory in HOSTS:
        memory.rows[:] = 0
    output = llm.generate([context], SAMPLING)[0]
    assert sum(output.metrics.restored_tokens.values()) >= length - 2 * BLOCK_TOKENS
    return output.token_ids != before


HOSTS: list[HostMemory] = []
"""The host memory of the engine that is measured, for the control."""


@contextmanager
def _random_model(name: str, device: str, max_positions: int, *, is_tiny: bool) -> Iterator[str]:
    """A directory with a Llama's configuration, whose weights are made on the device when it is loaded.

    Weights are large enough for tokens to depend on the whole context; those of a fresh model are not.
    """
    import transformers  # noqa: PLC0415  # slow

    import cargohold.connector.offloading.factory as host_factory  # noqa: PLC0415  # to see the host memory it makes

    sizes = _TINY if is_tiny else MODELS[name]
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=2 if is_tiny else 8, vocab_size=32_000, max_position_embeddings=max_positions
    )
    config.dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def made_up(_path: str, *, dtype: torch.dtype, attn_implementation: str, **_: Any) -> tuple[Any, dict[str, Any]]:
        torch.manual_seed(1)
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attn_implementation
            )
        with torch.no_grad():
            for parameter_name, weights in model.named_parameters():
                if weights.dim() == 2:
                    weights.normal_(0, 1.0 if "embed" in parameter_name else 1.2 / weights.shape[1] ** 0.5)
        return model, {"missing_keys": []}

    def remembered(*arguments: Any) -> HostMemory:
        HOSTS[:] = [HostMemory(*arguments)]
        return HOSTS[0]

    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        with (
            patch.object(transformers.AutoModelForCausalLM, "from_pretrained", made_up),
            patch.object(host_factory, "HostMemory", remembered),
        ):
            yield directory
    HOSTS.clear()
    if device != "cpu":
        torch.cuda.empty_cache()
