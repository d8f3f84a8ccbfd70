"""What a run of the reference patch leaves for grading: the tests that do not plainly pass there either.

`python -m envs.swe_bench validate ROWS --reference FILE` writes one JSON line a row, and
`gymnasium.make("sao/SWEBench-v0", instances=ROWS, reference=FILE)` grades by it. A test that is skipped, or that xfails
without a mark, counts only where it did so in that run; without a record, it counts nowhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from envs.swe_bench.instance import Instance, InstanceError


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one row. `row` is a digest of what the run depends on, so that a changed row is seen."""

    instance_id: str
    row: str
    skipped: tuple[str, ...] = ()
    xfailed: tuple[str, ...] = ()


def row_digest(instance: Instance) -> str:
    """A digest of the row's fields that decide how its reference run ends."""
    parts = (
        instance.base_commit, instance.patch, instance.test_patch, instance.eval_script, instance.test_command,
        instance.log_parser, *instance.fail_to_pass, *instance.pass_to_pass,
    )  # fmt: skip
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def reference_of(instance: Instance, statuses: Mapping[str, str]) -> Reference:
    """The record of a run whose tests ended with `statuses`."""

    def tests(outcome: str) -> tuple[str, ...]:
        return tuple(sorted(test for test, told in statuses.items() if told == outcome))

    return Reference(
        instance_id=instance.instance_id,
        row=row_digest(instance),
        skipped=tests("SKIPPED"),
        xfailed=tests("XFAIL_IN_CODE"),
    )


def write_references(path: Path, references: Iterable[Reference]) -> None:
    """One JSON line a record."""
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in references))


class References:
    """The records of a file by instance. Raises `InstanceError` for a file that cannot be read."""

    def __init__(self, path: str | Path | None) -> None:
        self._path = path
        self._records: dict[str, Reference] = {}
        if path is None:
            return
        try:
            lines = Path(path).read_bytes().split(b"\n")
        except OSError as error:
            raise InstanceError(f"the reference runs at {str(path)!r} cannot be read: {error.strerror}") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = msgspec.json.decode(line, type=Reference)
            except msgspec.MsgspecError as error:
                raise InstanceError(f"{path}, line {number}: no record of a reference run: {error}") from error
            self._records[record.instance_id] = record

    def of(self, instance: Instance) -> Reference | None:
        """The record of `instance`, None without one; raises `InstanceError` where the row has changed since."""
        record = self._records.get(instance.instance_id)
        if record is not None and record.row != row_digest(instance):
            raise InstanceError(
                f"{instance.instance_id}: the row is not the one whose reference run {str(self._path)!r} holds: "
                "validate it again with --reference"
            )
        return record
