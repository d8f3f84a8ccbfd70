"""`Harbor`: tasks of Harbor's folder format, in our containers, graded by their own test script.

The policy has a shell (`bash`) and `submit`. The tests come into the container when the policy has ended, and run there
as Harbor's default has it: agent and tests share one container.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from envs.adapters.harbor.containers import TaskContainers, acquire, archive, release
from envs.adapters.harbor.reward import read_reward
from envs.adapters.harbor.task import HarborTask, TaskError, load_tasks, resolved
from envs.adapters.turns import Opening, Reply, TurnEnv
from envs.arguments import ArgumentError, Count, Number, Seconds, checked_arguments
from envs.core import EnvironmentFault, Message
from envs.swe_bench.scaffolds.bash import BashScaffold
from envs.tool_calls import ToolCall
from sandboxes.base import ContainerSandbox, Limits, RunResult, SandboxFault
from sandboxes.docker.settings import DockerSettings

SYSTEM_PROMPT = (
    "You work in a container, with a shell: use the bash tool, in as many calls as it takes. When the task is done, "
    "call submit. Make one tool call in each message."
)
NUDGE = (
    "Your message holds no tool call, so nothing was done. Go on with the bash tool; when you are done, call submit."
)

VERIFIER = "/logs/verifier"
_PREPARE = f"""
rm -rf /tests {VERIFIER} && mkdir -p {VERIFIER} /logs/agent /logs/artifacts && chmod 0777 {VERIFIER}
"""
_TEST = f'cd -- "$1" 2>/dev/null || cd /; /tests/test.sh > {VERIFIER}/test-stdout.txt 2>&1'
_GRACE_S = 60.0
_DAY_S = 24 * 3600.0


class Harbor(TurnEnv):
    """Harbor task folders; `docs/suites.md` is the manual page.

    `path`: one task folder, or a folder of them. `tasks`: names of some of them (None: all). `max_turns`,
    `call_timeout_s`, `output_bytes`: of the policy's calls. `wall_clock_s`: of an episode, beside the task's own
    `agent.timeout_sec`, whichever is shorter. `reward_key`: the number of `reward.json` that is the reward.
    `reward_range`: what a reward may be; another one is the verifier's fault. `network`: what a task gets that wants
    one, "none" or a Docker network such as "bridge". `memory_mb`, `cpus`: of a container, where the task says nothing.
    `hosts`: DOCKER_HOST urls (none: the default engine); `slots`: containers an engine may hold.
    """

    @checked_arguments(apart=("path", "tasks", "reward_range", "hosts"))
    def __init__(
        self,
        path: str | Path,
        *,
        tasks: Sequence[str] | None = None,
        max_turns: Count = 100,
        wall_clock_s: Seconds | None = None,
        call_timeout_s: Seconds = 120.0,
        output_bytes: Annotated[int, Field(ge=200)] = 16 * 2**10,
        reward_key: str = "reward",
        reward_range: Sequence[Number] = (0.0, 1.0),
        system_prompt: str = SYSTEM_PROMPT,
        network: str = "none",
        memory_mb: Annotated[int, Field(ge=6)] = 2048,
        cpus: Seconds = 1.0,
        runtime: str = "",
        hosts: Sequence[str] = (),
        slots: Count | None = None,
    ) -> None:
        super().__init__(max_turns=max_turns, wall_clock_s=wall_clock_s)
        found = {task.name: task for task in load_tasks(Path(path).expanduser().resolve())}
        unknown = [name for name in tasks or () if name not in found]
        if unknown:
            raise TaskError(f"tasks: {path} has no task {unknown[0]!r}; it has {', '.join(found)}")
        self._tasks = {name: found[name] for name in tasks} if tasks else found
        self._call_timeout_s, self._output_bytes = call_timeout_s, output_bytes
        self._reward_key, self._range = reward_key, _range(reward_range)
        self._system_prompt, self._network = system_prompt, network
        self._memory_mb, self._cpus, self._runtime = memory_mb, cpus, runtime
        self._hosts, self._slots = tuple(hosts), slots
        self._pools: dict[str, TaskContainers] = {}
        self._task: HarborTask | None = None
        self._sandbox: ContainerSandbox | None = None
        self._scaffold: BashScaffold | None = None
        self._workdir = "/"
        self._nudges = 0

    @property
    def task_ids(self) -> Sequence[str]:
        """The tasks' folder names, sorted, or as `tasks` has them."""
        return tuple(self._tasks)

    async def aclose(self) -> None:
        """End the episode, and give back its container and this environment's share of the pools."""
        try:
            await super().aclose()
        finally:
            pools, self._pools = self._pools, {}
            for pool in pools.values():
                await release(pool)

    async def _open(self, task_id: str, seed: int | None) -> Opening:
        task = self._task = self._tasks[task_id]
        self._nudges = 0
        try:
            self._sandbox, self._workdir = await self._pool(task).open(task)
            self._scaffold = BashScaffold(output_bytes=self._output_bytes)
            await self._scaffold.open(self._sandbox, self._workdir)
        except (SandboxFault, OSError, TaskError) as error:
            raise EnvironmentFault(f"{task.name} could not be started: {error}") from error
        limits = [limit for limit in (task.agent_s, self._wall_clock_s) if limit is not None]
        self._deadline = time.monotonic() + min(limits) if limits else float("inf")
        system = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        messages: list[Message] = [*system, {"role": "user", "content": task.instruction}]
        return Opening(messages, self._scaffold.tools, task.category or "harbor")

    async def _act(self, action: str, calls: Sequence[ToolCall], content: str) -> Reply:
        if not calls:
            self._nudges += 1
            return Reply([{"role": "user", "content": NUDGE}])
        messages: list[Message] = []
        for number, call in enumerate(calls):
            limit = self.left_s(self._call_timeout_s)
            assert self._scaffold is not None
            try:
                async with asyncio.timeout(limit + _GRACE_S):
                    outcome = await self._scaffold.call(call.name, call.arguments, timeout_s=limit)
            except (SandboxFault, TimeoutError) as error:
                raise self._fault(f"failed at a call of {call.name}", error) from error
            if outcome.finished:
                return Reply(messages, ended=True)
            messages.append({"role": "tool", "content": outcome.text, "tool_call_id": self.call_id(number)})
            if time.monotonic() >= self._deadline:
                break
        return Reply(messages)

    async def _grade(self, truncation: str | None) -> tuple[float, dict[str, Any]]:
        task = self._task
        assert task is not None
        assert self._scaffold is not None
        await self._scaffold.close()
        begun = time.monotonic()
        try:
            async with asyncio.timeout(task.verifier_s + 2 * _GRACE_S):
                result = await self._test(task)
                reward, others = await self._read(result)
        except (SandboxFault, OSError, TimeoutError, TaskError) as error:
            raise self._fault("could not be graded", error) from error
        figures: dict[str, Any] = {"nudges": self._nudges, "tests_timed_out": result.timed_out}
        figures |= {f"reward_{name}": value for name, value in others.items()}
        figures |= {"correct": reward >= self._range[1], "grading_s": time.monotonic() - begun}
        return reward, figures

    async def _test(self, task: HarborTask) -> RunResult:
        """Bring the tests in and run them; nothing of the policy's runs any more."""
        sandbox = self._sandbox
        assert sandbox is not None
        limits = Limits(wall_clock_s=_GRACE_S, output_bytes=4096)
        # By root: what the policy put in their place goes, whoever it belongs to.
        cleared = await sandbox.run(["sh", "-c", _PREPARE], user="0", cwd="/", limits=limits)
        if cleared.exit_code != 0:
            raise SandboxFault(f"/tests and {VERIFIER} could not be cleared: {cleared.stderr.strip()[-300:]}")
        await sandbox.put_archive("/", await asyncio.to_thread(archive, task.tests, "tests"))
        return await sandbox.run(
            ["sh", "-c", _TEST, "sh", self._workdir],
            user=task.verifier_user or None,
            cwd="/",
            env=resolved(task.verifier_env, f"{task.name}: verifier.env"),
            limits=Limits(wall_clock_s=task.verifier_s, output_bytes=4096),
        )

    async def _read(self, result: RunResult) -> tuple[float, dict[str, float]]:
        text, names = await self._file("reward.txt"), await self._file("reward.json")
        if text is None and names is None and result.timed_out:
            return self._range[0], {}  # a program of the policy's that never ends is the policy's
        least, most = self._range
        try:
            return read_reward(text, names, key=self._reward_key, least=least, most=most)
        except EnvironmentFault as fault:
            last = (await self._file("test-stdout.txt") or b"")[-300:].decode("utf-8", "replace").strip()
            assert self._task is not None
            raise EnvironmentFault(
                f"{self._task.name}: {fault}; tests/test.sh ended with {result.exit_code}, its last words: {last}"
            ) from fault

    async def _file(self, name: str) -> bytes | None:
        assert self._sandbox is not None
        try:
            return await self._sandbox.get(f"{VERIFIER}/{name}")
        except FileNotFoundError:
            return None

    async def _release(self) -> None:
        sandbox, self._sandbox, self._scaffold = self._sandbox, None, None
        if sandbox is not None:
            await sandbox.close()

    def _pool(self, task: HarborTask) -> TaskContainers:
        longest = (task.agent_s or self._wall_clock_s or _DAY_S) + task.verifier_s + 3600.0
        settings = DockerSettings(
            memory_bytes=(task.memory_mb or self._memory_mb) * 2**20,
            cpus=task.cpus or self._cpus,
            network=self._network if task.network else "none",
            runtime=self._runtime,
            user=task.agent_user,
            # Not the image's own folder: an agent that removes it would stop every command.
            workdir="/",
            ttl_s=longest,
            environment=resolved(task.env, f"{task.name}: environment.env"),
        )
        key = repr(settings)
        if key not in self._pools:
            self._pools[key] = acquire(settings, self._hosts, self._slots, settings.network)
        return self._pools[key]

    def _fault(self, what: str, error: BaseException) -> EnvironmentFault:
        assert self._task is not None
        return EnvironmentFault(f"{self._task.name} {what}: {error or 'time limit'}")


def _range(given: Sequence[float]) -> tuple[float, float]:
    sound = not isinstance(given, str) and len(given) == 2 and all(isinstance(value, int | float) for value in given)
    if not sound or not given[0] < given[1]:
        raise ArgumentError(f"reward_range must be two numbers, the smaller one first, not {given!r}")
    return float(given[0]), float(given[1])
