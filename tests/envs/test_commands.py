"""`python -m envs.SOMETHING`: one frame for all of them, with help that shows an example of each command."""

from __future__ import annotations

import importlib
import re

import pytest

COMMANDS = {
    "envs.python_tir": ["check"],
    "envs.style_shift": ["agreement", "traces"],
    "envs.swe_bench": ["validate"],
    "envs.swe_bench.demo": ["build", "rows", "traces"],
}


def ended(package: str, *words: str) -> object:
    """The exit status with which the command ends the process."""
    main = importlib.import_module(f"{package}.__main__").main
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    return caught.value.code


@pytest.mark.parametrize("package", COMMANDS)
def test_help_lists_every_command_and_each_shows_an_example(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(package, "--help") == 0
    said = capsys.readouterr().out
    listed = re.findall(r"^    (\w+)", said, flags=re.MULTILINE)
    assert listed == COMMANDS[package]
    assert f"example: python -m {package} {listed[0]}" in said
    for command in listed:
        assert ended(package, command, "--help") == 0
        assert f"python -m {package} {command}" in capsys.readouterr().out.split("example", 1)[1]


@pytest.mark.parametrize("package", COMMANDS)
def test_what_no_command_takes_ends_with_2(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(package) == 2
    assert "required: COMMAND" in capsys.readouterr().err
    assert ended(package, "no-such-command") == 2
    assert COMMANDS[package][0] in capsys.readouterr().err
