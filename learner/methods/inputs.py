"""What a method wants of its inputs, and says where it is missing."""

from __future__ import annotations

from typing import TypeVar

from learner.methods.algorithm import Algorithm

_T = TypeVar("_T")


def given(algorithm: Algorithm, name: str, value: _T | None) -> _T:
    """`value`, or a `ValueError` that says what `algorithm` needs."""
    if value is None:
        raise missing(algorithm, name)
    return value


def missing(algorithm: Algorithm, name: str) -> ValueError:
    """The error of an input that is not there."""
    return ValueError(f"{algorithm.name} needs {name}")
