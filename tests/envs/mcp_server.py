"""A real MCP server over stdio, for the tests: it adds, keeps a list, talks too much, hangs and dies."""

from __future__ import annotations

import asyncio
import os
import sys

if __name__ == "__main__":  # before the SDK, which takes a second to import
    if "--broken" in sys.argv:
        raise SystemExit("the shed is on fire")
    if "--deaf" in sys.argv:
        sys.stdin.read()
        raise SystemExit

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shed")
kept: list[str] = []


@server.tool()
def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


@server.tool()
def keep(word: str | None = None) -> str:
    """Keep a word; all words kept so far."""
    if word:
        kept.append(word)
    return " ".join(kept) or "nothing"


@server.tool()
def pid() -> str:
    """The process."""
    return f"{os.getpid()} {os.environ.get('SHED_KEY', 'no key')} {os.environ.get('SHED_NAME', 'no name')}"


@server.tool()
def shout(count: int) -> str:
    """Many letters."""
    return "begin" + "a" * count + "end"


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ToolError("the shed is locked")


@server.tool()
async def hang() -> str:
    """Never answers."""
    await asyncio.Event().wait()
    return ""


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    server.run()
