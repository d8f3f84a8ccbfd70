"""`WithMCPTools`: any environment, and beside its own tools those of MCP servers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from envs.core import AsyncEnv, EnvironmentFault, Step
from envs.mcp_tools.server import Connection, require_sdk
from envs.mcp_tools.settings import ToolSettings, read_tools
from envs.tool_calls import ToolCall, parse_calls
from envs.wrapping import WrappedCore, with_figures


class WithMCPTools(WrappedCore):
    """`inner`, whose policy may also call tools of MCP servers; `docs/your_own_environment.md` shows it.

    The tools are listed when their server starts, and stand behind the environment's own in `info["tools"]`. An action
    whose calls are all of these tools is answered here, by tool messages, and the environment does not see it; any
    other action is the environment's. The rest is as it is: `inner` decides what is an answer and what it is worth. Its
    last step tells in `metrics` how many calls there were (`mcp_calls`), and how many failed or came late.

    What a policy does wrong (a wrong argument, a call that takes too long) is an observation. A server that cannot be
    started, or is gone, is an `EnvironmentFault`.
    """

    def __init__(self, inner: AsyncEnv, tools: ToolSettings | Mapping[str, Any]) -> None:
        super().__init__(inner)
        self.settings = read_tools(tools)
        require_sdk()
        self._open: dict[int, Connection] = {}  # by the server's place in the settings
        self._listed: dict[int, list[dict[str, Any]]] = {}
        self._owners: dict[str, tuple[Connection, str]] = {}
        self._tools: list[dict[str, Any]] = []
        self._inner_has_tools = False
        self._begin_counts()

    def _begin_counts(self) -> None:
        self._calls = self._errors = self._late = 0

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """As the inner environment's own, with the tools of the servers, which are started before it."""
        self._begin_counts()
        await self._end_servers(shared=False)
        try:
            await self._start_servers()
            observation, info = await self.inner.areset(seed=seed, options=options)
            own = list(info.get("tools") or [])
            self._tools, self._inner_has_tools = [*own, *self._offered(own)], bool(own)
        except BaseException:
            await self._end_servers(shared=True)
            raise
        return observation, {**info, "tools": self._tools}

    async def astep(self, action: str) -> Step:
        """Answer calls of the servers' tools; any other action is the inner environment's."""
        read = parse_calls(action, self._tools, self.tool_format)
        mine = [call for call in read.calls if call.name in self._owners]
        # Of an environment without tools a call that cannot be read is ours: to it, it would be an answer.
        malformed = read.error is not None and not self._inner_has_tools
        if not mine and not malformed:
            return await self._ended(await self.inner.astep(action))
        self._calls += max(1, len(mine))
        if self._calls > self.settings.max_calls:
            return await self.atruncate("turns", action)
        if malformed:
            self._errors += 1
            return self._observed([str(read.error)])
        if len(mine) < len(read.calls):
            self._errors += 1
            names = ", ".join(sorted({call.name for call in read.calls}))
            return self._observed([f"None of these calls was carried out: {names} do not go together in one message."])
        return self._observed([await self._answer(call) for call in mine])

    async def atruncate(self, reason: str, action: str = "") -> Step:
        """As the inner environment's own."""
        return await self._ended(await self.inner.atruncate(reason, action))

    async def aclose(self) -> None:
        """Close the inner environment, and end the servers that were started here."""
        try:
            await self.inner.aclose()
        finally:
            await self._end_servers(shared=True)

    async def _start_servers(self) -> None:
        """Start those that do not run yet, all at once; their tools are listed then."""

        async def start(index: int) -> None:
            self._listed[index] = await self._open[index].start()

        missing = [index for index in range(len(self.settings.mcp)) if index not in self._open]
        for index in missing:
            server, limits = self.settings.mcp[index], self.settings
            self._open[index] = Connection(server, start_s=limits.start_s, call_s=limits.call_s)
        try:
            async with asyncio.TaskGroup() as group:
                for index in missing:
                    group.create_task(start(index))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None  # the first one; the others were cancelled for it

    def _offered(self, own: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The schemas of the servers' tools under the names that the policy calls them by."""
        self._owners = {}
        taken = {str(tool["function"]["name"]) for tool in own}
        schemas = []
        for index, server in enumerate(self.settings.mcp):
            listed = {tool["function"]["name"]: tool["function"] for tool in self._listed[index]}
            if missing := set(server.tools or ()) - set(listed):
                raise EnvironmentFault(
                    f"tools.mcp.{index}.tools: {server.name!r} has no tool {min(missing)!r}; it has {', '.join(listed)}"
                )
            for name in server.tools if server.tools is not None else listed:
                called = server.prefix + name
                if called in taken:
                    raise EnvironmentFault(f"two tools are called {called!r}: give tools.mcp.{index} a `prefix`")
                taken.add(called)
                self._owners[called] = (self._open[index], name)
                schemas.append({"type": "function", "function": {**listed[name], "name": called}})
        return schemas

    async def _answer(self, call: ToolCall) -> str:
        connection, name = self._owners[call.name]
        answer = await connection.call(name, call.arguments)
        self._errors += answer.failed
        self._late += answer.late
        return _cut(answer.text, self.settings.output_chars)

    def _observed(self, answers: list[str]) -> Step:
        first = self._calls - len(answers)
        messages = [
            {"role": "tool", "content": text, "tool_call_id": f"mcp_{first + i}"} for i, text in enumerate(answers)
        ]
        return "\n".join(answers), 0.0, False, False, {"messages": messages, "segment": "observation"}

    async def _ended(self, step: Step) -> Step:
        if not (step[2] or step[3]):
            return step
        await self._end_servers(shared=False)
        figures = {"mcp_calls": self._calls, "mcp_errors": self._errors, "mcp_late": self._late}
        return with_figures(step, figures if self._calls else {})

    async def _end_servers(self, *, shared: bool) -> None:
        """End the episode's servers, and with `shared` all."""
        ending = [index for index, one in self._open.items() if shared or not one.server.shared]
        await asyncio.gather(*(self._open.pop(index).stop() for index in ending))


def _cut(text: str, limit: int) -> str:
    """`text` of at most about `limit` characters: its beginning and its end, with what was cut between them told."""
    if len(text) <= limit:
        return text
    half = (limit - 60) // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
