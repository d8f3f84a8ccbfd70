"""What a recipe's reader says of keys that are wrong."""

from __future__ import annotations

from pydantic import ValidationError


def wrong_keys(error: ValidationError) -> str:
    """Every wrong key of `error` with what is wrong about it, in one line."""
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "(whole recipe)"
        hint = "unknown key" if item["type"] == "extra_forbidden" else item["msg"].removeprefix("Value error, ")
        lines.append(f"{key}: {hint}")
    return "; ".join(lines)
