"""The page at `/`: its files, the chart library from the installed package plotly, and what a browser may load.

The page needs no key: it asks for one and sends it with its own requests, like any other client.
"""

from __future__ import annotations

import asyncio
import gzip
import importlib.util
from pathlib import Path

from aiohttp import web

from agent.wire.errors import ApiError

STATIC = Path(__file__).parent / "static"
NO_PLOTLY = "charts need plotly: pip install 'sao-agents[serve]'"
# Everything from this origin, nothing inline. Images: plotly's downloads and icons are made in the browser.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class Page:
    """Handlers of the page."""

    def __init__(self) -> None:
        self._files = {path.name: path for path in sorted(STATIC.iterdir()) if path.suffix in _KINDS}
        self._plotly: bytes | None = None
        self._reading = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        """`/`, `/static/NAME` and `/static/plotly.min.js`."""
        return [
            web.get("/", self._index),
            web.get("/static/plotly.min.js", self._chart_library),
            web.get("/static/{name}", self._file),
        ]

    async def _index(self, _: web.Request) -> web.Response:
        return await self._answer("index.html")

    async def _file(self, request: web.Request) -> web.Response:
        return await self._answer(request.match_info["name"])

    async def _answer(self, name: str) -> web.Response:
        if name not in self._files:
            raise ApiError(404, f"no file /static/{name}")
        path = self._files[name]
        body = await asyncio.to_thread(path.read_bytes)
        return web.Response(body=body, content_type=_KINDS[path.suffix], charset="utf-8", headers=_HEADERS)

    async def _chart_library(self, request: web.Request) -> web.Response:
        async with self._reading:
            if self._plotly is None:
                self._plotly = await asyncio.to_thread(_compressed_plotly)
        body, headers = self._plotly, {**_HEADERS, "Cache-Control": "max-age=3600", "Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            headers["Content-Encoding"] = "gzip"
        else:
            body = await asyncio.to_thread(gzip.decompress, body)
        return web.Response(body=body, content_type="text/javascript", charset="utf-8", headers=headers)


def _compressed_plotly() -> bytes:
    """plotly.js as the Python package ships it, gzipped; `ApiError` 501 where the package is not installed."""
    # Not imported: that takes a second, and nothing of it is needed but one file.
    spec = importlib.util.find_spec("plotly")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "package_data" / "plotly.min.js"
        if path.is_file():
            return gzip.compress(path.read_bytes(), 6)
    raise ApiError(501, NO_PLOTLY, code="missing_extra")
