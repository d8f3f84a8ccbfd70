"""The public door, as aiohttp's middleware: Host, Origin, content type and key, before anybody has a body read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping

from aiohttp import hdrs, web

from agent.serve.doors import rules
from agent.serve.doors.audit import Audit
from agent.serve.doors.settings import DoorsConfig
from agent.serve.doors.wrong_keys import WrongKeys
from agent.wire.errors import ApiError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

KEY_HEADERS = ("Authorization", "X-Api-Key")
_METHODS = "GET, POST, DELETE"
_SHOWN_HEADERS = "X-Policy-Version, X-Request-Id, Retry-After"
_PREFLIGHT_S = "600"


class PublicDoor:
    """Checks every request of the public application that listens on `host`.

        app = web.Application(middlewares=[errors_as_json, door.check])
        app.on_response_prepare.append(door.mark)

    Refusals, in this order: 421 for a Host that is not ours, 403 for a page of another origin, 415 for a body that is
    not JSON, 429 for an address that has tried many keys, 401 without a key. `caller` gives the name behind a request's
    key, or raises `ApiError`.
    """

    def __init__(
        self, config: DoorsConfig, host: str, *, caller: Callable[[web.Request], str], audit: Audit | None = None
    ) -> None:
        self._config, self._host, self._caller, self._audit = config, host, caller, audit
        self._proxies = rules.networks(config.trusted_proxies)
        self._origins = {rules.origin_of(origin) for origin in config.cors_origins}
        self._wrong_keys = WrongKeys(config.wrong_keys_per_minute)

    @web.middleware
    async def check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The middleware. Put it behind the one that makes answers of errors."""
        request, scheme, host = self._from_client(request)
        self._check_host(request, host)
        origin = request.headers.get(hdrs.ORIGIN, "")
        if self._is_listed(origin):
            if request.method == "OPTIONS":
                return self._preflight(request)
        elif rules.is_foreign(request.headers, request.method, host, scheme):
            raise ApiError(
                403,
                f"pages of {origin or 'other sites'} may not use this server: list their origin in "
                "serve.doors.cors_origins, if they should",
                code="foreign_origin",
            )
        kind = request.headers.get(hdrs.CONTENT_TYPE, "")
        if request.body_exists and not rules.is_json(kind):
            raise ApiError(
                415, f"a body must be JSON: send `Content-Type: application/json`, not {kind[:80]!r}", code="not_json"
            )
        caller = "" if rules.is_open(request.path) else self._checked_key(request)
        if self._audit is not None:
            return await self._audit.kept(request, caller, handler)
        return await handler(request)

    async def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Headers of every answer: no page of another origin reads it, unless it is listed."""
        headers: MutableMapping[str, str] = response.headers
        headers.setdefault("X-Content-Type-Options", "nosniff")
        if self._is_listed(origin := request.headers.get(hdrs.ORIGIN, "")):
            headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _SHOWN_HEADERS
        else:
            headers.setdefault("Cross-Origin-Resource-Policy", "same-origin")
        if self._origins:
            headers[hdrs.VARY] = ", ".join(filter(None, (headers.get(hdrs.VARY), "Origin")))

    def _from_client(self, request: web.Request) -> tuple[web.Request, str, str]:
        """The request as its client has sent it, the client's scheme ("": unknown) and the host that it asks for."""
        peer, headers = request.remote or "", request.headers
        host = headers.get(hdrs.HOST, "")
        if not rules.is_within(peer, self._proxies):
            return request, "", host
        address = rules.client_address(peer, ",".join(headers.getall("X-Forwarded-For", [])), self._proxies)
        scheme = _last(headers.get("X-Forwarded-Proto", "")).lower()
        host = _last(headers.get("X-Forwarded-Host", "")) or host
        return request.clone(remote=address), scheme if scheme in ("http", "https") else "", host

    def _check_host(self, request: web.Request, host: str) -> None:
        address = request.transport.get_extra_info("sockname") if request.transport is not None else None
        arrived_at = str(address[0]) if address else ""
        if not rules.host_is_ours(host, bound=self._host, arrived_at=arrived_at, named=self._config.hosts):
            raise ApiError(
                421,
                f"this server is not {host[:80]!r}: call it by its address, or list the name in serve.doors.hosts",
                code="unknown_host",
            )

    def _is_listed(self, origin: str) -> bool:
        return bool(origin) and (parsed := rules.origin_of(origin)) is not None and parsed in self._origins

    def _preflight(self, request: web.Request) -> web.Response:
        headers: dict[str, str] = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "") or "*",
            hdrs.ACCESS_CONTROL_MAX_AGE: _PREFLIGHT_S,
        }
        if request.headers.get("Access-Control-Request-Private-Network") == "true":
            headers["Access-Control-Allow-Private-Network"] = "true"
        return web.Response(status=204, headers=headers)

    def _checked_key(self, request: web.Request) -> str:
        address = rules.counted_as(request.remote or "")
        shown = "\n".join(request.headers.get(name, "") for name in KEY_HEADERS).strip()
        if shown:
            self._wrong_keys.check(address, shown)
        try:
            name = self._caller(request)
        except ApiError as error:
            if error.status == 401 and shown:
                self._wrong_keys.was_wrong(address)
            raise
        if shown:
            self._wrong_keys.was_right(address, shown)
        return name


def _last(entries: str) -> str:
    """What the nearest proxy has added to a header."""
    return entries.rpartition(",")[2].strip()
