"""Scripted traces of Python-TIR, for a policy's cold start: problems solved one operation a tool call.

The script decides what to write; a real interpreter computes every output. With an error rate above 0 the script
also does what a weak policy does: it stops early, takes a wrong operator, forgets an operand, or writes a
malformed call and tries again or gives up.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from envs.core import AsyncEnv, Message
from sandboxes.pool import PythonPool

_EXPRESSION = re.compile(r"-?\d+(?: [+*-] \d+)+")
_NUMBERS = re.compile(r"\d+(?:, \d+)+")


class UnknownProblem(ValueError):
    """The script only solves chains of +, -, * and least common multiples."""


@dataclass(frozen=True)
class Chain:
    """`operands` folded left to right by `operators` (one fewer): "+", "-", "*" or "lcm"."""

    operands: tuple[str, ...]
    operators: tuple[str, ...]


def parse_chain(problem: str) -> Chain:
    """Read the operands and operators out of a problem's text; raises `UnknownProblem`."""
    if "LCM" in problem and (match := _NUMBERS.search(problem)):
        numbers = tuple(match.group().split(", "))
        return Chain(numbers, ("lcm",) * (len(numbers) - 1))
    if match := _EXPRESSION.search(problem):
        words = match.group().split()
        return Chain(tuple(words[0::2]), tuple(words[1::2]))
    raise UnknownProblem(f"the script cannot solve {problem!r}")


def operation(left: str, operator: str, right: str) -> str:
    """One binary operation as Python code."""
    return f"import math\nmath.lcm({left},{right})" if operator == "lcm" else f"{left}{operator}{right}"


def tool_call(code: str) -> str:
    """An action that calls the Python tool, in the form that `envs.tool_calls` reads."""
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


@dataclass
class Solver:
    """Writes the actions of one trace; fed with each observation, it says what comes next.

    `next_action(observation)` returns the text of the next action. `done`: it was the last one. `malformed`: it was a
    call that no parser accepts.
    """

    chain: Chain
    rng: random.Random
    error_rate: float = 0.0
    done: bool = field(init=False, default=False)
    malformed: bool = field(init=False, default=False)
    _value: str = field(init=False)
    _index: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._value = self.chain.operands[0]

    def next_action(self, observation: str | None) -> str:
        if observation is not None and not self.malformed:
            self._value = observation.strip()
        retrying, self.malformed = self.malformed, False
        if retrying and self.rng.random() < 0.5:
            return self._answer()
        if self._index >= len(self.chain.operators):
            return self._answer()
        operator = self.chain.operators[self._index]
        if not retrying and self.rng.random() < self.error_rate:
            mistake = self.rng.choice(("stop", "operator", "malformed", "skip"))
            if mistake == "stop":
                return self._answer()
            if mistake == "malformed":
                self.malformed = True
                code = operation(self._value, operator, self.chain.operands[self._index + 1])
                return tool_call(code).replace('"}}', '"}', 1)
            if mistake == "operator":
                operator = self.rng.choice([o for o in ("+", "-", "*") if o != operator])
            elif self._index + 1 < len(self.chain.operators):
                self._index += 1
                operator = self.chain.operators[self._index]
        self._index += 1
        return tool_call(operation(self._value, operator, self.chain.operands[self._index]))

    def _answer(self) -> str:
        self.done = True
        return f"\\boxed{{{self._value}}}"


async def write_traces(
    env: AsyncEnv, task_ids: Sequence[str], *, seed: int, error_rate: float, sandbox: str = "auto"
) -> AsyncIterator[list[Message]]:
    """Yield the messages of one trace a task of `env`.

    Prompts are the environment's own, and so are its answers to malformed calls. Well-formed calls run in one real
    interpreter for all traces, because the script keeps no state between calls.
    """
    rng = random.Random(seed)
    async with PythonPool(backend=sandbox, spares=1) as pool:
        session = await pool.session()
        try:
            for task_id in task_ids:
                _, info = await env.areset(options={"task_id": task_id})
                messages: list[Message] = list(info["messages"])
                solver = Solver(parse_chain(messages[-1]["content"]), random.Random(rng.getrandbits(64)), error_rate)
                observation: str | None = None
                while True:
                    action = solver.next_action(observation)
                    messages.append({"role": "assistant", "content": action})
                    if solver.done:
                        break
                    if solver.malformed:
                        observation, *_ = await env.astep(action)
                    else:
                        call = json.loads(action.removeprefix("<tool_call>").removesuffix("</tool_call>"))
                        observation = (await session.run(call["arguments"]["code"])).output
                    messages.append({"role": "tool", "content": observation})
                yield messages
        finally:
            await session.close()
