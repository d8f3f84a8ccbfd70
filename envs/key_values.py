"""`key=value` words of a command line: values as YAML, keys as they are, or as dotted paths into sections.

The one reader of them for every command: recipes' overrides, environments' arguments, the store's keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

_EXPONENT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")


class WrongWord(ValueError):
    """A word that cannot be read or applied; the message shows it, and how to write one."""


def key_value(word: str, form: str = "key=value") -> tuple[str, Any]:
    """The key and the value of a word. `form`: how to write one, for the message. Raises `WrongWord`."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise WrongWord(f"cannot read {word!r}: write {form}")
    # YAML 1.1 reads 2e-6 as a string, people don't.
    if _EXPONENT.fullmatch(text):
        return key, float(text)
    try:
        return key, yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise WrongWord(f"cannot read the value of {key}: {text!r} is not valid YAML") from error


def key_values(words: Iterable[str], form: str = "key=value") -> dict[str, Any]:
    """The words as a mapping; of two with one key the last counts. Raises `WrongWord`."""
    return dict(key_value(word, form) for word in words)


def override(data: dict[str, Any], words: Iterable[str], form: str = "section.key=value") -> None:
    """Set `section.key` of `data` for every word; sections that are not there, or empty, are made.

    Raises `WrongWord`, also for a path that leads through a value.
    """
    for word in words:
        path, value = key_value(word, form)
        *parents, last = path.split(".")
        section = data
        for parent in parents:
            if section.get(parent) is None:
                section[parent] = {}
            section = section[parent]
            if not isinstance(section, dict):
                raise WrongWord(f"cannot set {path}: {parent} is a value, not a section")
        section[last] = value
