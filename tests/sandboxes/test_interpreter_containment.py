"""Case E4: what a cell starts neither stalls nor outlives the call, and bombs and floods stay inside."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from sandboxes.base import Limits, PythonSession
from sandboxes.pool import PythonPool

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS = Limits(wall_clock_s=15, memory_bytes=300 * 2**20, processes=16, file_bytes=16 * 2**20, output_bytes=10_000)


@pytest_asyncio.fixture(params=["bubblewrap", "process"], scope="module", loop_scope="module")
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[PythonPool]:
    async with PythonPool(request.param, LIMITS, spares=1) as pool:
        yield pool


def seconds_nobody_else_sleeps() -> str:
    return f"{random.randrange(10**6, 10**7)}.{random.randrange(10**6)}"


def running_with(argument: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if argument in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


GRANDCHILDREN = {
    "popen": "import subprocess; p = subprocess.Popen(['sleep', '{s}'])",
    "popen that holds the pipe": "import subprocess; p = subprocess.Popen(['sleep', '{s}'], close_fds=False)",
    "shell background": "import os; os.system('sleep {s} &')",
    "double fork and setsid": (
        "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        os.execvp('sleep', ['sleep', '{s}'])\n    os._exit(0)\nos.wait() and None"
    ),
    "nohup": "import os; os.system('nohup setsid sleep {s} >/dev/null 2>&1 &')",
    "ignores signals": "import subprocess; p = subprocess.Popen(['sh', '-c', 'trap \"\" 1 2 15; sleep {s} & wait'])",
    "multiprocessing": (
        "import multiprocessing, os\n"
        "p = multiprocessing.Process(target=os.execvp, args=('sleep', ['sleep', '{s}']))\np.start()"
    ),
}


@pytest.mark.parametrize("code", GRANDCHILDREN.values(), ids=list(GRANDCHILDREN))
async def test_a_grandchild_neither_stalls_nor_outlives_the_call(python: PythonSession, code: str) -> None:
    """Case E4: Popen(['sleep', '8']), a double fork with setsid, and their kin."""
    await python.run("kept = 'kept'")
    argument = seconds_nobody_else_sleeps()
    result = await python.run(code.replace("{s}", argument))
    assert result.status == "ok", result
    assert result.duration_s < 5
    assert running_with(argument) == []
    assert (await python.run("kept")).output == "'kept'\n"


async def test_a_grandchild_does_not_outlive_a_call_that_times_out(python: PythonSession) -> None:
    """Case E4, on the way of E2."""
    argument = seconds_nobody_else_sleeps()
    seen: list[psutil.Process] = []

    async def look() -> None:
        while not seen:
            seen.extend(running_with(argument))
            await asyncio.sleep(0.02)

    code = f"import os, time\nos.system('setsid sleep {argument} &')\nwhile True:\n    time.sleep(1)"
    result, _ = await asyncio.gather(python.run(code, timeout_s=1), asyncio.wait_for(look(), 10))
    assert result.status == "timeout"
    assert seen  # it did run
    assert running_with(argument) == []


async def test_between_calls_nothing_runs(python: PythonSession) -> None:
    """Case E4: a thread that the cell left behind stands still until the next call."""
    code = "import threading, time\nn = 0\ndef count():\n    global n\n    while True:\n        n += 1\n"
    await python.run(code + "threading.Thread(target=count, daemon=True).start()\ntime.sleep(0.05)")
    before = int((await python.run("n")).output)
    await asyncio.sleep(0.3)
    at_once = int((await python.run("n")).output)
    running = int((await python.run("a = n; time.sleep(0.3); n - a")).output)
    assert before > 0
    assert at_once - before < running / 2


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True:\n    os.fork()",
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "import os\nos.system(':(){ :|:& };:')\nwhile True: pass",
        "import os\nos.system('f() { f | f & }; f; sleep 60')\nwhile True: pass",
        "import os\ndef f():\n    while True:\n        if os.fork() == 0:\n            os.setsid()\nf()",
    ],
)
async def test_a_fork_bomb_is_contained(pool: PythonPool, python: PythonSession, code: str) -> None:
    """Case E4: few processes, all gone afterwards; a neighbour goes on."""
    neighbour = await pool.session()
    me, most = psutil.Process(), 0
    before = len(me.children(recursive=True))

    async def look() -> None:
        nonlocal most
        while True:
            most = max(most, len(me.children(recursive=True)))
            await asyncio.sleep(0.02)

    looking = asyncio.create_task(look())
    result = await python.run(code, timeout_s=1)
    looking.cancel()
    assert result.status in ("error", "timeout", "died"), result
    assert most - before < 5 * LIMITS.processes
    assert (await neighbour.run("6 * 7")).output == "42\n"
    assert (await python.run("6 * 7")).output == "42\n"
    await neighbour.close()


@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(10**12)",
        "x = []\nwhile True:\n    x.append(bytearray(2**20))",
        "x = ['a' * 10**6] * 10**9",
        "x = 'a'\nwhile True:\n    x += x",
        "list(range(10**10))",
    ],
)
async def test_a_memory_bomb_is_contained(python: PythonSession, code: str) -> None:
    """Case E4: the limit meets the code, not the machine."""
    result = await python.run(code, timeout_s=10)
    assert (result.status == "error" and "MemoryError" in result.output) or result.state_lost, result
    assert (await python.run("1")).output == "1\n"


async def test_many_small_memory_bombs_are_contained_together(python: PythonSession) -> None:
    """Case E4: each process stays under the limit, all together do not; the supervisor adds them up."""
    code = (
        "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        x = bytearray(100 * 2**20)\n"
        "        time.sleep(30)\ntime.sleep(30)"
    )
    result = await python.run(code)
    assert result.status == "died"
    assert "memory limit of 300 MiB" in result.output
    assert result.duration_s < 10


@pytest.mark.parametrize(
    "code",
    [
        "while True:\n    print('flood ' * 1000)",
        "import os\nwhile True:\n    os.write(1, b'flood ' * 10000)",
        "import os\nwhile True:\n    os.write(2, b'flood ' * 10000)",
        "import os\nprint('flood')\nos.system('yes flood')",
        "import sys\nwhile True:\n    sys.stdout.write('flood ')",
    ],
)
async def test_a_flood_of_output_is_capped_while_it_is_read(python: PythonSession, code: str) -> None:
    """Case E4: 169 MB/s of output cost the caller nothing; head and tail are kept, the cut is announced."""
    before = psutil.Process().memory_info().rss
    begun = time.process_time()
    result = await python.run("print('the head')\n" + code, timeout_s=1)
    assert time.process_time() - begun < 0.5
    assert result.status == "timeout"
    assert len(result.output.encode()) < LIMITS.output_bytes + 500
    assert result.output.startswith("the head\n")
    assert "bytes of output cut here" in result.output
    assert psutil.Process().memory_info().rss - before < 20 * 2**20
    assert (await python.run("1")).output == "1\n"


async def test_head_and_tail_of_long_output_are_kept(python: PythonSession) -> None:
    """Case E4: exactly the middle is missing, told in bytes, and no character is cut in half."""
    result = await python.run("print('begin', '漢' * 20000, 'end')")
    head, _, rest = result.output.partition("\n[... ")
    number, _, tail = rest.partition(" bytes of output cut here ...]\n")
    assert head.startswith("begin 漢")
    assert tail.endswith("漢 end\n")
    assert "\ufffd" not in result.output
    assert len(head.encode()) + int(number) + len(tail.encode()) == len("begin ") + 60_000 + len(" end\n")
    short = await python.run(f"print('x' * {LIMITS.output_bytes - 1})")
    assert "cut" not in short.output  # exactly at the limit


async def test_files_have_a_largest_size(python: PythonSession) -> None:
    """Case E4: a file cannot fill the disk."""
    result = await python.run("with open('big', 'wb') as f:\n    for _ in range(64):\n        f.write(bytes(2**20))")
    assert result.status == "error"
    assert "File too large" in result.output or "No space left" in result.output
    assert (await python.run("import os; os.path.getsize('big') <= 16 * 2**20")).output == "True\n"


async def test_two_sessions_share_nothing(pool: PythonPool) -> None:
    """Files, modules, random numbers, working folders: one episode does not see another's, or an earlier one's."""
    first = await pool.session()
    await first.run("import math, json\nmath.pi = 3\njson.loads = None\nopen('trace', 'w').write('x')\nimport builtins")
    await first.run("builtins.open = None\nimport random\nvalue = random.random()")
    drawn = (await first.run("value")).output
    second = await pool.session()
    third = await pool.session()
    for session in (second, third):
        seen = await session.run("import math, json, os\nmath.pi > 3.1, json.loads('1'), os.path.exists('trace')")
        assert seen.output == "(True, 1, False)\n"
        assert (await session.run("import random; random.random()")).output != drawn
    await first.close()
    await second.close()
    await third.close()


ISOLATION = {
    "network": "import socket\nsocket.create_connection(('1.1.1.1', 80), timeout=2)",
    "the disk": "open('/usr/x', 'w')",
    "the root folder": "open('/x', 'w')",
    "devices": "open('/dev/x', 'w')",
    "code of the sandbox": "open('/opt/sandbox/inside/x', 'w')",
    "homes": f"import os\nos.listdir({os.path.dirname(os.path.abspath(__file__))!r})",
    "secrets": "open('/etc/shadow').read()",
    "the supervisor": "open('/proc/1/mem', 'rb').read(1)",
    "the supervisor's descriptors": "import os\nos.listdir('/proc/1/fd')",
    "kernel settings": "open('/proc/sys/kernel/hostname', 'w').write('x')",
    "mounts": "import ctypes\nif ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None): raise OSError",
    "namespaces": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError",
    "root": "import os\nos.setuid(0)",
}


@pytest.mark.parametrize("code", ISOLATION.values(), ids=list(ISOLATION))
async def test_bubblewrap_keeps_code_away_from(pool: PythonPool, python: PythonSession, code: str) -> None:
    """What the bubblewrap backend promises to isolate."""
    if pool.backend != "bubblewrap":
        pytest.skip("the process backend makes no such promise")
    result = await python.run(code, timeout_s=5)
    assert result.status == "error", result
    assert "Error" in result.output


async def test_bubblewrap_sessions_have_no_meeting_place(pool: PythonPool) -> None:
    """/tmp, /dev/shm, shared memory, sockets with abstract names, process ids: each session has its own."""
    if pool.backend != "bubblewrap":
        pytest.skip("the process backend makes no such promise")
    leave = """
import os, socket, ctypes, glob
open('/tmp/a', 'w').write('x'); open('/dev/shm/a', 'w').write('x')
s = socket.socket(socket.AF_UNIX); s.bind('\\0meet'); s.listen()
ctypes.CDLL(None).shmget(4711, 4096, 0o1666) >= 0  # refused to all: it would outlive its call
"""
    look = """
import os, socket, ctypes, glob
def reach():
    s = socket.socket(socket.AF_UNIX)
    try: s.connect('\\0meet')
    except OSError: return False
    return True
ids = sorted(int(p) for p in os.listdir('/proc') if p.isdigit())
glob.glob('/tmp/*') + glob.glob('/dev/shm/*'), reach(), ctypes.CDLL(None).shmget(4711, 4096, 0), ids
"""
    first, second = await pool.session(), await pool.session()
    assert (await first.run(leave)).output == "False\n"
    assert (await second.run(look)).output == "([], False, -1, [1, 2])\n"
    await first.close()
    third = await pool.session()
    assert (await third.run(look)).output == "([], False, -1, [1, 2])\n"
    await second.close()
    await third.close()
