"""Cases E1-E3, E5 and E6: what a cell sees, what the model sees, and that the next call works."""

from __future__ import annotations

import sys

import pytest

from sandboxes.base import PythonResult, PythonSession, SandboxFault

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def next_call_works(python: PythonSession) -> None:
    result = await python.run("'still ' + 'here'")
    assert (result.output, result.status) == ("'still here'\n", "ok")


def is_lost(result: PythonResult, status: str) -> bool:
    return result.state_lost and result.status == status and "state" in result.output and "lost" in result.output


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("def f(n):\n    return 1 if n < 2 else n * f(n - 1)\nf(20)", "2432902008176640000\n"),
        ("k = 3\n[[i * k for i in range(k)] for j in range(k) if all(j < k for _ in range(k))]", None),
        ("def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n != 0 and even(n - 1)\neven(10)", "True\n"),
        ("class A:\n    def make(self): return A()\ntype(A().make()).__name__", "'A'\n"),
        ("import functools\n@functools.cache\ndef g(n): return n if n < 2 else g(n-1) + g(n-2)\ng(80)", None),
        ("h = lambda n: 1 if n == 0 else n * h(n - 1)\nh(5)", "120\n"),
        ("if __name__ == '__main__':\n    print('main')", "main\n"),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nP(1)", "P(x=1)\n"),
    ],
)
async def test_names_of_the_top_level_are_seen_from_functions_and_comprehensions(
    python: PythonSession, code: str, output: str | None
) -> None:
    """Case E1: recursion and comprehensions at the top level."""
    result = await python.run(code)
    assert result.status == "ok"
    assert output is None or result.output == output


async def test_state_persists_from_call_to_call(python: PythonSession) -> None:
    """Case E1: variables, functions, imports, files and a redefinition live on."""
    await python.run("import math\nx = [1]\ndef f(): return x\nopen('note', 'w').write('kept')")
    await python.run("x.append(math.gcd(12, 18))")
    result = await python.run("f(), open('note').read()")
    assert result.output == "([1, 6], 'kept')\n"
    assert not result.state_lost


@pytest.mark.parametrize(
    "code",
    [
        "while True:\n    try:\n        while True: pass\n    except Exception: pass",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "import time; time.sleep(60)",
        "import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "10 ** 10 ** 10",
        "import threading\nthreading.Event().wait()",
        "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
    ],
)
async def test_the_time_limit_is_real_and_the_loss_of_state_is_told(python: PythonSession, code: str) -> None:
    """Cases E1 and E2: nothing that the code does escapes the limit."""
    await python.run("x = 1")
    result = await python.run("print('before')\n" + code, timeout_s=0.5)
    assert is_lost(result, "timeout"), result
    assert result.output.startswith("before\n")  # what was printed in time is shown
    assert 0.4 < result.duration_s < 5
    assert "NameError" in (await python.run("x")).output
    await next_call_works(python)


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("s = '''a\n  b\n\tc\n'''\ns", "'a\\n  b\\n\\tc\\n'\n"),
        ('s = """"quoted" \\\\n \'x\' """\nprint(s)', "\"quoted\" \\n 'x' \n"),
        ("if True:\n\tx = 1\n\tif x:\n\t\tprint('tabs')", "tabs\n"),
        ("print('''\n    indented\n''')", "\n    indented\n\n"),
        ("'\\r\\n'", "'\\r\\n'\n"),
        ("print('é 漢 🙂 \\x00|')", "é 漢 🙂 \x00|\n"),
        ("# a comment only", ""),
        ("", ""),
        ("\n\n", ""),
        ("x = 1;", ""),
    ],
)
async def test_source_reaches_the_interpreter_unchanged(python: PythonSession, code: str, output: str) -> None:
    """Case E3: triple quotes, indentation, escapes, any Unicode, nothing at all."""
    result = await python.run(code)
    assert (result.output, result.status) == (output, "ok")


@pytest.mark.parametrize("code", ["x = 'a\0b'\nlen(x)", "\0", "print(1)\0"])
async def test_a_nul_byte_in_the_source_is_the_interpreters_to_judge(python: PythonSession, code: str) -> None:
    """Case E3: Python refuses NUL bytes in source; the model reads that, nothing is cut off silently."""
    result = await python.run(code)
    assert result.status == "error"
    assert "null bytes" in result.output
    assert not result.state_lost
    await next_call_works(python)


async def test_200_kb_of_source_arrive_whole(python: PythonSession) -> None:
    """Case E3: source far larger than a pipe."""
    text = "".join(chr(0x4E00 + i % 5000) for i in range(70_000))
    assert len(text.encode()) > 200_000
    result = await python.run(f"s = '''{text}'''\nlen(s), sum(map(ord, s))")
    assert result.output == f"({len(text)}, {sum(map(ord, text))})\n"


async def test_a_long_integer_prints(python: PythonSession) -> None:
    """Case E5: no limit on integer digits; the time limit holds instead."""
    digits = await python.run("s = str(2**20000)\nprint(2**20000)\nlen(s)")
    assert digits.status == "ok"
    assert digits.output.startswith("398027684033796659235430720619120245370")
    assert digits.output.endswith("309376\n6021\n")
    assert (await python.run("int('9' * 5000) % 9")).output == "0\n"


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("print('\\ud800')", "ok", ["\\ud800"]),
        ("'\\ud800'", "ok", ["'\\ud800'"]),
        ("x = '\ud800'", "error", ["surrogate"]),
        ("raise ValueError('\\ud800')", "error", ["ValueError: \\ud800"]),
        ("input('name? ')", "error", ["name? ", "EOFError", "nobody types"]),
        ("import sys; sys.stdin.readline()", "ok", ["''"]),
        ("def f(): return f()\nf()", "error", ["RecursionError", "maximum recursion depth"]),
        ("import sys; sys.exit()", "ok", ["SystemExit", "state is kept"]),
        ("import sys; sys.exit('bad')", "error", ["SystemExit", "bad", "state is kept"]),
        ("exit(3)", "error", ["SystemExit: 3"]),
        ("quit()", "ok", ["SystemExit"]),
        ("raise KeyboardInterrupt", "error", ["KeyboardInterrupt"]),
        ("raise BaseException('base')", "error", ["BaseException: base"]),
        ("raise ExceptionGroup('group', [ValueError('a'), KeyError('b')])", "error", ["group", "ValueError: a"]),
        ("class E(Exception):\n    def __str__(self): raise SystemExit\nraise E", "error", ["E"]),
        ("class R:\n    def __repr__(self): raise ValueError('no repr')\nR()", "error", ["no repr"]),
        ("import sys\nsys.stdout.close()\nsys.stdout = None", "ok", []),
        ("import os; os.close(1); os.close(2)", "ok", []),
        ("import os; os.close(0)", "ok", []),
        ("import sys, io; sys.stdout = io.StringIO(); print('lost')", "ok", []),
        ("del print", "error", ["NameError"]),
        ("import builtins; del builtins.print", "ok", []),
        ("import sys; sys.setrecursionlimit(60)", "ok", []),
        ("globals().clear()", "ok", []),
        ("import os; os.chdir('/')", "ok", []),
        ("import sys; sys.modules.clear()", "ok", []),
        ("import os\nos.fork() and None", "ok", []),
        ("import os\nif os.fork() == 0: raise ValueError('child')\nos.wait() and None", "ok", []),
        ("return 1", "error", ["SyntaxError", "'return' outside function"]),
        ("x = (", "error", ["SyntaxError", "never closed"]),
        ("(" * 5000, "error", ["too many nested parentheses"]),
        ("import os; os.kill(os.getpid(), 2)\nimport time; time.sleep(5)", "error", ["KeyboardInterrupt"]),
        ("import subprocess; subprocess.run(['echo', 'from a child']).returncode", "ok", ["from a child\n0\n"]),
    ],
)
async def test_odd_cells_give_a_clear_observation(
    python: PythonSession, code: str, status: str, words: list[str]
) -> None:
    """Case E5: each gives a clear observation, keeps the state, and the next call works."""
    result = await python.run(code)
    assert result.status == status, result
    assert not result.state_lost
    for word in words:
        assert word in result.output
    assert "sandboxes" not in result.output  # no frame of ours
    assert "/inside/" not in result.output
    await next_call_works(python)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os._exit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
        ("import os; os.abort()", "signal 6"),
        ("import ctypes; ctypes.string_at(0)", "signal 11"),
        ("import os; os.closerange(3, 256)", "left with exit code"),
        ("import os; os.execvp('true', ['true'])", "exit code 0"),
        ("import os; os.killpg(0, 9)", "signal 9"),
    ],
)
async def test_a_dead_interpreter_is_replaced_and_the_loss_is_told(
    python: PythonSession, code: str, words: str
) -> None:
    """Case E5: os._exit and its siblings."""
    await python.run("x = 1")
    result = await python.run("print('before')\n" + code)
    assert is_lost(result, "died"), result
    assert words in result.output
    assert result.output.startswith("before\n")
    assert "NameError" in (await python.run("x")).output
    await next_call_works(python)


@pytest.mark.parametrize("code", ["os.kill(os.getppid(), 9)", "os.kill(os.getppid(), 19)", "os.kill(-1, 9)"])
async def test_killing_the_parent_harms_only_itself(python: PythonSession, code: str) -> None:
    """Case E5: the parent is out of reach, or dies, is replaced, and the observation says so; the next call works."""
    result = await python.run(f"import os\n{code}", timeout_s=1)
    assert not result.state_lost or is_lost(result, result.status), result
    await next_call_works(python)


async def test_unlimited_recursion_with_the_limit_lifted(python: PythonSession) -> None:
    """Case E5: sys.setrecursionlimit does not open the way to a full machine."""
    result = await python.run("import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)", timeout_s=3)
    assert result.status == "error" or is_lost(result, result.status), result
    await next_call_works(python)


async def test_show_has_no_display_and_says_so(python: PythonSession) -> None:
    """Case E5: plt.show() returns at once, with a warning; without matplotlib the import error is the observation."""
    code = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"
    result = await python.run(code, timeout_s=60)
    assert not result.state_lost
    assert "cannot be shown" in result.output or "ModuleNotFoundError" in result.output
    await next_call_works(python)


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("1 + 1", "2\n"),
        ("'a'", "'a'\n"),
        ("x = 5\nx", "5\n"),
        ("None", ""),
        ("print('p')", "p\n"),
        ("print('p')\n7", "p\n7\n"),
        ("x = 5", ""),
        ("for i in range(2): i", ""),
        ("(1,\n 2)", "(1, 2)\n"),
        ("1; 2", "2\n"),
        ("'a docstring'\nx = 1", ""),
        ("import fractions\nfractions.Fraction(1, 3)", "Fraction(1, 3)\n"),
        ("y = 3 # c\ny # last", "3\n"),
    ],
)
async def test_the_last_expression_is_shown(python: PythonSession, code: str, output: str) -> None:
    """Case E6: the notebook habit, for the last expression only and not for None."""
    assert (await python.run(code)).output == output


async def test_tracebacks_are_short_and_in_order(python: PythonSession) -> None:
    """Case E5: the model reads its own lines, after what it printed, from an earlier cell too."""
    await python.run("def f(x):\n    return 1 / x")
    result = await python.run("print('first')\nf(0)")
    lines = result.output.splitlines()
    assert lines[:2] == ["first", "Traceback (most recent call last):"]
    assert '  File "<cell 2>", line 2, in <module>' in lines
    assert '  File "<cell 1>", line 2, in f' in lines
    assert "    return 1 / x" in lines
    assert lines[-1] == "ZeroDivisionError: division by zero"
    chained = await python.run("try:\n    f(0)\nexcept Exception as e:\n    raise KeyError('k') from e")
    assert "direct cause" in chained.output
    deep = await python.run("import json\ndef g(n): return h(n)\ndef h(n): return k(n)\ndef k(n): return g(n)\ng(1)")
    assert len(deep.output.splitlines()) < 60


async def test_sessions_end_once_and_for_all(python: PythonSession) -> None:
    """A closed session refuses calls instead of coming back."""
    await python.close()
    await python.close()
    with pytest.raises(SandboxFault, match="closed"):
        await python.run("1")


async def test_the_interpreter_of_this_test_has_the_limit_that_cells_do_not_have() -> None:
    """Case E5, the test of the test: here printing 2**20000 would raise."""
    assert 0 < sys.get_int_max_str_digits() < 6021
