"""`ResultsFolder`: what an evaluation leaves, and from where the next session goes on.

OUT/evaluation.json     what is evaluated; another evaluation in the same folder is refused by the option's name
   /samples.jsonl       one line a sample, appended when it ends; the later line of the same sample counts
   /summary.json        the figures, /report.html the same for people; made again at the end of each session
   /void.jsonl          samples of a first try that were all faults, before another evaluation took the folder
   /lock                held by the session that writes
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from agent.evaluate.config import EvaluationError, WrongArgument
from agent.evaluate.sample import Sample, SampleError, decode, encode

_READ_AT_ONCE = 1 << 20


class ResultsFolder:
    """The folder of one evaluation, held by one session.

        with ResultsFolder.opened(path, evaluation.identity()) as folder:
            done = folder.samples()
            folder.append(sample)           # on the disk when it returns

    A line that a killed session left half written is cut off; the samples before it stay.
    """

    def __init__(self, path: Path, lines: IO[bytes]) -> None:
        self.path, self._lines = path, lines

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path, identity: Mapping[str, Any]) -> Iterator[ResultsFolder]:
        """Hold the folder at `path`, made if need be, for an evaluation of this `identity`.

        Raises `WrongArgument` where it holds another evaluation or something else, or is held by another session.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = (path / "lock").open("ab")
        except OSError as error:
            raise WrongArgument(f"--out: cannot write into {path}: {error.strerror or error}") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise WrongArgument(
                    f"--out: another session writes into {path}; wait for it, or name another"
                ) from error
            _check_identity(path, identity)
            with (path / "samples.jsonl").open("a+b") as lines:
                _cut_half_a_line(lines)
                yield cls(path, lines)

    def samples(self) -> dict[tuple[str, int], Sample]:
        """Every sample by its key, of several the last. Raises `EvaluationError` for a line that is none."""
        self._lines.seek(0)
        found: dict[tuple[str, int], Sample] = {}
        for number, line in enumerate(self._lines, 1):
            try:
                sample = decode(line)
            except SampleError as error:
                raise EvaluationError(
                    f"{self.path / 'samples.jsonl'}, line {number}: {error}; move the file away, or take the line out"
                ) from error
            found[sample.key] = sample
        return found

    def append(self, sample: Sample) -> None:
        """Write one sample; it is on the disk when this returns. Blocks."""
        self._lines.seek(0, os.SEEK_END)
        self._lines.write(encode(sample))
        self._lines.flush()
        os.fsync(self._lines.fileno())

    def write(self, name: str, data: bytes) -> Path:
        """Write a file of the folder, whole or not at all."""
        return write_whole(self.path / name, data)


def write_whole(path: Path, data: bytes) -> Path:
    """Replace the file at `path` in one step."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _check_identity(path: Path, identity: Mapping[str, Any]) -> None:
    file, wanted = path / "evaluation.json", json.loads(json.dumps(identity, default=str))
    lines = path / "samples.jsonl"
    if lines.exists() and lines.stat().st_size:
        differing = _differing(file, wanted)
        if not differing:
            return
        if not _void(lines):
            raise WrongArgument(
                f"--out: {path} holds another evaluation: {differing}. Name another folder, or ask for the same"
            )
        lines.replace(path / "void.jsonl")
    # A first try that has kept no reward (a wrong address, no sandbox) ties nobody.
    write_whole(file, json.dumps(wanted, indent=1, ensure_ascii=False).encode("utf-8", "replace"))


def _differing(file: Path, wanted: Mapping[str, Any]) -> str:
    """In words, where the evaluation that `file` describes is not the wanted one; "" where it is."""
    try:
        held = json.loads(file.read_bytes())
        keys = [key for key in dict.fromkeys([*held, *wanted]) if held.get(key) != wanted.get(key)]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise WrongArgument(f"--out: {file} does not say of what the samples are ({error}); name another") from error
    return "; ".join(f"{key} is {_short(held.get(key))} there, {_short(wanted.get(key))} now" for key in keys)


def _void(lines: Path) -> bool:
    """Whether no sample has a reward. A line that is no sample is somebody's, and left alone."""
    with lines.open("rb") as file, contextlib.suppress(SampleError):
        return all(decode(line).reward is None for line in file)
    return False


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _cut_half_a_line(lines: IO[bytes]) -> None:
    """Drop what stands behind the last line end."""
    end = lines.seek(0, os.SEEK_END)
    position = end
    while position > 0:
        start = max(0, position - _READ_AT_ONCE)
        lines.seek(start)
        found = lines.read(position - start).rfind(b"\n")
        if found >= 0:
            position = start + found + 1
            break
        position = start
    if position < end:
        lines.truncate(position)
