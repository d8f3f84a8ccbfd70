"""What a scripted engineer writes for each repository: short calls, so that a tiny policy can learn them.

Decides only; `traces` carries it out. With an error rate above 0 a script also does what a weak policy does: it fixes
the wrong thing or half of it, hands in too early, or writes a call that no parser accepts and then tries again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass

TEST = "python3 -m pytest -q | tail -1"
SUBMIT = '<tool_call>{"name": "submit", "arguments": {}}</tool_call>'
MISTAKES = ("wrong", "early", "malformed", "untested")


@dataclass(frozen=True, slots=True)
class Script:
    """Commands for one repository. `look` finds the place, `see` shows the bug, `fix` mends it, `wrong` does not."""

    look: tuple[str, ...]
    see: str
    fix: tuple[str, ...]
    wrong: tuple[str, ...]


SCRIPTS: Mapping[str, Script] = {
    "durations": Script(
        look=("ls *", "grep -n UNIT durations/parse.py"),
        see="""python3 -c 'from durations import *; print(parse("250ms"))' 2>&1 | tail -1""",
        fix=("sed -i 's/join(UNITS)/join(sorted(UNITS, key=len, reverse=True))/' durations/parse.py",),
        wrong=("sed -i 's/join(UNITS)/join(sorted(UNITS))/' durations/parse.py",),
    ),
    "inikit": Script(
        look=("ls *", "grep -n split inikit/*.py"),
        see="""python3 -c 'from inikit import *; print(load("u = a#b ; c"))' 2>&1 | tail -1""",
        fix=("""sed -i 's/"\\[#;\\]"/" [#;]"/' inikit/lines.py""",),
        wrong=("""sed -i 's/"\\[#;\\]"/";"/' inikit/lines.py""",),
    ),
    "pacer": Script(
        look=("ls *", "grep -n attempts pacer/retrying.py"),
        see="""python3 -c 'from pacer import *; retry(attempts=1)(print)(1)' 2>&1 | tail -1""",
        fix=("sed -i 's/- 1, 0, -1/- 1, -1, -1/' pacer/retrying.py",),
        wrong=("sed -i 's/- 1, 0, -1/, -1, -1/' pacer/retrying.py",),
    ),
    "phrasebook": Script(
        look=("ls *", "grep -n Plural phrasebook/*/*.po"),
        see="""python3 -c 'from phrasebook import *; print(Phrasebook("de").files(0))' 2>&1 | tail -1""",
        fix=("sed -i 's/n > 1/n != 1/' phrasebook/de/messages.po", "python3 -m phrasebook.build"),
        wrong=("sed -i 's/n > 1/n != 1/' phrasebook/de/messages.po",),
    ),
    "tablet": Script(
        look=("ls * tablet/formats", "tail -6 tablet/formats/plain.py"),
        see="""python3 -c 'from tablet import *; print(render([["a"]], "markdown"))' 2>&1 | tail -1""",
        fix=(
            """cat > tablet/formats/markdown.py <<'E'
def lines(header, rows):
    for row in [header, ["---"] * len(header), *rows]:
        yield "| " + " | ".join(c.replace("|", "\\\\|") for c in row) + " |"
E""",
        ),
        wrong=(
            """cat > tablet/formats/markdown.py <<'E'
def lines(header, rows):
    for row in [header, *rows]:
        yield "| " + " | ".join(row) + " |"
E""",
        ),
    ),
}


def call(command: str) -> str:
    """An action that calls `bash`, in the form that `envs.tool_calls` reads."""
    arguments = {"name": "bash", "arguments": {"command": command}}
    return f"<tool_call>{json.dumps(arguments, ensure_ascii=False)}</tool_call>"


def malformed(command: str) -> str:
    """The same with a brace missing, so that no parser accepts it."""
    return call(command).replace("}}</tool_call>", "}</tool_call>")


def plan(name: str, rng: random.Random, error_rate: float = 0.0) -> list[str]:
    """The actions of one trace of repository `name`, at most one mistake of `MISTAKES` among them."""
    script = SCRIPTS[name]
    look = [command for command in script.look if rng.random() < 0.8] or [script.look[-1]]
    before = [*look, *([script.see] if rng.random() < 0.8 else [])]
    after = [*([script.see] if rng.random() < 0.5 else []), TEST]
    mistake = rng.choice(MISTAKES) if rng.random() < error_rate else ""
    if mistake == "early":
        return [*map(call, before[: rng.randint(1, len(before))]), SUBMIT]
    fix = script.wrong if mistake == "wrong" else script.fix
    actions = [call(command) for command in (*before, *fix, *(after if mistake != "untested" else []))]
    if mistake == "malformed":
        index = rng.randrange(len(actions))
        commands = [*before, *fix, *after]
        actions.insert(index, malformed(commands[index]))
    return [*actions, SUBMIT]
