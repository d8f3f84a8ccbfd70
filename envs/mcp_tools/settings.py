"""Which MCP servers an environment has, and what they may cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MCPServer(_Frozen):
    """One server: a process that is started here (`command`), or one that runs elsewhere (`url`, streamable HTTP).

    Of a process: `env` holds variables for it; `pass_env` names variables of ours that it gets too (it gets few without
    that: PATH, HOME and the like), so that keys stay out of recipes; `cwd` is its folder. `shared`: it lives as long as
    the environment, so its state leaks from one episode to the next; else each episode starts its own.
    Of a `url`: `key_env` names the variable that holds a bearer token. Whether sessions share state is the server's
    matter.
    `tools`: the only ones that are offered (None: all). `prefix` stands before their names.
    """

    command: tuple[str, ...] = ()
    url: str | None = Field(default=None, pattern=r"^https?://")
    env: dict[str, str] = {}
    pass_env: tuple[str, ...] = ()
    cwd: str | None = None
    shared: bool = False
    key_env: str | None = None
    tools: tuple[str, ...] | None = None
    prefix: str = Field(default="", pattern=r"^[A-Za-z0-9_-]*$")

    @property
    def name(self) -> str:
        """What it is called in errors."""
        return self.url or " ".join(self.command)

    @model_validator(mode="after")
    def _one_of_two(self) -> MCPServer:
        if bool(self.command) == (self.url is not None):
            raise ValueError("give either `command` (a process to start) or `url` (a server that runs)")
        if self.url is not None and (self.env or self.pass_env or self.cwd):
            raise ValueError("env, pass_env and cwd are for a `command`")
        if self.command and self.key_env:
            raise ValueError("key_env is for a `url`; a `command` gets variables by `pass_env`")
        return self


class ToolSettings(_Frozen):
    """`mcp`: the servers whose tools an environment has beside its own.

    `start_s`: to start a server and to list its tools. `call_s`: one call; a longer one is cancelled, and the
    observation says so. `output_chars`: of one answer; of a longer one the beginning and the end are shown.
    `max_calls`: of one episode, all servers together; the call after the last one truncates it ("turns").
    """

    mcp: tuple[MCPServer, ...] = ()
    start_s: float = Field(default=30.0, gt=0)
    call_s: float = Field(default=30.0, gt=0)
    output_chars: int = Field(default=16_384, ge=200)
    max_calls: int = Field(default=100, ge=1)


def read_tools(spec: ToolSettings | Mapping[str, Any]) -> ToolSettings:
    """`spec` with its keys checked. Raises `ValueError`, which names the first key that is wrong."""
    if isinstance(spec, ToolSettings):
        return spec
    try:
        return ToolSettings.model_validate(dict(spec))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(["tools", *map(str, first["loc"])])
        raise ValueError(f"{key}: {first['msg'].removeprefix('Value error, ')}") from None
