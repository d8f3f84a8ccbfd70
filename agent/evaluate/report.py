"""The report: one HTML file for people. All that a model, a tool or a task says is text in it, never markup.

It names no other address and runs no script; its policy forbids both, should something ever get past the escaping.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from agent.evaluate.figures import Estimate, Summary, passed
from agent.evaluate.sample import Said, Sample
from envs.tool_calls import FORMS, FamilyFormat

MOST_CHARACTERS = 20_000
"""Of one message; a longer one is shown by its beginning and its end."""
MOST_TRANSCRIPTS = 16_000_000
"""Characters of all transcripts together: what a browser still opens with ease."""

_THINKING = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)
_CONTROLS = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127))  # what HTML has no way to hold


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a message: "said", "thinking" or "call"; the last two are folded."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Shown:
    """One message as the page shows it."""

    role: str
    note: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Transcript:
    """One sample as the page shows it; `messages` is None where there was no room for them."""

    sample: Sample
    passed: bool
    messages: tuple[Shown, ...] | None


def page(
    summary: Summary,
    samples: Sequence[Sample],
    *,
    title: str,
    described: Mapping[str, Any],
    tool_format: FamilyFormat,
    passes_at: float | None,
) -> bytes:
    """The report as UTF-8. `described`: what was evaluated, by the option's name; `samples`: those of the summary.

    Transcripts beyond `MOST_TRANSCRIPTS` are left out, and the page says how many; `samples.jsonl` has all.
    """
    room = MOST_TRANSCRIPTS
    by_task: dict[str, list[Transcript]] = {task.task_id: [] for task in summary.by_task}
    left_out = 0
    # First samples first: where there is no room for all, each task shows one before any shows two.
    for sample in sorted(samples, key=lambda one: one.number):
        length = sum(min(len(s.text), MOST_CHARACTERS) + len(s.reasoning) for s in sample.transcript)
        fits = length <= room
        room -= length if fits else 0
        left_out += not fits
        shown = tuple(_shown(said, tool_format) for said in sample.transcript) if fits else None
        if sample.task_id in by_task:
            by_task[sample.task_id].append(Transcript(sample, passed(sample, passes_at), shown))
    text = _template().render(
        title=title,
        summary=summary,
        described={key: _value(value) for key, value in described.items()},
        tasks=[(task, by_task[task.task_id]) for task in summary.by_task],
        left_out=left_out,
        interval=interval,
    )
    return text.translate(_CONTROLS).encode("utf-8", "replace")


def pieces(text: str, tool_format: FamilyFormat) -> Iterator[Piece]:
    """A text of the policy in its parts: thinking and calls stand apart from what is said. Never raises; together
    they are the text."""
    reading = FORMS[tool_format].reading(text, {})
    position = 0
    for span in reading.spans:
        yield from _thoughts(text[position : span.start])
        yield Piece("call", text[span.start : span.end])
        position = span.end
    yield from _thoughts(text[position:])


def interval(estimate: Estimate | None, form: str = "{:.3f}") -> str:
    """ "0.412 [0.350, 0.480]", for people."""
    if estimate is None:
        return "none yet"
    if estimate.low is None or estimate.high is None:
        return form.format(estimate.mean)
    return f"{form} [{form}, {form}]".format(estimate.mean, estimate.low, estimate.high)


def _thoughts(text: str) -> Iterator[Piece]:
    position = 0
    # The prompt may have opened the thinking: what stands before a lone closing tag is thought.
    closing, opening = text.find("</think>"), text.find("<think>")
    if closing >= 0 and (opening < 0 or closing < opening):
        position = closing + len("</think>")
        yield Piece("thinking", text[:position])
    for thought in _THINKING.finditer(text, position):
        if text[position : thought.start()].strip():
            yield Piece("said", text[position : thought.start()])
        yield Piece("thinking", thought[0])
        position = thought.end()
    if text[position:].strip():
        yield Piece("said", text[position:])


def _shown(said: Said, tool_format: FamilyFormat) -> Shown:
    own = said.role == "assistant"
    parts: list[Piece] = []
    if said.reasoning:
        parts.append(Piece("thinking", _cut(said.reasoning)))
    text = _cut(said.text)
    parts += pieces(text, tool_format) if own else [Piece("said", text)]
    parts += [Piece("call", _cut(f"{name}\n{arguments}")) for name, arguments in said.calls]
    notes = [f"{said.tokens} tokens"] if said.tokens else []
    notes += [f"ended by {said.finish}"] if said.finish not in ("", "stop", "tool_calls") else []
    notes += [f"reward {said.reward:g}"] if said.reward else []
    return Shown(said.role, ", ".join(notes), tuple(parts))


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters not shown ...]\n{text[-half:]}"


def _value(value: Any) -> str:
    if value is None:
        return "not given"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 400 else f"{text[:400]}..."


@cache
def _template() -> Template:
    source = resources.files("agent.evaluate").joinpath("report.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source)
