"""`sao/SWEBench-v0`: a repository with an issue to fix, in a container, graded by tests that the agent never sees.

An action is the model's text of one turn. Its tool calls are carried out in order, and each result is a message of its
own; a text without a call gets a nudge. `finish` (or `submit`) ends the episode.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from envs.arguments import Count, Seconds, check_options, checked_arguments
from envs.core import TRUNCATIONS, AsyncEnv, EnvironmentFault, Step
from envs.swe_bench import containers as shared
from envs.swe_bench.containers import Containers
from envs.swe_bench.grading.grade import TEST_S, assert_complete, grade_patch, refused_grade
from envs.swe_bench.grading.patches import Baseline, Changes, PatchRefusal, collect_changes, make_patch, read_baseline
from envs.swe_bench.grading.reference import References
from envs.swe_bench.grading.run_script import activation
from envs.swe_bench.grading.verdict import Grade, Reason
from envs.swe_bench.instance import Instance, InstanceError, Source, load_instances
from envs.swe_bench.scaffolds.choice import ScaffoldName, make_scaffold
from envs.swe_bench.scaffolds.scaffold import Scaffold
from envs.swe_bench.workspace import ContainerSource, Workspace
from envs.tool_calls import ToolCall, parse_calls
from sandboxes.base import SandboxFault
from sandboxes.docker.settings import DockerSettings

log = logging.getLogger(__name__)

NUDGE = (
    "Your message holds no tool call, so nothing was done. Go on with the tools; when the issue is fixed, call {last}."
)
"""The answer to a text without a tool call."""

_GRACE_S = 60.0
"""How much longer than its own limit a tool call may take before the container counts as broken."""
_CLOSE_S = 60.0
_LAST_WORDS = ("finish", "submit")


class SWEBench(AsyncEnv):
    """Repositories with issues to fix; `docs/swe_bench.md` is its manual page.

    `instances`: see `envs.swe_bench.instance`. `scaffold`: "openhands", "bash" or "auto". `max_turns`: actions an
    episode may take. `max_context_chars`: characters of all messages together. `wall_clock_s`: seconds from reset to
    the end. `call_timeout_s`: seconds one tool call may take (longer is an observation, not a fault).
    `test_timeout_s`: seconds the tests may take. `observation_chars`: what is shown of one tool result. `memory_mb`,
    `cpus`, `runtime`, or `docker` for all settings: what a container may use. `hosts`: DOCKER_HOST urls (none: the
    default engine); `slots`: containers an engine may hold. `reference`: the file that `validate --reference` wrote.
    """

    @checked_arguments(apart=("instances",))
    def __init__(
        self,
        instances: Source = "demo",
        *,
        scaffold: ScaffoldName = "auto",
        max_turns: Count = 300,
        max_context_chars: Count | None = None,
        wall_clock_s: Seconds | None = 4 * 3600.0,
        call_timeout_s: Seconds = 120.0,
        test_timeout_s: Seconds = TEST_S,
        observation_chars: Annotated[int, Field(ge=200)] = 30_000,
        memory_mb: Annotated[int, Field(ge=6)] = 4096,  # what Docker gives at least
        cpus: Seconds = 2.0,
        runtime: str = "",
        docker: DockerSettings | None = None,
        hosts: Sequence[str] = (),
        slots: Count | None = None,
        reference: str | Path | None = None,
    ) -> None:
        self._source: Source = instances
        self._instances: dict[str, Instance] | None = None
        self._reference = reference
        self._references = References(None)
        self._scaffold_name: ScaffoldName = scaffold
        self._max_turns = max_turns
        self._max_context_chars = max_context_chars
        self._wall_clock_s = wall_clock_s
        self._call_timeout_s = call_timeout_s
        self._test_timeout_s = test_timeout_s
        self._observation_chars = observation_chars
        longest = (wall_clock_s or 24 * 3600.0) + test_timeout_s + 3600.0
        self._docker = docker or DockerSettings(
            memory_bytes=memory_mb * 2**20, cpus=cpus, runtime=runtime, ttl_s=longest
        )
        self._hosts, self._slots = tuple(hosts), slots
        self._containers: Containers | None = None
        self._random = random.Random()
        self._instance: Instance | None = None  # None between episodes
        self._workspace: Workspace | None = None
        self._baseline: Baseline | None = None
        self._scaffold: Scaffold | None = None
        self._tools: list[dict[str, Any]] = []
        self._begin_counts()

    def _begin_counts(self) -> None:
        self._turns = self._calls = self._malformed = self._nudges = 0
        self._context_chars = 0
        self._deadline = float("inf")

    @property
    def task_ids(self) -> Sequence[str]:
        """The instances' ids, in the order of the source; loads it if need be."""
        return tuple(self._load())

    def _load(self) -> dict[str, Instance]:
        if self._instances is None:
            self._references = References(self._reference)
            self._instances = load_instances(self._source)
        return self._instances

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode: of the instance `options["task_id"]`, else of one drawn with `seed`.

        Raises `InstanceError` for a source that cannot be used, `ValueError` for an unknown task id or option,
        and `EnvironmentFault` if no container can be had or the instance cannot be set up in it.
        """
        asked = check_options(options, "task_id")
        await self._end()
        instances = self._instances
        if instances is None:
            instances = await asyncio.to_thread(self._load)
        if seed is not None:
            self._random.seed(seed)
        task_id = asked.get("task_id")
        if task_id is None:
            task_id = self._random.choice(list(instances))
        if task_id not in instances:
            raise ValueError(f"there is no task {task_id!r}; the first is {next(iter(instances))!r}")
        instance = instances[task_id]
        if self._containers is None:
            self._containers = shared.acquire(self._docker, self._hosts, self._slots)
        self._begin_counts()
        try:
            # Before the agent works: a row that lacks what grading needs, or is not the one that was validated.
            await asyncio.to_thread(assert_complete, instance)
            self._references.of(instance)
            self._workspace = Workspace(instance, self._containers)
            await self._workspace.start()
            self._baseline = await read_baseline(self._workspace)
            self._scaffold = await asyncio.to_thread(make_scaffold, self._scaffold_name)
            await self._scaffold.open(self._workspace.sandbox, instance.workdir, activate=activation(instance))
        except (SandboxFault, InstanceError) as error:
            await self._end()
            # A row that cannot be set up is no policy's fault either: void, and the others go on.
            raise EnvironmentFault(f"{instance.instance_id} could not be started: {error}") from error
        except BaseException:
            await self._end()
            raise
        self._instance = instance
        if self._wall_clock_s is not None:
            self._deadline = time.monotonic() + self._wall_clock_s
        self._tools = self._scaffold.tools
        # Of the row only the issue is told: hints come from the discussion of the fix, and test names give it away.
        messages = self._scaffold.opening(instance.problem_statement, instance.workdir)
        self._context_chars = sum(len(str(message["content"])) for message in messages)
        return str(messages[-1]["content"]), {
            "messages": messages,
            "tools": self._tools,
            "task_id": instance.instance_id,
            "family": instance.repo,
            "segment": "prompt",
        }

    async def astep(self, action: str) -> Step:
        """Carry out the action's tool calls, or grade the repository after the last one.

        Raises `EnvironmentFault` if the container, the engine or grading fails; the episode is void then.
        """
        self._require_episode()
        self._take(action)
        parsed = parse_calls(action, self._tools, self.tool_format)
        if parsed.error is not None:
            self._malformed += 1
        elif not parsed.calls:
            self._nudges += 1
        last = any(call.name in _LAST_WORDS for call in parsed.calls)
        # What cannot be answered any more is not carried out either, unless it ends the episode by itself.
        ended = self._over()
        if ended is not None and not last:
            return await self._finish(truncation=ended)
        if not parsed.calls:
            text = parsed.error or NUDGE.format(last=self._last_tool())
            message = {"role": "tool" if parsed.error else "user", "content": text}
            if parsed.error:
                message["tool_call_id"] = f"call_{self._turns}"
            messages = [message]
        else:
            messages = []
            for number, call in enumerate(parsed.calls):
                text, finished = await self._call(call)
                if finished:
                    return await self._finish(truncation=None)
                identity = f"call_{self._turns}" + (f"_{number}" if number else "")
                messages.append({"role": "tool", "content": text, "tool_call_id": identity})
                if time.monotonic() >= self._deadline:
                    break
        self._context_chars += sum(len(message["content"]) for message in messages)
        if (ended := self._over()) is not None:
            return await self._finish(truncation=ended)
        observation = "\n".join(message["content"] for message in messages)
        return observation, 0.0, False, False, {"messages": messages, "segment": "observation"}

    async def atruncate(self, reason: str, action: str = "") -> Step:
        """End the episode for `reason` and grade the repository as it stands; no call in `action` is carried out."""
        self._require_episode()
        if reason not in TRUNCATIONS:
            raise ValueError(f"a truncation is one of {', '.join(TRUNCATIONS)}, not {reason!r}")
        if action:
            self._take(action)
        return await self._finish(truncation=reason)

    async def aclose(self) -> None:
        """End the episode and give back its container and this environment's share of the pool."""
        try:
            await self._end()
        finally:
            containers, self._containers = self._containers, None
            if containers is not None:
                await shared.release(containers)

    def _require_episode(self) -> None:
        if self._instance is None:
            raise RuntimeError("no episode is running: reset the environment first")

    def _take(self, action: str) -> None:
        self._turns += 1
        self._context_chars += len(action)

    def _over(self) -> str | None:
        """The truncation that is due, if any."""
        if self._max_context_chars is not None and self._context_chars > self._max_context_chars:
            return "context"
        if time.monotonic() >= self._deadline:
            return "wall_clock"
        return "turns" if self._turns >= self._max_turns else None

    def _last_tool(self) -> str:
        names = [tool["function"]["name"] for tool in self._tools]
        return next((name for name in _LAST_WORDS if name in names), names[-1] if names else "submit")

    async def _call(self, call: ToolCall) -> tuple[str, bool]:
        """One tool call: the text to show, and whether it was the last."""
        assert self._scaffold is not None
        self._calls += 1
        limit = min(self._call_timeout_s, max(1.0, self._deadline - time.monotonic()))
        try:
            async with asyncio.timeout(limit + _GRACE_S):
                outcome = await self._scaffold.call(call.name, call.arguments, timeout_s=limit)
        except (SandboxFault, TimeoutError) as error:
            await self._end()
            problem = str(error) or f"no answer within {limit + _GRACE_S:g} s"
            raise EnvironmentFault(f"the container failed at a call of {call.name}: {problem}") from error
        except BaseException:
            await self._end()
            raise
        return shorten(outcome.text, self._observation_chars), outcome.finished

    async def _finish(self, *, truncation: str | None) -> Step:
        """Take the patch, grade it, end the episode, and say how it went."""
        instance = self._instance
        assert instance is not None
        begun = time.monotonic()
        try:
            patch, grade = await self._grade(instance)
        except (SandboxFault, InstanceError, TimeoutError) as error:
            raise EnvironmentFault(f"{instance.instance_id} could not be graded: {error or 'time limit'}") from error
        finally:
            await self._end()
        info: dict[str, Any] = {
            "messages": [],
            "segment": "observation",
            "patch": patch.decode("utf-8", "replace"),
            "metrics": {
                "turns": self._turns,
                "tool_calls": self._calls,
                "malformed_calls": self._malformed,
                "nudges": self._nudges,
                "correct": grade.resolved,
                "refusal": "" if grade.refusal is None else str(grade.refusal.reason),
                "fail_to_pass_passed": grade.fail_to_pass[0],
                "fail_to_pass": grade.fail_to_pass[1],
                "pass_to_pass_passed": grade.pass_to_pass[0],
                "pass_to_pass": grade.pass_to_pass[1],
                "left_out_files": len(grade.left_out),
                "patch_bytes": len(patch),
                "grading_s": time.monotonic() - begun,
                "family": instance.repo,
            },
        }
        if grade.refusal is not None:
            info["refusal"] = {"reason": str(grade.refusal.reason), "detail": grade.refusal.detail}
        if truncation is not None:
            info["truncation"] = truncation
        return "", float(grade.resolved), truncation is None, truncation is not None, info

    async def _grade(self, instance: Instance) -> tuple[bytes, Grade]:
        workspace, baseline, containers = self._workspace, self._baseline, self._containers
        assert workspace is not None
        assert baseline is not None
        assert containers is not None
        await self._close_scaffold()
        try:
            changes = await collect_changes(workspace, baseline)
            # One container at a time: with a full pool, agents that wait for a second one would wait for each other.
            await workspace.close()
            if not changes.paths:
                raise PatchRefusal(Reason.NO_PATCH, "nothing was changed")
            try:
                return await self._grade_changes(instance, containers, changes)
            except SandboxFault as fault:
                # An episode is dear, another container is not: once more before it is void.
                log.warning("%s: grading failed and is tried again: %s", instance.instance_id, fault)
                return await self._grade_changes(instance, containers, changes)
        except PatchRefusal as refusal:
            return b"", refused_grade(instance, refusal)

    async def _grade_changes(
        self, instance: Instance, containers: ContainerSource, changes: Changes
    ) -> tuple[bytes, Grade]:
        async with Workspace(instance, containers) as fresh:
            patch = await make_patch(fresh, changes)
            return patch, await grade_patch(
                fresh, patch, test_timeout_s=self._test_timeout_s, reference=self._references.of(instance)
            )

    async def _close_scaffold(self) -> None:
        scaffold, self._scaffold = self._scaffold, None
        if scaffold is not None:
            async with asyncio.timeout(_CLOSE_S):
                await scaffold.close()

    async def _end(self) -> None:
        """Leave the episode; its container goes. Counts stay, for whoever reports them."""
        self._instance, self._baseline = None, None
        workspace, self._workspace = self._workspace, None
        try:
            await self._close_scaffold()
        except (SandboxFault, TimeoutError) as error:
            raise EnvironmentFault(f"the tools did not close: {error or 'time limit'}") from error
        finally:
            if workspace is not None:
                await workspace.close()


def shorten(text: str, limit: int) -> str:
    """`text` of at most about `limit` characters: its beginning and its end, with what was cut between them told."""
    if len(text) <= limit:
        return text
    half = (limit - 80) // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


__all__ = ["NUDGE", "InstanceError", "SWEBench"]
