"""A small taskset for verifiers: double a number, with a tool that adds. Used by `recipes/suites/verifiers.yaml`."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["DoublingTaskset"]


class DoublingData(vf.TaskData):
    """`number`: what is doubled."""

    number: int = 0


class AddingConfig(vf.SharedToolsetConfig):
    """The library's own keys."""


class Adding(vf.Toolset[AddingConfig, vf.State]):
    """One tool."""

    TOOL_PREFIX = None

    @vf.tool
    def add(self, first: int, second: int) -> str:
        """The sum of two whole numbers."""
        return str(first + second)


class DoublingTask(vf.Task[DoublingData, vf.State, vf.TaskConfig]):
    """Right is worth 1; half of that where the right number is in a longer text."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        said, wanted = trace.last_reply, str(2 * trace.task.data.number)
        return 1.0 if said == wanted else 0.5 if wanted in said.split() else 0.0

    @vf.metric
    async def used_the_tool(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages) > 0)


class DoublingConfig(vf.TasksetConfig):
    """`largest`: the largest number."""

    largest: int = 9


class DoublingTaskset(vf.Taskset[DoublingTask, DoublingConfig]):
    """One task for each number. All share one server of the tool: one for each would start a process an episode."""

    @classmethod
    def toolsets(cls, config: DoublingConfig) -> list[vf.Toolset]:
        return [Adding(AddingConfig())]

    def load(self) -> Iterator[DoublingTask]:
        for number in range(1, self.config.largest + 1):
            prompt = f"Double {number}. Answer with the number alone."
            yield DoublingTask(DoublingData(prompt=prompt, number=number), self.config.task)


if __name__ == "__main__":  # how the library starts the tool's server
    Adding.run()
