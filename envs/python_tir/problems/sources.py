"""Where math problems come from: given inline, generated, a file, a public data set, or several of these in a mix.

A source is described by plain data (it stands in recipes), and becomes a `ProblemSet`:

    [{"problem": "What is 6 * 7?", "answer": "42"}, ...]                          inline
    "aime25"  or  {"source": "preset", "name": "aime25"}                          a public set by name
    {"source": "reasoning_gym", "size": 1000, "seed": 0, "families": {"chain_sum": {"min_terms": 3}, ...}}
    {"source": "tiny_fold", "size": 20000, "seed": 0, "exclude": {...}}           the tiny recipe's own mixture
    {"source": "huggingface", "dataset": "org/name", "split": "test", "problem": "question", "answer": "answer"}
    {"source": "file", "path": "problems.jsonl", "problem": "problem", "answer": "answer"}
    [{"source": ..., "weight": 3}, {"source": ..., "weight": 1}]                  a weighted mix

Any source may say how its answers are graded: `answer_form`, `scorer`, `solved_at`, `partial` (see `Rules`).
Loading happens at the first use, once a process for each description.
"""

from __future__ import annotations

import csv
import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.python_tir.grading.rules import AnswerForm, Rules
from envs.python_tir.problems.generated import ReasoningGym, tiny_fold_families
from envs.python_tir.problems.sets import Listed, Mixed, ProblemSet, ProblemSourceError

Spec = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Preset:
    """A public set on the Hugging Face hub, and which of its columns hold what. `extract`: see `answer_in_column`.

    `revision` is a commit of the set: what is measured on a preset stays the same when the set changes.
    """

    dataset: str
    problem: str
    answer: str
    split: str = "test"
    config: str | None = None
    extract: str | None = None
    answer_form: AnswerForm = "expression"
    revision: str | None = None


PRESETS: Mapping[str, Preset] = {
    "aime24": Preset(
        "HuggingFaceH4/aime_2024",
        "problem",
        "answer",
        split="train",
        revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
    ),
    "aime25": Preset("math-ai/aime25", "problem", "answer", revision="563bb8404243c5f09de6ec262f2db674fe5bce9b"),
    "hmmt25_nov": Preset(
        "MathArena/hmmt_nov_2025",
        "problem",
        "answer",
        split="train",
        revision="118dbfb45c4c9467c672268ed55166642897aa46",
    ),
    "beyond_aime": Preset("ByteDance-Seed/BeyondAIME", "problem", "answer"),
    "imo_answerbench": Preset(
        "Hwilner/imo-answerbench",
        "Problem",
        "Short Answer",
        split="train",
        revision="0258becbd00fc07d34862bc8539e61c8742f0d14",
    ),
    "math500": Preset(
        "HuggingFaceH4/MATH-500", "problem", "answer", revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"
    ),
    "gsm8k": Preset(
        "openai/gsm8k",
        "question",
        "answer",
        config="main",
        extract="gsm8k",
        answer_form="number",
        revision="740312add88f781978c0658806c59bc2815b9866",
    ),
}
"""Public sets by name. A set that moves on the hub can always be named in full with `source: huggingface`."""

EXTRACTORS: Mapping[str, str] = {"gsm8k": r"####\s*(.+?)\s*$"}
"""Named patterns that find the answer in a column that holds more than the answer (group 1)."""


def answer_in_column(text: str, pattern: str | None) -> str:
    """The answer in a column's `text`: all of it, or group 1 of the last match of `pattern` (a name or a regex)."""
    if pattern is None:
        return text.strip()
    matches = re.findall(EXTRACTORS.get(pattern, pattern), text, flags=re.MULTILINE)
    if not matches:
        raise ProblemSourceError(f"the answer pattern {pattern!r} finds nothing in {text[-80:]!r}")
    last = matches[-1]
    return (last if isinstance(last, str) else last[0]).strip()


def load_problems(spec: Spec) -> ProblemSet:
    """The problems that `spec` describes (see the module). Blocks while loading; the result is shared in the process.

    Raises `ProblemSourceError` for a description that is wrong, a file or column that is not there.
    """
    key = json.dumps(spec, sort_keys=True, default=str)
    with _lock:
        problems = _loaded.get(key)
        if problems is None:
            problems = _loaded[key] = _load(spec)
    return problems


def check_spec(spec: Spec) -> None:
    """Refuse, without loading anything, what cannot be a description of problems."""
    if isinstance(spec, str):
        if spec not in PRESETS:
            raise ProblemSourceError(f"no problem set is called {spec!r}; presets: {', '.join(PRESETS)}")
    elif isinstance(spec, Mapping):
        if spec.get("source") not in _SOURCES:
            raise ProblemSourceError(f"unknown problem source {spec.get('source')!r}; known: {', '.join(_SOURCES)}")
        _rules(spec)
    elif not isinstance(spec, Sequence) or not all(isinstance(entry, str | Mapping) for entry in spec):
        raise ProblemSourceError(f"problems must be a list, a source or a preset's name, not {type(spec).__name__}")
    elif not spec:
        raise ProblemSourceError("the list of problems is empty: it needs at least one")
    else:
        for entry in spec:
            if isinstance(entry, str) or "source" in entry:
                check_spec(entry)


_RULES = ("answer_form", "scorer", "solved_at", "partial")


def _rules(options: Mapping[str, Any], **defaults: Any) -> Rules:
    """The rules that a source names (see `Rules`), its scorer's included."""
    named = {key: options[key] for key in _RULES if options.get(key) is not None}
    try:
        return Rules(**{**defaults, **named})
    except ValueError as error:
        raise ProblemSourceError(f"source {options.get('source', 'inline')}: {error}") from error


# Re-entrant: a mix loads its parts, and an `exclude` loads another set. A thread lock, since facades of one
# process may load from several threads.
_lock = threading.RLock()
_loaded: dict[str, ProblemSet] = {}


def _load(spec: Spec) -> ProblemSet:
    check_spec(spec)
    if isinstance(spec, str):
        return _preset({"name": spec})
    if isinstance(spec, Mapping):
        options = {key: value for key, value in spec.items() if key not in ("source", "weight")}
        return _SOURCES[spec["source"]](options)
    if not any(isinstance(entry, str) or "source" in entry for entry in spec):
        return _inline(spec)
    sets = [load_problems({k: v for k, v in e.items() if k != "weight"} if isinstance(e, Mapping) else e) for e in spec]
    weights = [float(entry.get("weight", 1.0)) if isinstance(entry, Mapping) else 1.0 for entry in spec]
    weighted = any(isinstance(entry, Mapping) and "weight" in entry for entry in spec)
    return Mixed(sets, weights if weighted else None)


def _with_defaults(options: dict[str, Any], source: str, **defaults: Any) -> dict[str, Any]:
    """`options` over `defaults`; an unknown key, or one without a value (default `...`), is an error."""
    unknown = [key for key in options if key not in defaults]
    if unknown:
        raise ProblemSourceError(f"{source}: unknown key {unknown[0]!r}; it takes {', '.join(defaults)}")
    merged = {**defaults, **options}
    missing = [key for key, value in merged.items() if value is ...]
    if missing:
        raise ProblemSourceError(f"{source}: the key {missing[0]!r} is missing")
    return merged


def _inline(rows: Sequence[Mapping[str, Any]]) -> ProblemSet:
    for index, row in enumerate(rows):
        absent = [key for key in ("problem", "answer") if key not in row]
        if absent:
            present = ", ".join(map(str, row)) or "nothing"
            raise ProblemSourceError(f"problem {index} of the inline list has no {absent[0]!r}; it has {present}")
    listed = [(str(row["problem"]), str(row["answer"])) for row in rows]
    rules = [_rules(row) for row in rows]
    if len(set(rules)) > 1:
        raise ProblemSourceError("the problems of an inline list share one answer_form and one scorer; use two lists")
    return Listed("inline", listed, rules[0])


def _columns(
    label: str, source: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str], options: Mapping[str, Any]
) -> ProblemSet:
    """Pick the two columns out of `rows`; names the columns that exist when one does not."""
    for key in ("problem", "answer"):
        if options[key] not in columns:
            raise ProblemSourceError(
                f"{source} has no column {options[key]!r} (wanted for the {key}). It has: {', '.join(columns)}. "
                f"Set `{key}` of this problem source to one of them."
            )
    question, answer, pattern = options["problem"], options["answer"], options["extract"]
    listed = [(str(row[question]).strip(), answer_in_column(str(row[answer]), pattern)) for row in rows]
    return Listed(label, listed, _rules(options))


def _file(options: dict[str, Any]) -> ProblemSet:
    taken = _with_defaults(
        options, "source file", path=..., problem="problem", answer="answer", extract=None, **dict.fromkeys(_RULES)
    )
    path = Path(taken["path"]).expanduser()
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            if path.suffix.lower() == ".csv":
                rows: list[Mapping[str, Any]] = list(csv.DictReader(stream))
            elif path.suffix.lower() in (".jsonl", ".ndjson"):
                rows = [json.loads(line) for line in stream if line.strip()]
            else:
                raise ProblemSourceError(f"{path}: a problem file ends in .jsonl or .csv")
    except OSError as error:
        raise ProblemSourceError(f"the problem file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, ProblemSourceError):
            raise
        raise ProblemSourceError(f"{path} is not {path.suffix[1:]}: {error}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ProblemSourceError(f"{path} holds no problems (one JSON object a line, or CSV with a header)")
    columns = [key for key in rows[0] if all(key in row for row in rows)]
    return _columns(path.stem, str(path), rows, columns, taken)


def _huggingface(options: dict[str, Any], label: str | None = None) -> ProblemSet:
    taken = _with_defaults(
        options,
        "source huggingface",
        dataset=...,
        config=None,
        split="test",
        revision=None,
        problem="problem",
        answer="answer",
        extract=None,
        **dict.fromkeys(_RULES),
    )
    name = str(taken["dataset"])
    try:
        import datasets
    except ImportError as error:
        raise ProblemSourceError(
            f"the data set {name} is loaded with the `datasets` package, which is not installed: "
            'pip install "sao-agents[datasets]"'
        ) from error
    try:
        table = datasets.load_dataset(name, taken["config"], split=taken["split"], revision=taken["revision"])
    except (OSError, ValueError, RuntimeError) as error:  # not found, no network, no such split or configuration
        raise ProblemSourceError(
            f"the data set {name} (configuration {taken['config']}, split {taken['split']}) could not be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
    rows: Sequence[Mapping[str, Any]] = table
    return _columns(label or name, f"the data set {name}", rows, list(table.column_names), taken)


def _preset(options: dict[str, Any]) -> ProblemSet:
    name = _with_defaults(options, "source preset", name=...)["name"]
    check_spec(name)
    preset = PRESETS[name]
    return _huggingface(
        {
            "dataset": preset.dataset,
            "config": preset.config,
            "split": preset.split,
            "problem": preset.problem,
            "answer": preset.answer,
            "extract": preset.extract,
            "answer_form": preset.answer_form,
            "revision": preset.revision,
        },
        label=name,
    )


def _reasoning_gym(options: dict[str, Any]) -> ProblemSet:
    taken = _with_defaults(
        options,
        "source reasoning_gym",
        families=...,
        size=1000,
        seed=0,
        exclude=None,
        question=None,
        **dict.fromkeys(_RULES),
    )
    return ReasoningGym(
        taken["families"],
        size=int(taken["size"]),
        seed=int(taken["seed"]),
        exclude=load_problems(taken["exclude"]) if taken["exclude"] is not None else None,
        question=taken["question"],
        rules=_rules(taken),
        typed=taken["answer_form"] is not None,
    )


def _tiny_fold(options: dict[str, Any]) -> ProblemSet:
    return _reasoning_gym({"families": tiny_fold_families(), "answer_form": "number", **options})


_SOURCES: Mapping[str, Any] = {
    "reasoning_gym": _reasoning_gym,
    "tiny_fold": _tiny_fold,
    "huggingface": _huggingface,
    "file": _file,
    "preset": _preset,
}
