"""`python -m envs.style_shift agreement`: how often a judge agrees with the labelled examples.

The 200 examples (`examples.jsonl`) are in two halves by a hash of their ids: the lexical judge's lists were tuned on
the first, and the second was held out. Both were written by the author of the lists, before them, so the halves are
alike; the 48 fresh texts (`examples_fresh.jsonl`) were written after the lists were final, and nothing was changed for
them: for the lexical judge theirs is the figure to believe. A judge that gives no verdict has faulted; that is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from envs.style_shift.judging.judge import Judge, JudgeFault, Verdict
from envs.style_shift.judging.llm import LLMJudge
from envs.style_shift.judging.spec import JudgeSpec, acquire_judge, llm_settings, release_judge
from envs.style_shift.schedule import NONE, STYLES

EXAMPLES = Path(__file__).with_name("examples.jsonl")
FRESH = Path(__file__).with_name("examples_fresh.jsonl")
EXAMPLE = """example:
  python -m envs.style_shift agreement
  JUDGE_API_KEY=... python -m envs.style_shift agreement --judge llm --url https://host/v1 --model glm-4.7
"""


class LabelledText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One example: `style` of the text (or "none") and `quality`, as a person labelled them."""

    id: str
    language: Literal["en", "zh"]
    style: str
    quality: Literal[0, 1]
    prompt: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether it was kept back while the lexical judge was tuned; by id, so that it never changes sides."""
        return hashlib.sha256(self.id.encode()).digest()[0] % 2 == 1


@dataclass(frozen=True)
class Agreement:
    """What a judge made of `texts`; `verdicts[i]` is None where it faulted."""

    texts: Sequence[LabelledText]
    verdicts: Sequence[Verdict | None]

    @property
    def judged(self) -> list[tuple[LabelledText, Verdict]]:
        """The texts with a verdict."""
        return [(text, v) for text, v in zip(self.texts, self.verdicts, strict=True) if v is not None]

    @property
    def faults(self) -> int:
        """How many texts have no verdict."""
        return sum(verdict is None for verdict in self.verdicts)

    def style(self) -> tuple[float, float]:
        """Accuracy and Cohen's kappa of the style."""
        return _agree([(text.style, verdict.style) for text, verdict in self.judged])

    def quality(self) -> tuple[float, float]:
        """Accuracy and Cohen's kappa of the quality."""
        return _agree([(text.quality, verdict.quality) for text, verdict in self.judged])

    def confusion(self) -> Counter[tuple[str, str]]:
        """How often each (labelled, judged) pair of styles came up."""
        return Counter((text.style, verdict.style) for text, verdict in self.judged)

    def part(self, held_out: bool) -> Agreement:
        """The same, of one half."""
        return self._only(lambda text: text.held_out == held_out)

    def of_language(self, language: str) -> Agreement:
        """The same, of the texts in one language."""
        return self._only(lambda text: text.language == language)

    def _only(self, keep: Callable[[LabelledText], bool]) -> Agreement:
        kept = [pair for pair in zip(self.texts, self.verdicts, strict=True) if keep(pair[0])]
        return Agreement([text for text, _ in kept], [verdict for _, verdict in kept])


def load_examples(path: Path = EXAMPLES) -> list[LabelledText]:
    """Read labelled texts, one JSON object a line. Raises `ValueError` that names the line."""
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            text = msgspec.json.decode(line, type=LabelledText)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if text.style not in (*STYLES, NONE):
            raise ValueError(f"{path}, line {number}: style must be one of {', '.join(STYLES)}, {NONE}")
        texts.append(text)
    return texts


async def measure(judge: Judge, texts: Sequence[LabelledText], progress: Progress | None = None) -> Agreement:
    """Ask `judge` about every text. The style it is told is preferred is not the label: it must not matter."""
    task = None if progress is None else progress.add_task("judging", total=len(texts))

    async def one(index: int, text: LabelledText) -> Verdict | None:
        try:
            return await judge.judge(text.prompt, text.text, STYLES[index % len(STYLES)])
        except JudgeFault:
            return None
        finally:
            if progress is not None and task is not None:
                progress.advance(task)

    return Agreement(texts, await asyncio.gather(*(one(i, text) for i, text in enumerate(texts))))


async def require_agreement(judge: Judge, minimum: float = 0.8, texts: Sequence[LabelledText] | None = None) -> None:
    """Refuse a judge that lies: `JudgeFault` unless style and quality agree with the examples at least `minimum`.

    No single verdict shows that a judge is wrong; a run that depends on one asks this first.
    """
    agreement = await measure(judge, load_examples() if texts is None else texts)
    if not agreement.judged:
        raise JudgeFault("the judge gave no verdict on any labelled example")
    style, quality = agreement.style()[0], agreement.quality()[0]
    if min(style, quality) < minimum or agreement.faults > (1 - minimum) * len(agreement.texts):
        raise JudgeFault(
            f"the judge agrees with the labelled examples on {style:.0%} of styles and {quality:.0%} of qualities, "
            f"with {agreement.faults} faults; {minimum:.0%} is asked for"
        )


def _agree(pairs: Sequence[tuple[Hashable, Hashable]]) -> tuple[float, float]:
    if not pairs:
        return float("nan"), float("nan")
    total = len(pairs)
    observed = sum(a == b for a, b in pairs) / total
    left, right = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    chance = sum(left[key] * right[key] for key in left) / total**2
    return observed, 1.0 if chance == 1.0 else (observed - chance) / (1.0 - chance)


def add_parser(subparsers: Any) -> None:
    """Register the command's arguments."""
    parser = subparsers.add_parser(
        "agreement",
        help="how often a judge agrees with the labelled examples",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--judge", choices=("lexical", "llm"), default="lexical", help="which judge (default lexical)")
    parser.add_argument("--url", help="of the LLM judge: an OpenAI-compatible base, ending in /v1")
    parser.add_argument("--model", help="of the LLM judge")
    parser.add_argument("--cache", help="of the LLM judge: an SQLite file for its verdicts")
    parser.add_argument("--examples", type=Path, metavar="FILE", help="other labelled texts instead, JSONL")
    parser.add_argument("--misses", action="store_true", help="print every text that was judged otherwise")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command. Exit status: 0, 1 if the judge faulted on a text, 2 for arguments that cannot be used."""
    spec: JudgeSpec = "lexical"
    if arguments.judge == "llm":
        given = {"url": arguments.url, "model": arguments.model, "cache": arguments.cache}
        spec = {"kind": "llm", **{key: value for key, value in given.items() if value is not None}}
    try:
        if arguments.judge == "llm" and not (arguments.url and arguments.model):
            raise ValueError("--judge llm needs --url and --model: where the judge answers, and its name there")
        llm_settings(spec)
        if arguments.examples is None:
            sets = {"tuned on, held out": load_examples(), "fresh": load_examples(FRESH)}
        else:
            sets = {arguments.examples.name: load_examples(arguments.examples)}
    except (OSError, ValueError) as error:
        print(f"agreement: {error}", file=sys.stderr)
        return 2
    return asyncio.run(_report(spec, sets, misses=arguments.misses))


async def _report(spec: JudgeSpec, sets: Mapping[str, Sequence[LabelledText]], *, misses: bool) -> int:
    console = Console()
    judge = acquire_judge(spec)
    try:
        with Progress(console=console, transient=True) as progress:
            by_set = {name: await measure(judge, texts, progress) for name, texts in sets.items()}
    finally:
        await release_judge(judge)
    parts: dict[str, Agreement] = {}
    for name, agreement in by_set.items():
        if ", " in name:
            parts |= {half: agreement.part(half == "held out") for half in name.split(", ")}
        else:
            parts[name] = agreement
    table = Table("texts", "n", "style", "kappa", "quality", "kappa", "faults")
    for name, part in parts.items():
        for label, piece in ((name, part), *((f"  {lang}", part.of_language(lang)) for lang in ("en", "zh"))):
            figures = [f"{figure:.3f}" for figure in (*piece.style(), *piece.quality())]
            table.add_row(label, str(len(piece.texts)), *figures, str(piece.faults))
    console.print(table)
    for name, part in parts.items():
        matrix, counts = Table("labelled \\ judged", *STYLES, NONE, title=name), part.confusion()
        for label in (*STYLES, NONE):
            matrix.add_row(label, *(str(counts[label, judged]) for judged in (*STYLES, NONE)))
        console.print(matrix)
    for text, verdict in (pair for agreement in by_set.values() for pair in agreement.judged if misses):
        if (text.style, text.quality) != (verdict.style, verdict.quality):
            got = {"judged": [verdict.style, verdict.quality], "why": verdict.reasoning}
            console.print_json(json.dumps(msgspec.to_builtins(text) | got, ensure_ascii=False))
    if isinstance(judge, LLMJudge):
        console.print(judge.costs)
    return int(any(agreement.faults for agreement in by_set.values()))
