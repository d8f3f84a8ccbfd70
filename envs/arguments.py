"""What an environment is given, checked at the door: a wrong argument is refused by its name before anything starts.

    @checked_arguments
    def __init__(self, *, max_turns: Count = 50, sandbox: Annotated[str, OneOf("auto", "bubblewrap")] = "auto") -> None:

The annotations are the rules: a parameter's type holds strictly (`"3"` is no number, `True` neither), and what is in
`Annotated` with it as pydantic reads it. Values are handed on as they were given.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ParamSpec, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError

P = ParamSpec("P")
T = TypeVar("T")

_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)


class ArgumentError(ValueError, TypeError):
    """An argument of an environment, or an option of a reset, that it does not take or cannot use, by its name.

    A `TypeError` as Python raises for an unknown keyword, and a `ValueError` as for a value: callers catch either.
    """


Count = Annotated[int, Field(ge=1)]
"""A whole number from 1 up."""

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A time limit."""

Number = Annotated[float, Field(allow_inf_nan=False)]
"""Any finite number."""


def one_of(*names: str) -> BeforeValidator:
    """In `Annotated`: the value is one of `names`."""

    def check(value: Any) -> Any:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return value

    return BeforeValidator(check)


def containing(part: str) -> AfterValidator:
    """In `Annotated`: the text holds `part`."""

    def check(value: str) -> str:
        if part not in value:
            raise ValueError(f"must hold {part}")
        return value

    return AfterValidator(check)


def checked_arguments(apart: Sequence[str] = ()) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator that holds arguments against their annotations; `ArgumentError` names the first that fails.

    Parameters in `apart` have checks of their own inside.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        takes = [name for name in signature.parameters if name != "self"]

        @functools.cache
        def rules() -> Mapping[str, TypeAdapter[Any]]:
            # At the first call: annotations are names of the module, which is not complete when this decorates.
            hints = typing.get_type_hints(function, include_extras=True)
            return {name: _adapter(hints[name]) for name in takes if name not in apart}

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs:
                if name not in takes:
                    raise _unknown("argument", name, takes)
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise ArgumentError(str(error)) from None
            for name, rule in rules().items():
                if name in given:
                    _hold(name, given[name], rule)
            return function(*args, **kwargs)

        return checked

    return decorate


def _adapter(hint: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint, config=_STRICT)
    except PydanticUserError:  # a type that brings a configuration of its own
        return TypeAdapter(hint)


def _hold(name: str, value: Any, rule: TypeAdapter[Any]) -> None:
    try:
        rule.validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        said = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        said = said.replace("greater than or equal to", "at least")
        raise ArgumentError(f"{name} {said}, not {value!r}") from None


def check_options(options: Mapping[str, Any] | None, *known: str) -> Mapping[str, Any]:
    """The options of a reset, held against the keys that the environment takes; None is none of them.

    Raises `ArgumentError` for an unknown key, and for options that are no mapping.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ArgumentError(f"options must be a mapping with the keys {', '.join(known)}, not {options!r}")
    for key in options:
        if key not in known:
            raise _unknown("option", key, known)
    return options


def _unknown(what: str, name: Any, known: Iterable[str]) -> ArgumentError:
    near = difflib.get_close_matches(str(name), list(known), n=1)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    return ArgumentError(f"there is no {what} {name!r}{meant}; known: {', '.join(known)}")
