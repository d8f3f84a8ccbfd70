"""Cases J1, J2 and J5: what the kernel refuses to code inside, how memory is held, and what cannot be imported."""

from __future__ import annotations

import ctypes
import glob
import logging
import os
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from benchmarks.memory_attacks import ATTACKS, attack
from envs.python_tir.env import PythonTIR
from sandboxes import zygote
from sandboxes.base import Limits, PythonSession, SandboxFault
from sandboxes.memory_groups import Hierarchy, hierarchy
from sandboxes.pool import PythonPool
from sandboxes.syscall_filter import SyscallFilter, syscall_filter

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS = Limits(wall_clock_s=15, memory_bytes=200 * 2**20, processes=16, file_bytes=64 * 2**20)


@pytest_asyncio.fixture(params=["bubblewrap", "process"], scope="module", loop_scope="module")
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[PythonPool]:
    async with PythonPool(request.param, LIMITS, spares=1) as pool:
        yield pool


CALLS = """
import ctypes, errno, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    if libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)) < 0:
        return errno.errorcode[ctypes.get_errno()]
"""
# x86_64's numbers.
REFUSED = {
    "add_key": "call(248, 0, 0, 0, 0, -3)",
    "request_key": "call(249, 0, 0, 0, -3)",
    "keyctl": "call(250, 0, -3, 0)",
    "io_uring_setup": "call(425, 8, 0)",
    "io_uring_enter": "call(426, 0)",
    "io_uring_register": "call(427, 0)",
    "bpf": "call(321, 0, 0, 0)",
    "userfaultfd": "call(323, 0)",
    "memfd_create": "call(319, id(b'x') + 32, 0)",
    "memfd_secret": "call(447, 0)",
    "shmget": "call(29, 0, 4096, 0o1600)",
    "shmat": "call(30, 0, 0, 0)",
    "msgget": "call(68, 0, 0o1600)",
    "semget": "call(64, 0, 1, 0o1600)",
    "ptrace": "call(101, 0, 0, 0, 0)",
    "process_vm_readv": "call(310, os.getpid(), 0, 0, 0, 0, 0)",
    "perf_event_open": "call(298, 0, 0, 0, 0, 0)",
    "open_by_handle_at": "call(304, 0, 0, 0)",
    "kexec_load": "call(246, 0, 0, 0, 0)",
    "unshare": "call(272, 0x10000000)",
    "clone into namespaces": "call(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "clone3": "call(435, 0, 0)",
    "mount": "call(165, 0, 0, 0, 0, 0)",
    "fsopen": "call(430, 0, 0)",
    "vsock": "call(41, 40, 1, 0)",
    "vsock in another guise": "call(41, 40 + 2**32, 1, 0)",
    "packets": "call(41, 17, 3, 0)",
    "the kernel's ciphers": "call(41, 38, 5, 0)",
    "typing into a terminal": "call(16, 0, 0x5412, 0)",
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
@pytest.mark.parametrize("code", REFUSED.values(), ids=list(REFUSED))
async def test_the_kernel_refuses(python: PythonSession, code: str) -> None:
    """Case J1: by an error, not by a kill; the interpreter lives."""
    assert syscall_filter().missing == ""
    result = await python.run(CALLS + code)
    assert result.output in ("'EPERM'\n", "'ENOSYS'\n"), result
    assert (await python.run("1")).output == "1\n"


async def test_a_program_that_cells_start_is_behind_the_filter_too(python: PythonSession) -> None:
    """Case J1: what is executed inherits it, and cannot take it off."""
    code = "import subprocess\nsubprocess.run(['grep', 'Seccomp:', '/proc/self/status'], capture_output=True).stdout"
    assert "Seccomp:\\t2" in (await python.run(code)).output


async def test_what_programs_need_goes_through(python: PythonSession) -> None:
    """Case J1: threads, programs, process pools, sockets, event loops, shared arrays."""
    code = """
import asyncio, multiprocessing, socket, subprocess, threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
with ThreadPoolExecutor(2) as threads, ProcessPoolExecutor(2) as processes:
    print(list(threads.map(abs, [-1, -2])), list(processes.map(abs, [-3])))
print(subprocess.run(['sh', '-c', 'echo a | cat'], capture_output=True, text=True).stdout.strip())
async def f():
    process = await asyncio.create_subprocess_exec('true')
    return await process.wait()
print(asyncio.run(f()), multiprocessing.Array('i', 3)[:], multiprocessing.Semaphore(1).acquire())
a, b = socket.socketpair(); a.send(b'x'); b.recv(1)
"""
    result = await python.run(code)
    assert result.output == "[1, 2] [3]\na\n0 [0, 0, 0] True\nb'x'\n", result


async def test_a_sandbox_has_a_keyring_of_its_own() -> None:
    """Case J1: also where there is no filter, no session keyring is the caller's or another sandbox's."""
    code = CALLS + "libc.syscall(250, 0, -3, 1)"  # the number of the session keyring
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zygote, "syscall_filter", lambda: SyscallFilter(missing="no filter, in a test"))
        async with PythonPool("process", LIMITS, spares=0) as pool:
            rings = [int((await (await pool.session()).run(code)).output) for _ in range(2)]
    rings.append(ctypes.CDLL(None).syscall(250, 0, ctypes.c_long(-3), 1))
    assert min(rings[:2]) > 0
    assert len(set(rings)) == 3


@pytest.mark.parametrize("grouped", [True, False], ids=["by the kernel", "by the supervisor"])
@pytest.mark.parametrize("code", ATTACKS.values(), ids=list(ATTACKS))
async def test_the_memory_limit_holds(code: str, grouped: bool) -> None:
    """Case J2: whatever way is taken, what lies below this process stays under the limit, and nothing stays after."""
    if grouped and hierarchy().missing:
        pytest.skip(hierarchy().missing)
    held = await attack(code, LIMITS, grouped=grouped)
    # Without the kernel's help ten processes that grow at once go beyond by what they add between two looks.
    assert held.most < (1.2 if code == ATTACKS["many processes"] and not grouped else 1.1)
    assert held.left < 0.05
    assert held.result.duration_s < 10


async def test_no_group_is_left() -> None:
    """Case J2: neither after a close, nor after an interpreter that was lost."""
    if hierarchy().missing:
        pytest.skip(hierarchy().missing)
    pattern = f"{hierarchy().folder}/sao-sandbox-{os.getpid()}-*"
    before = set(glob.glob(pattern))
    async with PythonPool("bubblewrap", LIMITS, spares=2) as pool:
        session = await pool.session()
        assert set(glob.glob(pattern)) - before
        await session.run("import os; os._exit(1)")
        await session.close()
    assert set(glob.glob(pattern)) - before == set()


@pytest.mark.parametrize(
    "name", ["reasoning_gym", "envs", "learner", "agent", "sandboxes", "datasets", "math_verify", "swebench", "pytest"]
)
async def test_what_holds_answers_cannot_be_imported(python: PythonSession, name: str) -> None:
    """Case J5."""
    result = await python.run(f"import {name}")
    assert f"ModuleNotFoundError: No module named '{name}'" in result.output


@pytest.mark.parametrize("name", ["numpy", "sympy", "mpmath"])
async def test_what_mathematics_needs_is_there(python: PythonSession, name: str) -> None:
    """Case J5: as before."""
    assert (await python.run(f"import {name}\n{name}.sqrt(4) == 2", timeout_s=15)).output.strip() in (
        "True",
        "np.True_",
    )


async def test_no_file_of_what_holds_answers_lies_inside(pool: PythonPool, python: PythonSession) -> None:
    """Case J5: not to be read either, where files are isolated; commands and other Pythons see none as well."""
    if pool.backend != "bubblewrap":
        pytest.skip("the process backend isolates no files")
    code = """
import os
names = {'reasoning_gym', 'envs', 'learner', 'swe_bench', 'math_verify', 'torch'}
[path for path, folders, _ in os.walk('/') if names & {*folders} and not path.startswith('/proc')]
"""
    assert (await python.run(code)).output == "[]\n"


async def test_packages_are_added_by_name() -> None:
    """Case J5: the key to widen the list; a name that is not there is told at once."""
    for backend in ("bubblewrap", "process"):
        async with PythonPool(backend, spares=0, packages=("iniconfig",)) as pool:
            session = await pool.session()
            assert (await session.run("import iniconfig; iniconfig.__name__")).output == "'iniconfig'\n"
            assert "ModuleNotFoundError" in (await session.run("import pytest")).output
    with pytest.raises(ValueError, match=r"packages: .*no_such_package.*not installed"):
        PythonTIR(packages=["no_such_package"])
    with pytest.raises(ValueError, match="packages must be a list of names"):
        PythonTIR(packages="iniconfig")
    with pytest.raises(SandboxFault, match=r"no_such_package.*not installed"):
        await PythonPool("process", packages=["no_such_package"]).session()


async def test_what_is_missing_is_said_once_and_the_rest_holds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Case J1: by name, with what to do; sandboxes work on."""
    monkeypatch.setattr(zygote, "syscall_filter", lambda: SyscallFilter(missing="no filter: libseccomp is not there"))
    monkeypatch.setattr(zygote, "hierarchy", lambda: Hierarchy(missing="no control group: read-only"))
    monkeypatch.setattr(zygote, "_told", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            async with PythonPool("bubblewrap", LIMITS, spares=0) as pool:
                session = await pool.session()
                assert (await session.run("6 * 7")).output == "42\n"
                assert "Seccomp:\\t0" in (await session.run("open('/proc/self/status').read()")).output
    said = [record.getMessage() for record in caplog.records if record.name == "sandboxes.zygote"]
    assert said == ["sandboxes have no filter: libseccomp is not there", "sandboxes have no control group: read-only"]


async def test_without_the_binding_the_reason_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case J1: a Python without the package says which one, and how the library is installed."""
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    missing = syscall_filter.__wrapped__().missing
    assert "pyseccomp is not installed" in missing
    assert "apt-get install libseccomp2" in missing
