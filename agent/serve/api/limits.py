"""Who may call, and how often: bearer keys, token buckets, a ceiling of generations at once."""

from __future__ import annotations

import contextlib
import hmac
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from aiohttp import web

from agent.serve.config import ServeConfig, ServeError
from agent.serve.doors.audit import mark_admin_action
from agent.wire.errors import ApiError

KEYS_VARIABLE = "SAO_SERVE_KEYS"
_MOST_BUCKETS = 10_000


class Keys:
    """Names by bearer key. Without any key (`serve.doors.open`) everybody is `anonymous`, and may do everything."""

    def __init__(self, keys: dict[str, str]) -> None:
        self._keys = keys

    @classmethod
    def read(cls, config: ServeConfig) -> Keys:
        """The keys of `config.keys_file` and of $SAO_SERVE_KEYS. Raises `ServeError`."""
        words = os.environ.get(KEYS_VARIABLE, "").split(",")
        if config.keys_file is not None:
            try:
                words += Path(config.keys_file).read_text(encoding="utf-8").splitlines()
            except OSError as error:
                raise ServeError(f"serve.keys_file: cannot read {config.keys_file}: {error.strerror}") from error
        keys: dict[str, str] = {}
        for word in filter(None, (word.strip() for word in words)):
            if word.startswith("#"):
                continue
            name, colon, key = word.partition(":")
            if not colon or not name or len(key) < 8:
                raise ServeError("bearer keys are written name:key, and a key has at least 8 characters")
            keys[key] = name
        return cls(keys)

    def __bool__(self) -> bool:
        """Whether a key is needed."""
        return bool(self._keys)

    def caller(self, request: web.Request) -> str:
        """The name behind the request's bearer key; raises `ApiError` 401."""
        if not self._keys:
            return "anonymous"
        scheme, _, text = request.headers.get("Authorization", "").partition(" ")
        if not scheme and (other := request.headers.get("X-Api-Key")):  # as Anthropic's clients send it
            scheme, text = "bearer", other
        given = text.strip().encode("utf-8", "surrogateescape")  # a header may hold any bytes
        names = [name for key, name in self._keys.items() if hmac.compare_digest(key.encode(), given)]
        if scheme.lower() != "bearer" or not names:
            raise ApiError(401, "no valid bearer key: send `Authorization: Bearer KEY`", code="invalid_api_key")
        return names[0]

    def check_admin(self, request: web.Request) -> str:
        """The caller's name, if it may change versions; raises `ApiError` 401 or 403."""
        mark_admin_action(request)
        name = self.caller(request)
        if self._keys and not name.startswith("admin"):
            raise ApiError(403, "this key may not change versions: use one whose name begins with `admin`")
        return name


class RateLimit:
    """A token bucket for each caller: `burst` at once, refilled at `per_minute`."""

    def __init__(self, per_minute: float, burst: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = per_minute / 60.0, float(burst), clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, caller: str) -> None:
        """Count one call; raises `ApiError` 429 with the time to wait."""
        now = self._clock()
        level, at = self._buckets.pop(caller, (self._burst, now))
        level = min(self._burst, level + (now - at) * self._rate)
        if len(self._buckets) >= _MOST_BUCKETS:  # the one that called longest ago goes: it is full again by now
            self._buckets.pop(next(iter(self._buckets)))
        self._buckets[caller] = (max(level - 1.0, 0.0) if level >= 1.0 else level, now)
        if level < 1.0:
            wait = (1.0 - level) / self._rate
            raise ApiError(429, f"too many requests: wait {wait:.1f} s", code="rate_limit_exceeded", retry_s=wait)


class Gate:
    """At most `limit` generations at once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.inside = 0

    @contextlib.contextmanager
    def enter(self, places: int = 1) -> Iterator[None]:
        """Hold `places`; raises `ApiError` 503 where there is none."""
        if self.inside + places > self.limit:
            raise ApiError(
                503, f"{self.limit} generations are running already: try again shortly", code="overloaded", retry_s=1.0
            )
        self.inside += places
        try:
            yield
        finally:
            self.inside -= places


def caller_of(request: web.Request, name: str) -> str:
    """Whom a rate counts against: the key's name, or the address where there are no keys."""
    return name if name != "anonymous" else f"@{request.remote}"
