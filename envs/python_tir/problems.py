"""Where math problems come from: given inline, generated, a file, a public data set, or several of these in a mix.

A source is described by plain data (it stands in recipes), and becomes a `ProblemSet`:

    [{"problem": "What is 6 * 7?", "answer": "42"}, ...]                          inline
    "aime25"  or  {"source": "preset", "name": "aime25"}                          a public set by name
    {"source": "reasoning_gym", "size": 1000, "seed": 0, "families": {"chain_sum": {"min_terms": 3}, ...}}
    {"source": "tiny_fold", "size": 20000, "seed": 0, "exclude": {...}}           the tiny recipe's own mixture
    {"source": "huggingface", "dataset": "org/name", "split": "test", "problem": "question", "answer": "answer"}
    {"source": "file", "path": "problems.jsonl", "problem": "problem", "answer": "answer"}
    [{"source": ..., "weight": 3}, {"source": ..., "weight": 1}]                  a weighted mix

Loading happens at the first use, once a process for each description.
"""

from __future__ import annotations

import bisect
import csv
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Spec = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]


class ProblemSourceError(ValueError):
    """A problem source that cannot be used as it is described; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One question and its gold answer. `family` is what results are reported by (a task family, a set's name)."""

    task_id: str
    question: str
    answer: str
    family: str


class ProblemSet(Protocol):
    """A fixed, ordered, possibly lazily made list of problems."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Problem: ...

    def task_id(self, index: int) -> str:
        """The id of problem `index`, without making the problem."""
        ...

    def index(self, task_id: str) -> int:
        """The place of `task_id`; raises `KeyError` if it is not of this set."""
        ...


class Listed:
    """Problems held in a list; ids are `<label>/<index>`."""

    def __init__(self, label: str, rows: Sequence[tuple[str, str]]) -> None:
        if not rows:
            raise ProblemSourceError(f"the problem source {label!r} is empty: it needs at least one problem")
        self._label, self._rows = label, rows

    def __len__(self) -> int:
        return len(self._rows)

    def task_id(self, index: int) -> str:
        return f"{self._label}/{range(len(self))[index]}"

    def __getitem__(self, index: int) -> Problem:
        question, answer = self._rows[index]
        return Problem(self.task_id(index), question, answer, self._label)

    def index(self, task_id: str) -> int:
        label, _, number = task_id.rpartition("/")
        if label != self._label or not number.isdecimal() or int(number) >= len(self):
            raise KeyError(task_id)
        return int(number)


class Mixed:
    """Several sets as one, each taking a share of the list in proportion to its weight.

    Every problem is there at least once; the sets that are small for their weight come round again, under ids with
    `~1`, `~2`, ... appended. Without weights it is a plain concatenation.
    """

    MAX_LENGTH = 10_000_000

    def __init__(self, sets: Sequence[ProblemSet], weights: Sequence[float] | None) -> None:
        self._sets = sets
        if weights is None:
            shares = [len(s) for s in sets]
        else:
            if not all(weight > 0 for weight in weights):
                raise ProblemSourceError(f"weights of problem sources must be positive, got {list(weights)}")
            scale = max(len(s) / weight for s, weight in zip(sets, weights, strict=True))
            shares = [max(len(s), round(scale * weight)) for s, weight in zip(sets, weights, strict=True)]
        self._ends = [sum(shares[: i + 1]) for i in range(len(shares))]
        if self._ends[-1] > self.MAX_LENGTH:
            raise ProblemSourceError(
                f"the weights {list(weights or [])} would repeat the small sources up to {self._ends[-1]} problems; "
                "make the weights less unequal"
            )

    def __len__(self) -> int:
        return self._ends[-1]

    def _locate(self, index: int) -> tuple[ProblemSet, int, int]:
        index = range(len(self))[index]
        which = bisect.bisect_right(self._ends, index)
        local = index - (self._ends[which - 1] if which else 0)
        again, local = divmod(local, len(self._sets[which]))
        return self._sets[which], local, again

    def task_id(self, index: int) -> str:
        source, local, again = self._locate(index)
        return source.task_id(local) + (f"~{again}" if again else "")

    def __getitem__(self, index: int) -> Problem:
        source, local, _ = self._locate(index)
        problem = source[local]
        return Problem(self.task_id(index), problem.question, problem.answer, problem.family)

    def index(self, task_id: str) -> int:
        base, _, again = task_id.partition("~")
        for which, source in enumerate(self._sets):
            try:
                local = source.index(base)
            except KeyError:
                continue
            start = self._ends[which - 1] if which else 0
            found = start + local + (int(again) if again.isdecimal() else 0) * len(source)
            if found < self._ends[which] and self.task_id(found) == task_id:
                return found
        raise KeyError(task_id)


class TaskIds(Sequence[str]):
    """The ids of a problem set as a sequence, made as they are asked for."""

    def __init__(self, problems: ProblemSet) -> None:
        self._problems = problems

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._problems.task_id(i) for i in range(len(self))[index]]
        return self._problems.task_id(range(len(self))[index])

    def __iter__(self) -> Iterator[str]:
        return (self._problems.task_id(i) for i in range(len(self)))


@dataclass(frozen=True, slots=True)
class Preset:
    """A public set on the Hugging Face hub, and which of its columns hold what. `extract`: see `extract_answer`."""

    dataset: str
    problem: str
    answer: str
    split: str = "test"
    config: str | None = None
    extract: str | None = None


PRESETS: Mapping[str, Preset] = {
    "aime24": Preset("HuggingFaceH4/aime_2024", "problem", "answer", split="train"),
    "aime25": Preset("math-ai/aime25", "problem", "answer"),
    "hmmt25_nov": Preset("MathArena/hmmt_nov_2025", "problem", "answer", split="train"),
    "beyond_aime": Preset("ByteDance-Seed/BeyondAIME", "problem", "answer"),
    "imo_answerbench": Preset("Hwilner/imo-answerbench", "Problem", "Short Answer", split="train"),
    "math500": Preset("HuggingFaceH4/MATH-500", "problem", "answer"),
    "gsm8k": Preset("openai/gsm8k", "question", "answer", config="main", extract="gsm8k"),
}
"""Public sets by name. A set that moves on the hub can always be named in full with `source: huggingface`."""

EXTRACTORS: Mapping[str, str] = {"gsm8k": r"####\s*(.+?)\s*$"}
"""Named patterns that find the answer in a column that holds more than the answer (group 1)."""


def extract_answer(text: str, pattern: str | None) -> str:
    """The answer in `text`: all of it without `pattern`, else group 1 of the last match (a name or a regex)."""
    if pattern is None:
        return text.strip()
    matches = re.findall(EXTRACTORS.get(pattern, pattern), text, flags=re.MULTILINE)
    if not matches:
        raise ProblemSourceError(f"the answer pattern {pattern!r} finds nothing in {text[-80:]!r}")
    found = matches[-1]
    return (found if isinstance(found, str) else found[0]).strip()


def load_problems(spec: Spec) -> ProblemSet:
    """The problems that `spec` describes (see the module). Blocks while loading; the result is shared in the process.

    Raises `ProblemSourceError` for a description that is wrong, a file or column that is not there.
    """
    key = json.dumps(spec, sort_keys=True, default=str)
    with _lock:
        found = _loaded.get(key)
        if found is None:
            found = _loaded[key] = _load(spec)
    return found


def check_spec(spec: Spec) -> None:
    """Refuse, without loading anything, what cannot be a description of problems."""
    if isinstance(spec, str):
        if spec not in PRESETS:
            raise ProblemSourceError(f"no problem set is called {spec!r}; presets: {', '.join(PRESETS)}")
    elif isinstance(spec, Mapping):
        if spec.get("source") not in _SOURCES:
            raise ProblemSourceError(f"unknown problem source {spec.get('source')!r}; known: {', '.join(_SOURCES)}")
    elif not isinstance(spec, Sequence) or not all(isinstance(entry, str | Mapping) for entry in spec):
        raise ProblemSourceError(f"problems must be a list, a source or a preset's name, not {type(spec).__name__}")
    elif not spec:
        raise ProblemSourceError("the list of problems is empty: it needs at least one")
    else:
        for entry in spec:
            if isinstance(entry, str) or "source" in entry:
                check_spec(entry)


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


def _take(options: dict[str, Any], where: str, **defaults: Any) -> dict[str, Any]:
    """`options` over `defaults`; an unknown key, or one without a value (default `...`), is an error."""
    unknown = [key for key in options if key not in defaults]
    if unknown:
        raise ProblemSourceError(f"{where}: unknown key {unknown[0]!r}; it takes {', '.join(defaults)}")
    merged = {**defaults, **options}
    missing = [key for key, value in merged.items() if value is ...]
    if missing:
        raise ProblemSourceError(f"{where}: the key {missing[0]!r} is missing")
    return merged


def _inline(rows: Sequence[Mapping[str, Any]]) -> ProblemSet:
    for index, row in enumerate(rows):
        absent = [key for key in ("problem", "answer") if key not in row]
        if absent:
            present = ", ".join(map(str, row)) or "nothing"
            raise ProblemSourceError(f"problem {index} of the inline list has no {absent[0]!r}; it has {present}")
    return Listed("inline", [(str(row["problem"]), str(row["answer"])) for row in rows])


def _columns(
    label: str, where: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str], options: Mapping[str, Any]
) -> ProblemSet:
    """Pick the two columns out of `rows`; names the columns that exist when one does not."""
    for key in ("problem", "answer"):
        if options[key] not in columns:
            raise ProblemSourceError(
                f"{where} has no column {options[key]!r} (wanted for the {key}). It has: {', '.join(columns)}. "
                f"Set `{key}` of this problem source to one of them."
            )
    question, answer, pattern = options["problem"], options["answer"], options["extract"]
    return Listed(label, [(str(row[question]).strip(), extract_answer(str(row[answer]), pattern)) for row in rows])


def _file(options: dict[str, Any]) -> ProblemSet:
    taken = _take(options, "source file", path=..., problem="problem", answer="answer", extract=None)
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
    taken = _take(
        options,
        "source huggingface",
        dataset=...,
        config=None,
        split="test",
        revision=None,
        problem="problem",
        answer="answer",
        extract=None,
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
    name = _take(options, "source preset", name=...)["name"]
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
        },
        label=name,
    )


def _reasoning_gym(options: dict[str, Any]) -> ProblemSet:
    from envs.python_tir.generated import ReasoningGym

    taken = _take(options, "source reasoning_gym", families=..., size=1000, seed=0, exclude=None, question=None)
    return ReasoningGym(
        taken["families"],
        size=int(taken["size"]),
        seed=int(taken["seed"]),
        exclude=load_problems(taken["exclude"]) if taken["exclude"] is not None else None,
        question=taken["question"],
    )


def _tiny_fold(options: dict[str, Any]) -> ProblemSet:
    from envs.python_tir.generated import tiny_fold_families

    return _reasoning_gym({"families": tiny_fold_families(), **options})


_SOURCES: Mapping[str, Any] = {
    "reasoning_gym": _reasoning_gym,
    "tiny_fold": _tiny_fold,
    "huggingface": _huggingface,
    "file": _file,
    "preset": _preset,
}


def shared_questions(first: ProblemSet, second: ProblemSet) -> set[str]:
    """The question texts that both sets hold: empty for sets that are truly held out from each other."""
    return {first[i].question for i in range(len(first))} & {second[i].question for i in range(len(second))}
