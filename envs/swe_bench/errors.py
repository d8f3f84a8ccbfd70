"""Errors of instances and of where they come from."""

from __future__ import annotations


class InstanceError(ValueError):
    """An instance, or a source of them, that cannot be used as it is; the message says what to change."""


class RowError(InstanceError):
    """A row that lacks a field or holds a wrong one."""

    def __init__(self, row: str, field: str, problem: str) -> None:
        super().__init__(f"row {row}: field {field!r} {problem}")
        self.row, self.field = row, field
