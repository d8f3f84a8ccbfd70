"""What a person reads about a configuration that is wrong: a recipe's, the server's, the store's, the runtime's."""

from __future__ import annotations

from pydantic import ValidationError

_IN_PLAIN_WORDS = {"extra_forbidden": "unknown key", "missing": "is required"}


def wrong_keys(error: ValidationError) -> str:
    """Every wrong key of `error` with what is wrong about it, in one line: "learner.stpes: unknown key; ...".

    What is wrong with keys that do not fit together, and so with none of them, stands alone.
    """
    problems = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        problem = _IN_PLAIN_WORDS.get(item["type"], item["msg"].removeprefix("Value error, "))
        problems.append(f"{key}: {problem}" if key else problem)
    return "; ".join(problems)
