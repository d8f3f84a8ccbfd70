"""The persistent interpreter: runs one cell after another in one globals dict, as a notebook would.

It writes what the model shall read (prints, the last value, a short traceback) to descriptor 1 and answers each
cell with one frame that says how it ended. It trusts nothing to survive a cell: time limits, output limits and
stray processes are the supervisor's business.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import io
import itertools
import linecache
import os
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any, NoReturn

from . import wire

FRAMES_KEPT = 1000
LINES_SHOWN = 16
OWN_FILE = __file__


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
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, "r", closefd=False), encoding="utf-8")  # type: ignore[misc]
    vars(builtins).update(input=_no_input, exit=_leave, quit=_leave)
    # Mathematics prints long integers; a conversion that takes too long meets the time limit instead.
    sys.set_int_max_str_digits(0)
    sys.argv = [""]
    main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


def _compile(source: str, name: str) -> tuple[types.CodeType, types.CodeType | None]:
    """Return (statements, last expression or None) of a cell."""
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        return compile(tree, name, "exec", dont_inherit=True), None
    tree.body.pop()
    return (
        compile(tree, name, "exec", dont_inherit=True),
        compile(ast.Expression(last.value), name, "eval", dont_inherit=True),
    )


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


def _show_error(error: BaseException) -> None:
    """Write a short traceback of `error` to the output, without our own frames."""
    try:
        # The cell may have set a limit that is too low even for this.
        sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000))
        _shorten(error)
        shown = traceback.TracebackException.from_exception(error, compact=True)
        for each in _related(shown):
            own = [frame for frame in each.stack if frame.filename != OWN_FILE]
            each.stack = traceback.StackSummary.from_list(own)
        lines = list(shown.format())
        if len(lines) > LINES_SHOWN:
            half = LINES_SHOWN // 2
            lines[half:-half] = [f"  ... {len(lines) - 2 * half} more lines of the traceback ...\n"]
        sys.stderr.write("".join(lines))
    except BaseException:  # the error's own __str__ may raise anything at all
        sys.stderr.write(f"{type(error).__name__}: (this error could not be shown)\n")


def _run_cell(source: str, name: str, namespace: dict[str, Any]) -> str:
    """Run one cell; returns "ok" or "error". What it shows is on the streams."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        statements, last = _compile(source, name)
        exec(statements, namespace)
        if last is not None:
            value = eval(last, namespace)
            if value is not None:
                sys.stdout.write(repr(value) + "\n")
    except SystemExit as exit_:
        sys.stdout.flush()
        sys.stderr.write(f"SystemExit: {exit_.code!r} (the interpreter goes on; its state is kept)\n")
        return "ok" if exit_.code in (None, 0) else "error"
    except UnicodeEncodeError as error:
        if error.object is not source:
            _flush(sys.stdout)
            _show_error(error)
            return "error"
        sys.stderr.write(f"SyntaxError: the source holds a lone surrogate at index {error.start}; it is no UTF-8\n")
        return "error"
    except BaseException as error:
        _flush(sys.stdout)
        _show_error(error)
        return "error"
    return "ok"


def _flush(stream: Any) -> None:
    """Flush a stream that the cell may have closed or replaced by anything."""
    try:
        stream.flush()
    except BaseException:
        return


def warm_up() -> None:
    """Do once, in the zygote, what the first cell of every interpreter would have to do again."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for cell in ("from math import gcd\ndef f(x): return [gcd(i, x) for i in range(3)]\nf(6)", "1 / 0", "x = ("):
            _run_cell(cell, "<warm-up>", {"__builtins__": builtins})
    "\ud800".encode("utf-8", "backslashreplace")
    linecache.clearcache()


def serve(fd: int) -> NoReturn:
    """Run cells that arrive on `fd` until it ends. Never returns."""
    main = _prepare()
    streams = _open_streams()
    output = os.dup(1)  # not inherited by programs the cells start
    pid = os.getpid()
    leave, write = os._exit, wire.write_all
    for number in itertools.count(1):
        try:
            _, body = wire.read_frame(fd)
        except OSError:
            break
        # The cell before may have closed or redirected any of these.
        os.dup2(output, 1)
        os.dup2(output, 2)
        if any(stream.closed for stream in streams):
            streams = _open_streams()
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc]
        status = "error"
        try:
            status = _run_cell(body.decode("utf-8", "surrogatepass"), f"<cell {number}>", vars(main))
        finally:
            for stream in (sys.stdout, sys.stderr, *streams):
                _flush(stream)
            if os.getpid() != pid:  # the cell forked, and this is the child: it must not answer
                leave(0)
        write(fd, wire.pack({"status": status}))
    leave(0)
