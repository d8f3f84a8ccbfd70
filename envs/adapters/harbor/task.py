"""Harbor's task folders as data: what is in one, which of its settings are kept, and which are refused by name.

greeting/
  task.toml          limits, image, variables (schema 1.x)
  instruction.md     what the agent is told
  environment/       a Dockerfile with what it copies; not needed with `environment.docker_image`
  tests/             test.sh and what it needs: copied in after the agent has ended
"""

from __future__ import annotations

import functools
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from envs.arguments import ArgumentError

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG])B?\s*", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-([^}]*))?\}")


class TaskError(ArgumentError):
    """A task folder that is not there, not whole, or asks for what is not supported; names the folder and the key."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Agent(_Section):
    timeout_sec: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    user: str | int | None = None


class _Environment(_Section):
    build_timeout_sec: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    docker_image: str | None = None
    os: Literal["linux"] = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, ge=6)
    storage_mb: int | None = None
    env: dict[str, str] = {}
    workdir: str | None = None
    network_mode: Literal["no-network", "public"] = "public"

    @model_validator(mode="before")
    @classmethod
    def _older_names(cls, data: Any) -> Any:
        """`memory = "2G"`, `storage` and `allow_internet`, as tasks of schema 1.0 have them."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if old in data:
                size = _SIZE.fullmatch(str(data.pop(old)))
                if size is None:
                    raise ValueError(f"{old} is a size such as '2G' or '512M'")
                data.setdefault(new, int(float(size[1]) * _MIB[size[2].upper()]))
        if (allowed := data.pop("allow_internet", None)) is not None:
            data.setdefault("network_mode", "public" if allowed else "no-network")
        return data


class _Verifier(_Section):
    timeout_sec: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    env: dict[str, str] = {}
    user: str | int | None = None
    environment_mode: Literal["shared"] = "shared"


class _TaskFile(_Section):
    schema_version: str = "1.0"
    version: str | None = None
    task: dict[str, Any] | None = None
    metadata: dict[str, Any] = {}
    source: str | None = None
    agent: _Agent = _Agent()
    environment: _Environment = _Environment()
    verifier: _Verifier = _Verifier()
    solution: dict[str, Any] = {}
    artifacts: list[Any] = []


_UNSUPPORTED = {
    "steps": "tasks of several steps",
    "multi_step_reward_strategy": "tasks of several steps",
    "environment.gpus": "devices",
    "environment.gpu_types": "devices",
    "environment.tpu": "devices",
    "environment.mcp_servers": "tool servers of a task",
    "environment.skills_dir": "skills",
    "environment.healthcheck": "health checks",
    "environment.allowed_hosts": "lists of allowed hosts",
    "agent.network_mode": "a network of the agent's own",
    "agent.allowed_hosts": "lists of allowed hosts",
    "verifier.network_mode": "a network of the verifier's own",
    "verifier.allowed_hosts": "lists of allowed hosts",
    "verifier.environment": "a container of the verifier's own",
    "verifier.collect": "commands that collect state",
}
"""Keys that Harbor knows and this adapter does not carry out: refused unless they say nothing (None, [], {}, 0)."""


@dataclass(frozen=True, slots=True)
class HarborTask:
    """One task. `verifier_env` and `env` may hold `${NAME}` and `${NAME:-default}`, read from this machine's variables.

    `image`: one that is there, or None for `folder/environment/Dockerfile`. Times in seconds; `agent_s` None is no
    limit. `network`: the task expects one.
    """

    name: str
    folder: Path
    instruction: str
    image: str | None
    agent_s: float | None
    verifier_s: float
    build_s: float
    cpus: float | None
    memory_mb: int | None
    env: tuple[tuple[str, str], ...]
    verifier_env: tuple[tuple[str, str], ...]
    agent_user: str
    verifier_user: str
    workdir: str
    network: bool
    category: str

    @property
    def tests(self) -> Path:
        """The folder that is copied to `/tests`."""
        return self.folder / "tests"

    @property
    def context(self) -> Path:
        """The folder that its image is built from."""
        return self.folder / "environment"


@functools.lru_cache(maxsize=64)
def load_tasks(folder: Path) -> tuple[HarborTask, ...]:
    """The tasks below `folder` by name: `folder` itself if it is one, else its sub-folders. Raises `TaskError`.

    Read once a process.
    """
    if not folder.is_dir():
        raise TaskError(f"there is no folder {folder} with Harbor tasks")
    found = [folder] if (folder / "task.toml").is_file() else sorted(path.parent for path in folder.glob("*/task.toml"))
    if not found:
        raise TaskError(f"{folder} holds no Harbor task: neither it nor a folder in it has a task.toml")
    return tuple(read_task(path) for path in found)


def read_task(folder: Path) -> HarborTask:
    """Read one task folder; `TaskError` names it and every key that is wrong, unknown or not supported."""
    try:
        with (folder / "task.toml").open("rb") as file:
            data = tomllib.load(file)
        instruction = (folder / "instruction.md").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise TaskError(f"{folder}: {Path(error.filename).name} cannot be read: {error.strerror}") from error
    except ValueError as error:  # no TOML, no UTF-8
        raise TaskError(f"{folder}: {error}") from error
    _drop_what_says_nothing(folder, data)
    try:
        task = _TaskFile.model_validate(data)
    except ValidationError as error:
        raise TaskError(f"{folder}/task.toml: {_told(error)}") from error
    if not (folder / "tests" / "test.sh").is_file():
        raise TaskError(f"{folder} has no tests/test.sh, so nothing could be graded")
    where = task.environment
    if where.docker_image is None and not (folder / "environment" / "Dockerfile").is_file():
        raise TaskError(f"{folder} has neither environment/Dockerfile nor environment.docker_image in its task.toml")
    if not instruction:
        raise TaskError(f"{folder}: instruction.md is empty")
    return HarborTask(
        name=folder.name,
        folder=folder,
        instruction=instruction,
        image=where.docker_image,
        agent_s=task.agent.timeout_sec,
        verifier_s=task.verifier.timeout_sec,
        build_s=where.build_timeout_sec,
        cpus=where.cpus,
        memory_mb=where.memory_mb,
        env=tuple(where.env.items()),
        verifier_env=tuple(task.verifier.env.items()),
        agent_user="" if task.agent.user is None else str(task.agent.user),
        verifier_user="" if task.verifier.user is None else str(task.verifier.user),
        workdir=where.workdir or "",
        network=where.network_mode == "public",
        category=str(task.metadata.get("category") or ""),
    )


def resolved(variables: tuple[tuple[str, str], ...], whose: str) -> dict[str, str]:
    """`variables` with `${NAME}` and `${NAME:-default}` filled in from here; `TaskError` for one that is unset."""

    def fill(name: str, value: str) -> str:
        match = _VARIABLE.fullmatch(value)
        if match is None:
            return value
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise TaskError(f"{whose}: the variable {name} is {value}, and {match[1]} is not set here")
        return found

    return {name: fill(name, value) for name, value in variables}


def _drop_what_says_nothing(folder: Path, data: dict[str, Any]) -> None:
    for key, what in _UNSUPPORTED.items():
        section, _, name = key.rpartition(".")
        holder = data.get(section, {}) if section else data
        if not isinstance(holder, dict) or name not in holder:
            continue
        if holder.pop(name):
            raise TaskError(f"{folder}/task.toml: {key}: {what} are not supported; docs/suites.md says what is")


def _told(error: ValidationError) -> str:
    words = {"extra_forbidden": "unknown key", "missing": "is required"}
    return "; ".join(
        f"{'.'.join(map(str, item['loc']))}: {words.get(item['type'], item['msg'].removeprefix('Value error, '))}"
        for item in error.errors()
    )
