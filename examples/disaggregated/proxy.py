"""A proxy that lets one engine compute prompts and another one decode. It speaks the OpenAI API, and so do both engines.

python proxy.py PREFILL_URL DECODE_URL [PORT]
"""

import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask

HANDOFF = "cargohold_handoff"
PREFILL_HEADER = "x-prefill-seconds"
FOR_DECODING_ONLY = ("stream_options", "max_completion_tokens", "min_tokens", "n", "best_of", "logprobs", "stop")


class Proxy:
    """Sends each request to the prefill engine first, and what that announces, with the request, to the decode engine.

    Args:
        prefill_url: address of the engine that computes prompts, without ``/v1``.
        decode_url: address of the engine that generates.
    """

    def __init__(self, prefill_url: str, decode_url: str) -> None:
        self._prefill_url, self._decode_url = prefill_url, decode_url
        self._client = httpx2.AsyncClient(timeout=httpx2.Timeout(600, connect=5))

    async def complete(self, request: Request) -> Response:
        """Answer a request for a completion or a chat."""
        path, body = request.url.path, await request.json()
        headers = {name: request.headers[name] for name in ("authorization",) if name in request.headers}
        begun = time.perf_counter()
        announced = await self._prefill(path, body, headers)
        took_s = time.perf_counter() - begun

        params = {**(body.get("kv_transfer_params") or {}), **announced}
        onward = self._client.build_request(
            "POST", self._decode_url + path, json={**body, "kv_transfer_params": params}, headers=headers
        )
        answer = await self._client.send(onward, stream=True)
        return StreamingResponse(
            answer.aiter_raw(),
            status_code=answer.status_code,
            media_type=answer.headers.get("content-type"),
            headers={PREFILL_HEADER: f"{took_s:.3f}"},
            background=BackgroundTask(answer.aclose),
        )

    async def _prefill(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        """Let the prefill engine compute the prompt, and generate one token, which is thrown away.

        Returns its announcement; nothing if it is away or refuses: then the decode engine computes the prompt, or says what is
        wrong with the request.
        """
        prompt = {name: value for name, value in body.items() if name not in FOR_DECODING_ONLY}
        params = {**(body.get("kv_transfer_params") or {}), "do_remote_decode": True}
        prompt |= {"max_tokens": 1, "stream": False, "kv_transfer_params": params}
        try:
            answer = await self._client.post(self._prefill_url + path, json=prompt, headers=headers)
            answer.raise_for_status()
            told = answer.json().get("kv_transfer_params") or {}
        except (httpx2.HTTPError, ValueError) as error:
            print(f"the prefill engine is of no help: {error}", file=sys.stderr)
            return {}
        return {HANDOFF: told[HANDOFF]} if HANDOFF in told else {}

    async def models(self) -> Response:
        """Pass on what the decode engine serves."""
        answer = await self._client.get(f"{self._decode_url}/v1/models")
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    def app(self) -> FastAPI:
        """Make the application."""

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            async with self._client:
                yield

        app = FastAPI(lifespan=lifespan)
        app.add_api_route("/v1/completions", self.complete, methods=["POST"])
        app.add_api_route("/v1/chat/completions", self.complete, methods=["POST"])
        app.add_api_route("/v1/models", self.models)
        return app


if __name__ == "__main__":
    port = int(sys.argv[3]) if len(sys.argv) > 3 else 8000
    uvicorn.run(Proxy(sys.argv[1], sys.argv[2]).app(), host="127.0.0.1", port=port, log_level="warning")
