"""`Connection`: one MCP server, from its start to its end, with time limits. Nothing else here imports the SDK."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from envs.core import EnvironmentFault
from envs.mcp_tools.settings import MCPServer

if TYPE_CHECKING:
    from mcp import Client

STOP_S = 10.0
"""How long a server may take to end: its input is closed, then it gets SIGTERM and SIGKILL, by the SDK."""

_PAGES = 100


@dataclass(frozen=True, slots=True)
class Answer:
    """What a tool said. `failed`: it says itself that it failed, or the server refused the call."""

    text: str
    failed: bool = False
    late: bool = False


def require_sdk() -> None:
    """Raise `ValueError`, which says how to install it, if the SDK is missing. Imports it, which takes a second."""
    try:
        import mcp
    except ImportError as error:
        raise ValueError(f"tools.mcp needs the MCP SDK: pip install 'sao-agents[mcp]' ({error})") from error
    if not hasattr(mcp, "Client"):
        raise ValueError("tools.mcp needs version 2 of the MCP SDK or a newer one: pip install 'sao-agents[mcp]'")


class Connection:
    """A server as its user sees it. Its life:

        new ──start()──▶ open ──call()*──▶ open ──stop()──▶ ended
                 └─ no answer in time: EnvironmentFault, ended

    The SDK's client has to be left by the task that entered it, so it lives in a task of its own.
    """

    def __init__(self, server: MCPServer, *, start_s: float, call_s: float) -> None:
        self.server = server
        self._start_s, self._call_s = start_s, call_s
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    async def start(self) -> list[dict[str, Any]]:
        """Start or reach the server; its tools as OpenAI schemas, under their own names."""
        opened: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(opened), name=f"mcp {self.server.name}")
        first: set[asyncio.Future[Any]] = {self._task, opened}
        try:
            async with asyncio.timeout(self._start_s):
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not opened.done():
                await self._task  # raises what kept it from opening
            return opened.result()
        except TimeoutError as error:
            await self.stop()
            raise self._fault(f"was not ready within start_s={self._start_s:g} s") from error
        except BaseException:
            await self.stop()
            raise

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Answer:
        """Call a tool. What the policy did wrong is an answer; raises `EnvironmentFault` for a server that is gone."""
        from mcp import MCPError

        assert self._client is not None
        try:
            async with asyncio.timeout(self._call_s):
                result = await self._client.call_tool(tool, dict(arguments))
        except TimeoutError:
            await self._ask_how_it_is()
            return Answer(f"The tool did not answer within {self._call_s:g} s, and the call was cancelled.", True, True)
        except MCPError as error:
            await self._ask_how_it_is()
            return Answer(str(error), failed=True)
        except Exception as error:  # an answer that the SDK cannot read, a connection that it has lost
            raise self._fault(f"failed at {tool}: {type(error).__name__}: {error}") from error
        return Answer("\n".join(map(_text, result.content)), failed=bool(result.is_error))

    async def stop(self) -> None:
        """End the server, or leave it if it runs elsewhere. May be called in any state."""
        task, opened = self._task, self._client is not None
        self._task = self._client = None
        if task is None:
            return
        self._stopping.set()
        if opened:
            await asyncio.wait({task}, timeout=STOP_S)
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=STOP_S)
        with contextlib.suppress(BaseException):  # it has ended, that is all that counts
            task.exception()

    async def _live(self, opened: asyncio.Future[list[dict[str, Any]]]) -> None:
        try:
            async with self._connected() as client:
                self._client = client
                tools = await _listed(client)
                if not opened.done():
                    opened.set_result(tools)
                await self._stopping.wait()
        except EnvironmentFault:
            raise
        except (Exception, BaseExceptionGroup) as error:
            raise self._fault(f"cannot be used: {_reason(error)}") from error

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[Client]:
        from mcp import Client, StdioServerParameters

        if self.server.url is None:
            given = {name: os.environ[name] for name in self.server.pass_env if name in os.environ}
            program, *words = self.server.command
            process = StdioServerParameters(
                command=program, args=words, env={**given, **self.server.env}, cwd=self.server.cwd
            )
            async with Client(process) as client:
                yield client
            return
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        key = os.environ.get(self.server.key_env) if self.server.key_env else None
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # A limit of the transport above ours, so that ours is the one that cuts.
        timeout = httpx2.Timeout(self._start_s, read=max(self._start_s, self._call_s) + 5.0)
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout) as http,
            Client(streamable_http_client(self.server.url, http_client=http)) as client,
        ):
            yield client

    async def _ask_how_it_is(self) -> None:
        """Return if the server still answers; a fault if it does not."""
        assert self._client is not None
        try:
            async with asyncio.timeout(self._start_s):
                await self._client.list_tools(cache_mode="refresh")
        except TimeoutError as error:
            raise self._fault("does not answer any more") from error
        except Exception as error:
            raise self._fault(f"is gone: {_reason(error)}") from error

    def _fault(self, what: str) -> EnvironmentFault:
        return EnvironmentFault(f"the MCP server {self.server.name!r} {what}")


async def _listed(client: Client) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    cursor = None
    for _ in range(_PAGES):
        page = await client.list_tools(cursor=cursor, cache_mode="refresh")
        tools += [_schema(tool) for tool in page.tools]
        cursor = page.next_cursor
        if cursor is None:
            return tools
    raise EnvironmentFault(f"it lists its tools on more than {_PAGES} pages")


def _schema(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.input_schema)}
    return {"type": "function", "function": function}


def _text(block: Any) -> str:
    """A block of an answer as text; of what is no text only its kind."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and getattr(block.resource, "text", None) is not None:
        return str(block.resource.text)
    if block.type == "resource_link":
        return f"[link: {block.uri}]"
    return f"[{block.type}, which cannot be shown]"


def _reason(error: BaseException) -> str:
    """The first error of nested groups, in words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
