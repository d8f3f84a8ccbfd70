"""The id of a request: the caller's, or one that is made, in every answer, error and line of the log."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web

from agent.wire.errors import REQUEST_ID

HEADER = "X-Request-Id"
_SOUND = re.compile(r"[\x21-\x7e]{1,128}")


@web.middleware
async def request_ids(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Give each request its id for as long as it is handled."""
    given = request.headers.get(HEADER, "")
    REQUEST_ID.set(given if _SOUND.fullmatch(given) else f"req_{uuid.uuid4().hex}")
    return await handler(request)


async def show_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Put it on the answer, a stream's too: to be called when an answer is prepared."""
    if name := REQUEST_ID.get():
        response.headers[HEADER] = name
        if request.path.startswith("/v1/messages"):
            response.headers["request-id"] = name  # where Anthropic's clients look


class RequestIdFilter(logging.Filter):
    """Gives each record of a log `request`: " [id]" while a request is handled, else ""."""

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        name = REQUEST_ID.get()
        record.request = f" [{name}]" if name else ""
        return True
