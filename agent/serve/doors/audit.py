"""Who changed what: every administrator's action, and every deletion, as a line of `runs/<name>/serve/audit.jsonl`."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from agent.wire.body import body_of
from agent.wire.errors import as_api_error

log = logging.getLogger(__name__)

FILE = "audit.jsonl"
_LONGEST = 1000
_BODY_S = 1.0
_ADMIN = web.RequestKey("admin_action", bool)


def mark_admin_action(request: web.Request) -> None:
    """Have `request` written down: it asks for what only an administrator may do."""
    request[_ADMIN] = True


def is_audited(request: web.Request) -> bool:
    """Whether a request deletes, or changes what only an administrator may change. What only reads is not kept."""
    return request.method == "DELETE" or (request.method not in ("GET", "HEAD", "OPTIONS") and _ADMIN in request)


class Audit:
    """Appends to the file `path`, which only this user may read. A line:

    {"at": "2026-12-01T12:00:00.000+00:00", "key": "admin-eve", "address": "10.0.0.7",
     "action": "POST /v1/versions/rollback", "status": 200, "outcome": "done", "seconds": 0.4,
     "arguments": {"version": 3}}

    `status` 0: the caller went away before it was answered. No key is ever in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    async def kept(
        self, request: web.Request, caller: str, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """The answer of `handler`; if it is to be audited, what became of it is written down before it is sent."""
        began, resource = time.monotonic(), request.match_info.route.resource
        line: dict[str, Any] = {
            "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "key": caller,
            "address": request.remote,
            "action": f"{request.method} {request.path if resource is None else resource.canonical}",
            "status": 0,
            "outcome": "the caller went away",
        }
        try:
            answer = await handler(request)
            line |= {"status": answer.status, "outcome": "done" if answer.status < 400 else "refused"}
            return answer
        except web.HTTPException as error:
            line |= {"status": error.status, "outcome": error.reason}
            raise
        except Exception as error:
            known = as_api_error(error)
            status, outcome = (500, type(error).__name__) if known is None else (known.status, known.message)
            line |= {"status": status, "outcome": outcome[:_LONGEST]}
            raise
        finally:
            if is_audited(request):
                line["seconds"] = round(time.monotonic() - began, 3)
                # Not given up half-way, when the caller has gone.
                await asyncio.shield(asyncio.ensure_future(self._keep(request, line)))

    async def _keep(self, request: web.Request, line: dict[str, Any]) -> None:
        body = b""
        with contextlib.suppress(Exception):  # one that nobody wanted to read, or that broke off
            body = await body_of(request, within_s=_BODY_S)
        line["arguments"] = {**request.match_info, **request.query, **_arguments(body)}
        await asyncio.to_thread(self._write, line)

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._append(line)
        except OSError as error:  # what was done is done: its caller is told so, and the log has the line
            log.error("cannot write %s: %s; the line: %s", self.path, error.strerror, line)

    def _append(self, line: dict[str, Any]) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, msgspec.json.encode(line) + b"\n")
        finally:
            os.close(descriptor)


def _arguments(body: bytes) -> dict[str, Any]:
    if not body:
        return {}
    try:
        given = msgspec.json.decode(body[:_LONGEST]) if len(body) <= _LONGEST else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        given = None
    return given if isinstance(given, dict) else {"body": body[:_LONGEST].decode(errors="replace")}
