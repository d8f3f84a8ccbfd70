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

from envs.swe_bench.grading.loaded import NO_LISTING, listing
from envs.swe_bench.grading.verdict import Canaries
from envs.swe_bench.instance import END_MARKER, START_MARKER, Instance, RowError

SETUP_CHARS = 100_000
LOADED_LINES = 10_000
ACTIVATE = "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate; conda activate testbed; fi"
_ACTIVATES = re.compile(r"(source|\.|export|eval|(conda|mamba|pyenv|nvm) (activate|shell|use))\s|[A-Za-z_]\w*=\S*$")
DEFAULT_COMMAND = "python -m pytest -rA"
_PYTEST = re.compile(
    r"^(?:\w+=\S+\s+)*(?:(?:\S*/)?python[\d.]*(?:\s+-\w\s*\w+)*?\s+-m\s+pytest|(?:\S*/)?py\.?test)(?:\s|$)"
)
# Options that choose tests, or end the run at the first failure: `-x`, also among other short ones (not `-rx`).
_SELECTS = re.compile(r"-[km]|-[a-qs-z]*x[a-zA-Z]*|--(deselect|lf|last-failed|exitfirst|maxfail|sw|stepwise)")
_IS_TEST = re.compile(r"(^|/)(tests?|test_[^/]*|[^/]*_tests?)\.py$")
_SHELL = re.compile(r"[|;&<>`\n]|\$\(")


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


def activation(instance: Instance) -> str:
    """The shell lines with which grading brings in the repository's environment, for whoever else works in it.

    Of an `eval_script` they are those in front of its test command that source a file, activate, or set variables.
    """
    if not instance.eval_script:
        return ACTIVATE
    # Up to the first text that is handed to a command: that is the tests' patch.
    before = re.split(rf"^.*(?:<<|{re.escape(START_MARKER)})", instance.eval_script, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line.strip() for line in before.split("\n")]
    return "\n".join(dict.fromkeys(line for line in lines if _ACTIVATES.match(line)))


@dataclass(frozen=True, slots=True)
class TestRun:
    """A script and what is needed to read its outcome. `files`: to be put into the container, by path.

    `canaries` are tests of our own in a file beside the instance's, in a pytest run. `must_fail` is part of the names
    of those that were added to the instance's own test `modules`, in any run; "" where none could be added.
    """

    script: str
    nonce: str
    folder: str
    key: bytes
    canaries: Canaries | None
    must_fail: str = ""
    modules: tuple[str, ...] = ()
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
    setup = f"{ACTIVATE}\ncd {shlex.quote(instance.workdir)}"
    files = " ".join(shlex.quote(file) for file in instance.test_files if PurePosixPath(file).suffix == ".py")
    command = instance.test_command or DEFAULT_COMMAND
    # A command that names tests of its own is complete; the usual one is given the files of the test patch.
    names_tests = any(file in command for file in instance.test_files)
    return Command(setup, command if names_tests else f"{command} {files}", restores_tests=False)


def make_run(
    instance: Instance,
    command: Command,
    *,
    plugin: str,
    sums: str,
    base_files: Collection[str],
    scratch: str,
    recorder: str = "",
) -> TestRun:
    """Compose the script. `plugin`: source of the pytest plugin, `recorder`: of what watches unittest; `sums`:
    `sha256sum` lines of the test files."""
    nonce, key = secrets.token_hex(16), secrets.token_bytes(32)
    folder = f"{scratch}/.{secrets.token_hex(8)}"
    line, files, canaries = command.line, {f"{folder}/.here": b""}, None
    environment = ""
    if "\n" not in command.line:  # a script or tox may call pytest, which then loads the plugin too
        name = f"r{secrets.token_hex(6)}"
        files[f"{folder}/{name}.py"] = plugin.encode()
        keys = ["pytest-key"]
        if not command.is_pytest and recorder:
            files[f"{folder}/sitecustomize.py"] = recorder.encode()
            keys.append("unittest-key")
        # The keys come when the repository has been set up, out of the shell's memory.
        environment = "".join(f"printf %s {key.hex()} > {folder}/{file}\n" for file in keys)
        environment += (
            f'export PYTHONPATH="{folder}${{PYTHONPATH:+:$PYTHONPATH}}"\n'
            f'export PYTEST_ADDOPTS="-p {name} ${{PYTEST_ADDOPTS:-}}"\n'
        )
        canary = _canary(instance, command, base_files) if command.is_pytest else None
        if canary is not None:
            path, source, canaries = canary
            files[f"{instance.workdir}/{path}"] = source.encode()
            if any(word.split("::")[0] in {*instance.test_files, *base_files} for word in command.words()):
                line = f"{line} {shlex.quote(path)}"
    must_fail, modules, append = _appended(instance, command, nonce)
    check = f"sha256sum --check --status <<'{nonce}'\n{sums}{nonce}\n" if sums else "true\n"
    # Once more when the tests are over: code that runs before they are read (a package's `__init__`) can rewrite them.
    # Only modules: tests may write the data that lies beside them.
    kept = " ".join(shlex.quote(file) for file in instance.test_files if file.endswith(".py")) if sums else ""
    state = f"$(cd {shlex.quote(instance.workdir)} && sha256sum -- {kept} 2>/dev/null)" if kept else ""
    # In braces: the shell has read all of it before any of it runs, and keeps it in its memory only. The set-up's own
    # output may be of any length (`git show` of a first commit is the whole repository), so it goes to a file.
    script = (
        f"{{\n{listing(instance.workdir, scratch)}\n__sao_before=$(__sao_loaded)\n"
        f"exec 9>&1 >{folder}/setup 2>&1\n{command.setup}\n"
        "case $- in *x*) __sao_trace=x ;; *) __sao_trace= ;; esac\nset +xeu\n"
        f"exec >&9 2>&1 9>&-\ntail -c {SETUP_CHARS} {folder}/setup\n"
        f"cd {shlex.quote(instance.workdir)}\n"
        f"__sao_after=$(__sao_loaded)\nprintf '\\n'\n"
        f'if [ "$__sao_before" = "{NO_LISTING}" ]; then echo {nonce}:nofind; exit 3; fi\n'
        'if [ "$__sao_after" != "$__sao_before" ]; then\n'
        f"  diff <(printf '%s\\n' \"$__sao_before\") <(printf '%s\\n' \"$__sao_after\") |\n"
        f"    sed -n 's/^[<>] /{nonce}:loaded /p' | head -n {LOADED_LINES}\nfi\n"
        f"if ! {check.rstrip(chr(10))}\nthen echo {nonce}:tests; exit 3; fi\n"
        f'{append}unset __sao_before __sao_after; __sao_tests="{state}"\n{environment}'
        f"printf '\\n%s\\n' {nonce}:start\n[ -z \"$__sao_trace\" ] || set -x\n{line}\n"
        "{ __sao_code=$?; set +xeu; } 2>/dev/null\n"
        f'if [ "{state}" != "$__sao_tests" ]; then printf \'\\n%s\\n\' {nonce}:tests; fi\n'
        f"printf '\\n%s\\n' {nonce}:end\\ $__sao_code\n}} </dev/null 2>&1\n"
    )
    return TestRun(script, nonce, folder, key, canaries, must_fail, modules, files)


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


def _appended(instance: Instance, command: Command, nonce: str) -> tuple[str, tuple[str, ...], str]:
    """Tests that must fail, in the instance's own test modules, where what changes those is seen to change ours.

    (part of their names, the modules, shell lines that add them). For a command that is pytest: only where all tests
    of a module run, and where a failure does not end the run.
    """
    modules = [file for file in instance.test_files if _IS_TEST.search(file)]
    named = {test.split("::")[0] for test in (*instance.fail_to_pass, *instance.pass_to_pass) if "::" in test}
    if named:  # what else looks like a test module may be data of the tests
        modules = [file for file in modules if file in named]
    if command.is_pytest:
        words = command.words()
        if any(_SELECTS.fullmatch(word) for word in _options(words)):
            modules = []
        modules = [file for file in modules if not any(word.startswith(f"{file}::") for word in words)]
    if not modules:
        return "", (), ""
    name = secrets.token_hex(6)
    source = (
        f"\n\ndef test_{name}():\n    assert sorted([2, 1]) == [2, 1]\n\n\n"
        f"class Test{name}(__import__('unittest').TestCase):\n"
        f"    def test_{name}(self):\n        assert sorted([2, 1]) == [2, 1]\n"
    )
    # A test patch may take a module away.
    append = "".join(
        f"if [ -f {shlex.quote(file)} ]; then cat >> {shlex.quote(file)} <<'{nonce}'\n{source}{nonce}\nfi\n"
        for file in modules
    )
    return f"test_{name}", tuple(modules), append


def _options(words: list[str]) -> list[str]:
    """The options of a pytest command, without their values; `-m` of `python -m pytest` is none of them."""
    at = next((number for number, word in enumerate(words) if re.search(r"(^|/)py\.?test$", word)), 0)
    return [word.split("=")[0] for word in words[at + 1 :] if word.startswith("-")]
