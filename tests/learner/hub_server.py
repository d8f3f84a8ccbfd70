"""A hub in small: a real HTTP server that keeps what huggingface_hub commits to it, small files only."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeHub:
    """`files` by repository and path; `commits`: their titles; `private` by repository; `seen`: tokens that came.

    `refusal`: the status of every answer from then on. `gate`: commits wait for it.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []
        self.private: dict[str, bool] = {}
        self.seen: set[str] = set()
        self.refusal: int | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Event()
        self.url = ""

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        path = path.partition("?")[0]
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.files.setdefault(repo, {})
            self.private[repo] = asked.get("private") is True or asked.get("visibility") == "private"
            return {"url": f"{self.url}/{repo}", "id": repo, "name": repo}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        repo, _, what = path.removeprefix("/api/models/").partition("/preupload")
        if what:
            asked = json.loads(body)["files"]
            return {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]}
        repo = path.removeprefix("/api/models/").partition("/commit/")[0]
        self.arrived.set()
        self.gate.wait(60)
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                self.commits.append(line["value"]["summary"])
            else:
                self.files[repo][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return {"commitUrl": f"{self.url}/{repo}/commit/abc", "commitOid": "abc", "success": True}


@contextlib.contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            hub.seen.add(self.headers.get("Authorization", ""))
            status = hub.refusal or 200
            text = json.dumps({"error": "no"} if hub.refusal else hub.answer(self.path, body)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self) -> None:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
