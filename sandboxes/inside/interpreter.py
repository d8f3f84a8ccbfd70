"""The persistent interpreter: runs one cell after another in one globals dict, as a notebook would.

It writes what the model shall read (prints, the last value, a short traceback) to descriptor 1 and answers each
cell with one word that says how it ended. It trusts nothing to survive a cell: time limits, output limits and stray
processes are the supervisor's business. A cell may also replace what any module holds, built-in functions too; those
are put back when it ends, and between cells only functions are called that were picked up before the first one.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import functools
import io
import itertools
import linecache
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from .builtin_names import BuiltinNames
from .line import RAISED, RAN, receive_cell

FRAMES_KEPT = 1000
LINES_SHOWN = 16
OWN_FILE = __file__
CELL = "<cell "
FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
TREE_ONLY = ast.PyCF_ONLY_AST | FLAGS
AWAITS = 0x80
"""`inspect.CO_COROUTINE`: to import `inspect` costs more than a start."""

_compile_source, _evaluate, _show = compile, eval, repr
_last_statement, _expression = ast.Expr, ast.Expression
_lines = linecache.cache


def _no_input(prompt: object = "", /) -> NoReturn:
    """Stand in for `input`: nobody types here."""
    sys.stdout.write(str(prompt))
    raise EOFError("input() has nothing to read: nobody types here. Put the value into the code.")


def _leave(code: object = None) -> NoReturn:
    """Stand in for `exit` and `quit`, which `python -S` leaves out."""
    raise SystemExit(code)


def _open_streams() -> tuple[io.TextIOWrapper, io.TextIOWrapper]:
    """Open standard output and error on descriptors 1 and 2.

    Lines are written at once: what was printed before a time limit or a crash shall be seen. backslashreplace:
    a lone surrogate is printed as \\ud800 instead of raising.
    """

    def stream(fd: int) -> io.TextIOWrapper:
        raw = io.FileIO(fd, "w", closefd=False)
        return io.TextIOWrapper(
            io.BufferedWriter(raw, 1 << 16), encoding="utf-8", errors="backslashreplace", line_buffering=True
        )

    return stream(1), stream(2)


def _prepare() -> types.ModuleType:
    """Make this process look like a fresh interpreter; returns the `__main__` the cells run in."""
    # Mathematics prints long integers; a conversion that takes too long meets the time limit instead.
    sys.set_int_max_str_digits(0)
    sys.argv = [""]
    main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


def _compile(source: str, name: str) -> tuple[types.CodeType, types.CodeType | None]:
    """Return (statements, last expression or None) of a cell. `await` may stand at the top level."""
    tree = _compile_source(source, name, "exec", TREE_ONLY, dont_inherit=True)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, _last_statement):
        return _compile_source(tree, name, "exec", FLAGS, dont_inherit=True), None
    tree.body.pop()
    return (
        _compile_source(tree, name, "exec", FLAGS, dont_inherit=True),
        _compile_source(_expression(last.value), name, "eval", FLAGS, dont_inherit=True),
    )


@functools.cache
def _names_of_cells() -> BuiltinNames:
    """Give cells the built-in names and the input that are theirs, and note how all names are."""
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, "r", closefd=False), encoding="utf-8")  # type: ignore[misc]
    vars(builtins).update(input=_no_input, exit=_leave, quit=_leave)
    return BuiltinNames()


class Cells:
    """Runs code objects in one namespace, on one event loop if they await."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._await: Callable[[Any], Any] | None = None
        self.builtins = _names_of_cells()

    def run(self, code: types.CodeType) -> Any:
        """Run one to its end; returns the value of an expression. Built-in functions are as before, however it ends."""
        try:
            value = _evaluate(code, self._namespace)
            if code.co_flags & AWAITS:
                value = self._wait(value)
            return value
        finally:
            self.builtins.restore()

    def _wait(self, coroutine: Any) -> Any:
        if self._await is None:
            import asyncio  # a third of a start, and few cells want it

            self._await = asyncio.new_event_loop().run_until_complete
        return self._await(coroutine)


def _related(error: Any) -> Iterator[Any]:
    """Yield an error (or its `TracebackException`), its causes, contexts and group members, each once."""
    seen: set[int] = set()
    queue = [error]
    while queue:
        each = queue.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            queue += [each.__cause__, each.__context__, *(getattr(each, "exceptions", None) or ())]


def _shorten(error: BaseException) -> None:
    """Cut the middle out of tracebacks of millions of frames, which nobody could even format."""
    for each in _related(error):
        entries: collections.deque[types.TracebackType] = collections.deque(maxlen=FRAMES_KEPT)
        entry, count, end = each.__traceback__, 0, None
        while entry is not None:
            count += 1
            if count == FRAMES_KEPT:
                end = entry
            entries.append(entry)
            entry = entry.tb_next
        if end is not None and count > 2 * FRAMES_KEPT:
            end.tb_next = entries[0]


def _short_path(path: str) -> str:
    """A file's path below the folder it was imported from: where that lies on this machine is nobody's business."""
    for folder in sorted(sys.path, key=len, reverse=True):
        if folder and path.startswith(folder + "/"):
            return path[len(folder) + 1 :]
    return path


def _seen_by_the_cell(stack: traceback.StackSummary) -> traceback.StackSummary:
    """A stack without our own frames, nor what runs a cell beneath it, and with short paths."""
    frames = [frame for frame in stack if frame.filename != OWN_FILE]
    first = next((at for at, frame in enumerate(frames) if frame.filename.startswith(CELL)), 0)
    for frame in frames[first:]:
        _ = frame.line  # read by the long path, before it is cut
        frame.filename = _short_path(frame.filename)
    return traceback.StackSummary.from_list(frames[first:])


def _describe(error: BaseException) -> str:
    """Return a short traceback of `error`."""
    try:
        # The cell may have set a limit that is too low even for this.
        sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000))
        _shorten(error)
        shown = traceback.TracebackException.from_exception(error, compact=True)
        for each in _related(shown):
            each.stack = _seen_by_the_cell(each.stack)
        lines = list(shown.format())
        if len(lines) > LINES_SHOWN:
            half = LINES_SHOWN // 2
            lines[half:-half] = [f"  ... {len(lines) - 2 * half} more lines of the traceback ...\n"]
        return "".join(lines)
    except BaseException:  # the error's own __str__ may raise anything at all
        return f"{type(error).__name__}: (this error could not be shown)\n"


def _run_cell(source: str, name: str, cells: Cells, say: Callable[[str], object]) -> bool:
    """Run one cell; returns whether it raised nothing. What it shows is on the streams, what went wrong is said."""
    _lines[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        statements, last = _compile(source, name)
    except UnicodeEncodeError as error:
        say(f"SyntaxError: the source holds a lone surrogate at index {error.start}; it is no UTF-8\n")
        return False
    except BaseException as error:  # no stack: it is the compiler's, and ours
        say(_describe(error.with_traceback(None)))
        return False
    try:
        cells.run(statements)
        if last is not None:
            value = cells.run(last)
            if value is not None:
                sys.stdout.write(_shown(value, cells) + "\n")
    except SystemExit as exit_:
        say(f"SystemExit: {exit_.code!r} (the interpreter goes on; its state is kept)\n")
        return exit_.code in (None, 0)
    except BaseException as error:
        say(_describe(error))
        return False
    return True


def _shown(value: Any, cells: Cells) -> str:
    """The value's own text; making it is code of the cell as well."""
    try:
        return _show(value)
    finally:
        cells.builtins.restore()


def _flush(stream: Any) -> None:
    """Flush a stream that the cell may have closed or replaced by anything."""
    try:
        stream.flush()
    except BaseException:
        return


def warm_up() -> None:
    """Do once, in the zygote, what the first cell of every interpreter would have to do again."""
    said: list[str] = []
    with contextlib.redirect_stdout(io.StringIO()):
        for cell in ("from math import gcd\ndef f(x): return [gcd(i, x) for i in range(3)]\nf(6)", "1 / 0", "x = ("):
            _run_cell(cell, "<cell 0>", Cells({"__builtins__": builtins}), said.append)
    "\ud800".encode("utf-8", "backslashreplace")
    linecache.clearcache()


def serve(fd: int) -> NoReturn:
    """Run cells that arrive on `fd` until it ends. Never returns."""
    main = _prepare()
    streams = _open_streams()
    output = os.dup(1)  # not inherited by programs the cells start
    pid = os.getpid()
    leave, write, duplicate, whoami = os._exit, os.write, os.dup2, os.getpid
    cells = Cells(vars(main))
    receive = receive_cell

    def say(text: str) -> None:
        """Write past the streams, which the cell may have closed or turned elsewhere, after what is in them."""
        for stream in (sys.stdout, sys.stderr, *streams):
            _flush(stream)
        rest = text.encode("utf-8", "backslashreplace")
        try:
            while rest:
                rest = rest[write(output, rest) :]
        except OSError:  # closed; so is the line to the supervisor, presumably, and that ends this process
            return

    for number in itertools.count(1):
        try:
            cell, body = receive(fd)
            # The cell before may have closed or redirected any of these.
            duplicate(output, 1)
            duplicate(output, 2)
        except OSError:
            break
        if any(stream.closed for stream in streams):
            streams = _open_streams()
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc]
        good = False
        try:
            good = _run_cell(body.decode("utf-8", "surrogatepass"), f"{CELL}{number}>", cells, say)
        finally:
            for stream in (sys.stdout, sys.stderr, *streams):
                _flush(stream)
            if whoami() != pid:  # the cell forked, and this is the child: it must not answer
                leave(0)
        try:
            write(fd, cell + (RAN if good else RAISED))
        except OSError:
            break
    leave(0)
