"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import msgspec
from aiohttp import web

from agent.chat.template import ChatTemplateError
from agent.engines.base import ContextOverflow, EngineFault, EngineRefused
from agent.store.protocol import StoreFault, StoreFull

log = logging.getLogger(__name__)

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that is handled; "" outside of one, and where requests have none."""

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_TYPES |= {409: "conflict_error", 410: "gone_error", 413: "invalid_request_error", 422: "invalid_request_error"}
_TYPES |= {429: "rate_limit_error"}
_ANTHROPIC_TYPES = {kind: _TYPES[kind] for kind in (401, 403, 429)} | {404: "not_found_error"}


class ApiError(Exception):
    """An answer of `status` with a message for the caller; `code` is OpenAI's machine-readable word."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_s = status, message, code, param, retry_s

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": {**error, "request_id": name} if (name := REQUEST_ID.get()) else error}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The same in Anthropic's shape."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        body = {"type": "error", "error": {"type": kind, "message": self.message}}
        return {**body, "request_id": name} if (name := REQUEST_ID.get()) else body


def json_response(body: Any, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def as_api_error(error: Exception) -> ApiError | None:
    """What the caller is told about `error`; None for one that nobody foresaw."""
    match error:
        case ApiError():
            return error
        case ContextOverflow():
            return ApiError(400, str(error), code="context_length_exceeded", param="messages")
        case EngineRefused():
            return ApiError(400, f"the engine refuses this request: {error}")
        case EngineFault():
            return ApiError(503, f"the engine failed, repeat the request: {error}", code="engine_failed", retry_s=1.0)
        case ChatTemplateError():
            return ApiError(400, str(error), param="messages")
        case StoreFull():
            return ApiError(507, str(error), code="disk_full", retry_s=10.0)
        case StoreFault():
            return ApiError(503, str(error), code="store_unavailable", retry_s=1.0)
        case TimeoutError():
            return ApiError(503, "the server's disk did not answer in time: repeat the request", retry_s=1.0)
    return None


@web.middleware
async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every error as JSON in the shape of its wire: Anthropic's for messages, OpenAI's for all others."""
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge as error:
        failure = ApiError(413, f"the request's body is too large: {error.text}", code="body_too_large")
    except web.HTTPException as error:
        if error.status < 400:
            raise
        failure = ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
    except Exception as error:  # a fault of ours must not look like one of the network
        known = as_api_error(error)
        if known is None:
            log.exception("%s %s failed", request.method, request.path)
        failure = known or ApiError(500, "the server failed; its log has the details", code="internal_error")
    theirs = request.path.startswith("/v1/messages")
    response = json_response(failure.anthropic_body if theirs else failure.body, failure.status)
    if failure.retry_s:
        response.headers["Retry-After"] = str(max(1, round(failure.retry_s)))
    return response
