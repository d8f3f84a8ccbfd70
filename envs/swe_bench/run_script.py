"""The script that runs an instance's tests in a container, composed on the host. No I/O.

What stands in an `eval_script` before SWE-bench's start marker is carried out as it is; its markers are replaced with
ones that hold a nonce, and a command that is pytest gets the results plugin and tests of our own beside the instance's.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from envs.swe_bench.instance import END_MARKER, START_MARKER, Instance, RowError
from envs.swe_bench.verdict import Canaries

DEFAULT_COMMAND = "python -m pytest -rA"
_PYTEST = re.compile(
    r"^(?:\w+=\S+\s+)*(?:(?:\S*/)?python[\d.]*(?:\s+-\w\s*\w+)*?\s+-m\s+pytest|(?:\S*/)?py\.?test)(?:\s|$)"
)
# Options that choose tests, or end the run at the first failure: `-x`, also among other short ones (not `-rx`).
_SELECTS = re.compile(r"-[km]|-[a-qs-z]*x[a-zA-Z]*|--(deselect|lf|last-failed|exitfirst|maxfail|sw|stepwise)")
_SHELL = re.compile(r"[|;&<>`\n]|\$\(")

# What Python reads before any test: pytest itself, and start-up files. Compared before and after the set-up.
_TOOLS = r"""
__sao_tools() {
  find / -xdev \( -path /proc -o -path /sys \) -prune -o \
    \( -name sitecustomize.py -o -name usercustomize.py \) -print -o \
    -type d \( -name site-packages -o -name dist-packages \) -print 2>/dev/null | LC_ALL=C sort |
  while IFS= read -r found; do
    echo "$found"
    if [ -f "$found" ]; then sha256sum "$found"; continue; fi
    grep -H '^import' "$found"/*.pth
    find "$found/_pytest" "$found/pytest" "$found/pluggy" -name '*.py' -exec sha256sum {} + | LC_ALL=C sort
  done 2>/dev/null | sha256sum
}
"""


@dataclass(frozen=True, slots=True)
class Command:
    """An instance's test command. `setup`: shell lines before it. `restores_tests`: they bring the instance's tests."""

    setup: str
    line: str
    restores_tests: bool

    @property
    def is_pytest(self) -> bool:
        """Whether it is one plain call of pytest, so that the results plugin can be asked instead of the output."""
        return _PYTEST.match(self.line) is not None and _SHELL.search(self.line) is None

    def words(self) -> list[str]:
        """The words of the command; [] where it is more than a plain command."""
        try:
            return [] if _SHELL.search(self.line) else shlex.split(self.line)
        except ValueError:
            return []


@dataclass(frozen=True, slots=True)
class TestRun:
    """A script and what is needed to read its outcome. `files`: to be put into the container, by path.

    `canaries` are tests of our own in a pytest run; `must_fail` is part of the names of those in other runners' output.
    """

    script: str
    nonce: str
    folder: str
    key: bytes
    canaries: Canaries | None
    must_fail: str = ""
    files: dict[str, bytes] = field(default_factory=dict)


def command_of(instance: Instance) -> Command:
    """The command of `instance`; raises `RowError` for an `eval_script` without SWE-bench's markers."""
    if instance.eval_script:
        lines = instance.eval_script.split("\n")
        starts = [number for number, line in enumerate(lines) if START_MARKER in line]
        ends = [number for number, line in enumerate(lines) if END_MARKER in line]
        if len(starts) != 1 or len(ends) != 1 or ends[0] < starts[0]:
            raise RowError(
                instance.instance_id, "eval_script", f"must hold {START_MARKER!r} and {END_MARKER!r} once each"
            )
        command = "\n".join(lines[starts[0] + 1 : ends[0]]).strip()
        return Command("\n".join(lines[: starts[0]]), command, restores_tests=bool(instance.test_patch))
    setup = (
        "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate; conda activate testbed; fi\n"
        f"cd {shlex.quote(instance.workdir)}"
    )
    files = " ".join(shlex.quote(file) for file in instance.test_files if PurePosixPath(file).suffix == ".py")
    command = instance.test_command or DEFAULT_COMMAND
    # A command that names tests of its own is complete; the usual one is given the files of the test patch.
    names_tests = any(file in command for file in instance.test_files)
    return Command(setup, command if names_tests else f"{command} {files}", restores_tests=False)


def make_run(
    instance: Instance, command: Command, *, plugin: str, sums: str, base_files: Collection[str], scratch: str
) -> TestRun:
    """Compose the script. `plugin`: source of the results plugin; `sums`: `sha256sum` lines of the test files."""
    nonce, key = secrets.token_hex(16), secrets.token_bytes(32)
    folder = f"{scratch}/.{secrets.token_hex(8)}"
    line, files, canaries = command.line, dict[str, bytes](), None
    environment = ""
    if "\n" not in command.line:  # a script or tox may call pytest, which then loads the plugin too
        name = f"r{secrets.token_hex(6)}"
        files[f"{folder}/{name}.py"] = plugin.encode()
        files[f"{folder}/key"] = key
        environment = (
            f'export PYTHONPATH="{folder}${{PYTHONPATH:+:$PYTHONPATH}}"\n'
            f'export PYTEST_ADDOPTS="-p {name} ${{PYTEST_ADDOPTS:-}}"\n'
        )
        canary = _canary(instance, command, base_files) if command.is_pytest else None
        if canary is not None:
            path, source, canaries = canary
            files[f"{instance.workdir}/{path}"] = source.encode()
            if any(word.split("::")[0] in {*instance.test_files, *base_files} for word in command.words()):
                line = f"{line} {shlex.quote(path)}"
    must_fail, append = ("", "") if command.is_pytest else _appended(instance, nonce)
    check = f"sha256sum --check --status <<'{nonce}'\n{sums}{nonce}\n" if sums else "true\n"
    # Once more when the tests are over: code that runs before they are read (a package's `__init__`) can rewrite them.
    # Only modules: tests may write the data that lies beside them.
    modules = " ".join(shlex.quote(file) for file in instance.test_files if file.endswith(".py")) if sums else ""
    state = f"$(cd {shlex.quote(instance.workdir)} && sha256sum -- {modules} 2>/dev/null)" if modules else ""
    # In braces: the shell has read all of it before any of it runs, and keeps it in its memory only.
    script = (
        f"{{\n{_TOOLS}\n__sao_before=$(__sao_tools)\n{command.setup}\nset +xeu\ncd {shlex.quote(instance.workdir)}\n"
        f'if [ "$(__sao_tools)" != "$__sao_before" ]; then echo {nonce}:tools; exit 3; fi\n'
        f"if ! {check.rstrip(chr(10))}\nthen echo {nonce}:tests; exit 3; fi\n"
        f'{append}unset __sao_before; __sao_tests="{state}"\n{environment}'
        f"printf '\\n%s\\n' {nonce}:start\n{line}\n__sao_code=$?\n"
        f'if [ "{state}" != "$__sao_tests" ]; then printf \'\\n%s\\n\' {nonce}:tests; fi\n'
        f"printf '\\n%s\\n' {nonce}:end\\ $__sao_code\n}} </dev/null 2>&1\n"
    )
    return TestRun(script, nonce, folder, key, canaries, must_fail, files)


def _canary(instance: Instance, command: Command, base_files: Collection[str]) -> tuple[str, str, Canaries] | None:
    """A test file beside the instance's: (path, source, ids). None where a command selects tests by expression."""
    if any(_SELECTS.fullmatch(word) for word in _options(command.words())):
        return None
    beside = next((file for file in instance.test_files if file.endswith(".py")), "")
    if not beside:
        return None
    folder = PurePosixPath(beside).parent
    good, bad, broken, fixture, module = (secrets.token_hex(4) for _ in range(5))
    path = str(folder / f"test_{module}.py")
    source = (
        "import pytest\n\n\n"
        f"def test_{good}():\n    assert sorted([2, 1]) == [1, 2]\n\n\n"
        f"def test_{bad}():\n    assert sorted([2, 1]) == [2, 1]\n\n\n"
        f'@pytest.fixture\ndef f{fixture}():\n    raise RuntimeError("no value")\n\n\n'
        f"def test_{broken}(f{fixture}):\n    assert f{fixture}\n"
    )
    return path, source, Canaries(f"{path}::test_{good}", (f"{path}::test_{bad}", f"{path}::test_{broken}"))


def _appended(instance: Instance, nonce: str) -> tuple[str, str]:
    """Tests that must fail, for runners that print names: (part of the names, shell lines that add them to a file)."""
    is_test = re.compile(r"(^|/)(tests?|test_[^/]*|[^/]*_tests?)\.py$")
    file = next((file for file in instance.test_files if is_test.search(file)), "")
    if not file:
        return "", ""
    name = secrets.token_hex(6)
    source = (
        f"\n\ndef test_{name}():\n    assert sorted([2, 1]) == [2, 1]\n\n\n"
        f"class Test{name}(__import__('unittest').TestCase):\n"
        f"    def test_{name}(self):\n        assert sorted([2, 1]) == [2, 1]\n"
    )
    return f"test_{name}", f"cat >> {shlex.quote(file)} <<'{nonce}'\n{source}{nonce}\n"


def _options(words: list[str]) -> list[str]:
    """The options of a pytest command, without their values; `-m` of `python -m pytest` is none of them."""
    at = next((number for number, word in enumerate(words) if re.search(r"(^|/)py\.?test$", word)), 0)
    return [word.split("=")[0] for word in words[at + 1 :] if word.startswith("-")]
