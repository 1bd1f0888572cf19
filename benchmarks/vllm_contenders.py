"""Contenders inside vLLM: the same engine without a connector, with ours, with vLLM's own and with LMCache."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from examples.vllm_server import free_port, why_turned_off

ROOT: Final = Path(__file__).parents[1]
VLLM_PYTHON: Final = ROOT / ".venv-vllm" / "bin" / "python"
LMCACHE_PYTHON: Final = ROOT / ".venv-vllm-lmcache" / "bin" / "python"
STOP_TIMEOUT_S: Final = 10.0
LOG_TAIL_CHARS: Final = 3000

LMCACHE_CHUNK_TOKENS: Final = 256
"""LMCache's default."""

NO_CONNECTOR: Final = "no connector"
DEVICE_HIT: Final = "device hit"
CARGOHOLD: Final = "cargohold"
VLLM: Final = "vllm"
LMCACHE: Final = "lmcache"


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to serve the same requests.

    Attributes:
        name: its name in results.
        python: interpreter of an environment with all packages that it needs.
        restores: whether a context that comes back is found, on the device or elsewhere.
        has_large_pool: whether its device pool holds all contexts at once.
        chunk_tokens: tokens that it keeps and finds as a unit; ``None`` for one block.
        transfer_config: vLLM's ``kv_transfer_config``.
    """

    name: str
    python: Path = VLLM_PYTHON
    restores: bool = True
    has_large_pool: bool = False
    chunk_tokens: int | None = None
    transfer_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def obstacle(self) -> str | None:
        """Why it cannot take part here, and what helps; ``None`` if it can."""
        if self.python.exists():
            return None
        return f"there is no {self.python.parents[1].relative_to(ROOT)}; make bench-vllm makes it"


def contenders(host_bytes: int, block_tokens: int) -> list[Contender]:
    """All contenders, whether they can take part or not.

    Args:
        host_bytes: host memory of each contender that uses any.
        block_tokens: tokens per block of the device pool. Chunks are as large, but LMCache is also measured with its default.
    """
    return [
        Contender(NO_CONNECTOR, restores=False),
        Contender(DEVICE_HIT, has_large_pool=True),
        Contender(CARGOHOLD, transfer_config=_connector("CargoholdConnector", {"host_bytes": host_bytes})),
        Contender(VLLM, transfer_config=_connector("OffloadingConnector", vllm_options(host_bytes))),
        _lmcache(LMCACHE, host_bytes, None),
        _lmcache(f"{LMCACHE}, {block_tokens}-token chunks", host_bytes, block_tokens),
    ]


def _connector(name: str, extra: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": dict(extra), **more}


def vllm_options(host_bytes: int) -> dict[str, Any]:
    """Options of vLLM's own connector, with a spec of ours: its own does not copy on a CPU, and ours only adds that."""
    return {
        "spec_name": "CopyingSpec",
        "spec_module_path": "benchmarks.vllm_cpu_spec",
        "cpu_bytes_to_use": host_bytes,
    }


def _lmcache(name: str, host_bytes: int, chunk_tokens: int | None) -> Contender:
    """LMCache as a server beside the engine, over shared memory: its fastest way on a CPU, with observability turned off."""
    port, http_port = free_port(), free_port()
    arguments = ["--l1-size-gb", f"{host_bytes / 2**30:g}", "--eviction-policy", "LRU", "--http-port", str(http_port)]
    arguments += [
        "--supported-transfer-mode",
        "engine_driven",
        "--shm-name",
        f"bench-{port}",
        "--disable-observability",
    ]
    if chunk_tokens is not None:
        arguments += ["--chunk-size", str(chunk_tokens)]
    options = {
        "lmcache.mp.port": port,
        "lmcache.mp.autostart": True,
        "lmcache.mp.autostart.wait_timeout": 300,
        "lmcache.mp.autostart.server_args": " ".join(arguments),
    }
    module = "lmcache.integration.vllm.lmcache_mp_connector"
    config = _connector("LMCacheMPConnector", options, kv_connector_module_path=module)
    return Contender(name, LMCACHE_PYTHON, chunk_tokens=chunk_tokens or LMCACHE_CHUNK_TOKENS, transfer_config=config)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request.

    Attributes:
        tokens: the answer's tokens.
        ttft_s: seconds to the first token.
        total_s: seconds to the end.
        cached_tokens: tokens of the prompt that were not computed.
    """

    tokens: tuple[int, ...]
    ttft_s: float
    total_s: float
    cached_tokens: int


class EngineError(RuntimeError):
    """A child process ended, or its connector was turned off; the text has the end of its log, or what that says."""


class Engine:
    """A running contender. Its methods raise ``EngineError`` if it ended, or has turned its connector off.

    Args:
        process: a process of ``benchmarks.vllm_engine``.
        log: file with its output other than answers.
    """

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def await_start(self) -> dict[str, str]:
        """Wait until the engine can be asked. Returns the versions of packages that matter."""
        versions: dict[str, str] = self._read()["versions"]
        return versions

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answer]:
        """Answer one prompt after the other."""
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "max_tokens": max_tokens}), file=self._process.stdin, flush=True)
        answers = self._read()["answers"]
        if (why := why_turned_off(self._log)) is not None:
            raise EngineError(f"an engine goes on without its connector, so it shows nothing; {why}")
        return [Answer(tuple(one["tokens"]), one["ttft_s"], one["total_s"], one["cached_tokens"]) for one in answers]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARS:]
            raise EngineError(f"a vLLM engine ended; it said last:\n{tail}")
        message: dict[str, Any] = json.loads(line)
        return message


@contextmanager
def running(
    contender: Contender, options: Mapping[str, Any], log: Path, environment: Mapping[str, str]
) -> Iterator[Engine]:
    """Start a contender, without waiting until it can be asked; stop it and all its processes at the end.

    Args:
        contender: the contender.
        options: options of vLLM's ``LLM``.
        log: file for its output other than answers.
        environment: environment variables besides those of all contenders.
    """
    options = dict(options)
    if contender.transfer_config:
        options["kv_transfer_config"] = contender.transfer_config
    with log.open("w") as errors:
        process = subprocess.Popen(  # noqa: S603  # an interpreter of ours, and no shell
            [str(contender.python), "-m", "benchmarks.vllm_engine", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**_environment(), **environment},
            cwd=ROOT,
            text=True,
            start_new_session=True,  # so that processes it starts can be ended with it, whatever happens
        )
    try:
        yield Engine(process, log)
    finally:
        _stop(process)


def _environment() -> dict[str, str]:
    """Environment variables for an engine.

    Unless it is told, vLLM's CPU build uses another number of threads with a connector than without.
    """
    cores = sorted(os.sched_getaffinity(0))
    environment = {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "PYTHONHASHSEED": "0",
    }
    environment.pop("OMP_NUM_THREADS", None)
    return environment


def _stop(process: subprocess.Popen[str]) -> None:
    """Ask all processes of the group to end, so that LMCache's server frees its shared memory; then kill those that stay."""
    assert process.stdin is not None and process.stdout is not None
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _signal_group(process.pid, number):
            break
        _wait_for_group(process)
    process.wait()
    process.stdin.close()
    process.stdout.close()


def _wait_for_group(process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + STOP_TIMEOUT_S
    # A process that has ended counts as part of the group until it is waited for.
    while time.monotonic() < deadline and (process.poll() is None or _signal_group(process.pid, 0)):
        time.sleep(0.1)


def _signal_group(group: int, number: int) -> bool:
    """Send a signal to all processes of a group. Returns whether there were any."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
