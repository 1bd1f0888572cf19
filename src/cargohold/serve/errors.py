"""Errors as the clients of each interface expect them."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from cargohold.errors import ConfigError, EngineDeadError, RequestError

_OPENAI_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_NOT_SERVED: Final = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)
_ANTHROPIC_TYPES: Final = _OPENAI_TYPES | {413: "request_too_large", 503: "overloaded_error"}


class ApiError(HTTPException):
    """A request that is refused, or has failed.

    Args:
        status: the HTTP status.
        message: what is wrong and what would work, for people.
        param: the field that is wrong, if it is one.
        code: what programs tell errors apart by, where the status is not enough.
        retry_after_s: when to try again, if that may help.
    """

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        headers = None if retry_after_s is None else {"retry-after": str(retry_after_s)}
        super().__init__(status, message, headers)
        self.param = param
        self.code = code


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that is wrong in itself."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def api_error(error: Exception) -> ApiError:
    """What a client receives for an error of the engine."""
    match error:
        case ApiError():
            return error
        case HTTPException():
            where = "; /openapi.json lists what is served here" if error.status_code in _NOT_SERVED else ""
            return ApiError(HTTPStatus(error.status_code), f"{error.detail}{where}")
        case ConfigError():
            return invalid(str(error), error.key)
        case RequestError():
            return invalid(error.reason)
        case EngineDeadError():
            return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(error), code="engine_stopped")
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the server has failed; see its log")


def openai_body(error: ApiError) -> dict[str, Any]:
    """An error in the form of OpenAI."""
    kind = "server_error" if error.status_code >= 500 else _OPENAI_TYPES.get(error.status_code, "invalid_request_error")
    return {"error": {"message": error.detail, "type": kind, "param": error.param, "code": error.code}}


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """An error in the form of Anthropic."""
    otherwise = "api_error" if error.status_code >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.status_code, otherwise)
    return {"type": "error", "error": {"type": kind, "message": error.detail}}


def error_response(path: str, error: ApiError) -> Response:
    """The answer to a request that ended before anything was sent."""
    body = anthropic_body(error) if path.startswith("/v1/messages") else openai_body(error)
    return json_response(body, error.status_code, dict(error.headers or {}))


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encode(body), status, headers, "application/json")


def _encode(body: Any) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:  # half a character, which JSON can write and UTF-8 cannot, comes back in a message
        return json.dumps(body, ensure_ascii=False).encode(errors="replace")
