"""The shell that agents get without OpenHands: what lasts between calls, what does not, and mistakes told in words."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from envs.swe_bench.demo.build import ensure_demo_image
from envs.swe_bench.scaffolds.bash import BashScaffold
from envs.swe_bench.scaffolds.choice import make_scaffold
from envs.swe_bench.scaffolds.scaffold import Scaffold
from sandboxes.base import SandboxFault
from sandboxes.docker.sandbox import DockerSandbox
from sandboxes.docker.settings import DockerSettings

pytestmark = [
    pytest.mark.docker,
    pytest.mark.xdist_group("demo-images"),
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

LIMIT_S = 60.0


class Shell:
    """A scaffold that is open in a container, for tests: `await shell(command)` is the observation."""

    def __init__(self, scaffold: BashScaffold, sandbox: DockerSandbox) -> None:
        self.scaffold, self.sandbox = scaffold, sandbox

    async def __call__(self, command: str, timeout_s: float = LIMIT_S) -> str:
        outcome = await self.scaffold.call("bash", {"command": command}, timeout_s=timeout_s)
        assert not outcome.finished
        return outcome.text


# One container for all tests that leave it whole, and a shell of its own for each of them. In /, because a command can
# remove its image's own folder, and the engine starts nothing in a folder that is gone.
@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def container() -> AsyncIterator[DockerSandbox]:
    async with DockerSandbox(await ensure_demo_image("tablet"), settings=DockerSettings(workdir="/")) as sandbox:
        yield sandbox


@pytest_asyncio.fixture(loop_scope="module")
async def shell(container: DockerSandbox) -> AsyncIterator[Shell]:
    scaffold = BashScaffold(output_bytes=2000)
    await scaffold.open(container, "/testbed")
    yield Shell(scaffold, container)
    await scaffold.close()


@pytest_asyncio.fixture(loop_scope="module")
async def own_shell() -> AsyncIterator[Shell]:
    """In a container that the test may break."""
    async with DockerSandbox(await ensure_demo_image("tablet"), settings=DockerSettings(workdir="/")) as sandbox:
        scaffold = BashScaffold()
        await scaffold.open(sandbox, "/testbed")
        yield Shell(scaffold, sandbox)
        await scaffold.close()


async def test_state_lasts_from_call_to_call(shell: Shell) -> None:
    assert await shell("pwd") == "/testbed\n[exit 0]"
    await shell("cd tests; X='a  b'; export Y=$'one\\ntwo'; list=(1 '2 3'); greet() { echo hello $1; }")
    assert (
        await shell('pwd; echo "$X"; echo "${list[1]}"; greet you') == "/testbed/tests\na  b\n2 3\nhello you\n[exit 0]"
    )
    assert await shell('python3 -c \'import os; print(repr(os.environ["Y"]), "X" in os.environ)\'') == (
        "'one\\ntwo' False\n[exit 0]"
    )
    assert await shell("cd -") == "/testbed\n[exit 0]"
    assert await shell("unset Y X; pwd") == "/testbed\n[exit 0]"
    assert await shell("echo ${X-no} ${Y-no}") == "no no\n[exit 0]"


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("exit 3", "[exit 3]"),
        ("set -e; A=1; false; echo not reached", "[exit 1]"),
        ("ls /nowhere", "ls: cannot access '/nowhere': No such file or directory\n[exit 2]"),
        ("nothing", "bash: line 1: nothing: command not found\n[exit 127]"),
        ("echo out; echo err >&2; echo out", "out\nerr\nout\n[exit 0]"),
        ("set -x; echo traced", "++ echo traced\ntraced\n[exit 0]"),
        ("cat <<'E'\n$X `y`\nE", "$X `y`\n[exit 0]"),
        ("cat", "[exit 0]"),
        ("exec echo replaced", "replaced\n[exit 0]"),
        ("kill -9 $$", "[exit 137]"),
        ("printf 'né\\xff\\n'", "né\ufffd\n[exit 0]"),
        ("echo ü\ud800", "ü?\n[exit 0]"),
    ],
)
async def test_how_a_command_ended_is_said(shell: Shell, command: str, text: str) -> None:
    await shell("export MARK_OF_TEST=here; cd tests")
    observed = await shell(command)
    assert observed == text or (command == "kill -9 $$" and observed.endswith(text))
    assert await shell("echo $MARK_OF_TEST; pwd") == "here\n/testbed/tests\n[exit 0]"


async def test_syntax_error_is_an_observation(shell: Shell) -> None:
    observed = await shell("if then")
    assert "syntax error" in observed
    assert observed.endswith("[exit 2]")
    assert "sao" not in observed


async def test_call_that_never_returns(shell: Shell) -> None:
    """Case F5 through the tool: at the time limit nothing of the call is left, and the shell is as before it."""
    await shell("KEPT=yes")
    begin = time.monotonic()
    observed = await shell("KEPT=no; cd /; echo begun; setsid sleep 4242 & sleep 4242", timeout_s=10)
    assert time.monotonic() - begin < 60
    assert observed.startswith("begun\n[stopped after 10 s: ")
    assert await shell("pgrep -f '[s]leep 4242'; echo $KEPT; pwd") == "yes\n/testbed\n[exit 0]"


async def test_processes_end_with_their_call(shell: Shell) -> None:
    assert await shell("sleep 4343 & nohup sleep 4343 >/dev/null 2>&1 & echo started") == "started\n[exit 0]"
    assert await shell("pgrep -f '[s]leep 4343'") == "[exit 1]"


async def test_long_output_keeps_head_and_tail(shell: Shell) -> None:
    observed = await shell("echo first; head -c 10000000 /dev/zero | tr '\\0' x; echo; echo last")
    assert observed.startswith("first\nx")
    assert observed.endswith("x\nlast\n[exit 0]")
    assert "bytes of output cut here" in observed
    assert len(observed) < 2200


async def test_long_command(shell: Shell) -> None:
    """Longer than an argument may be."""
    text = "x" * 200_000
    assert await shell(f"text={text}\necho ${{#text}}") == "200000\n[exit 0]"
    assert await shell("echo ${#text}") == "200000\n[exit 0]"


async def test_shell_outlives_what_an_agent_does_to_it(own_shell: Shell) -> None:
    await own_shell(
        "mv() { echo mine; }; cat() { echo mine; }; declare() { :; }; PATH=/nowhere; readonly FIXED=1; "
        "trap 'echo bye' EXIT"
    )
    assert await own_shell("echo $PATH $FIXED; cat") == "/nowhere 1\nmine\n[exit 0]"
    await own_shell("PATH=/usr/bin:/bin; unset -f cat mv declare; mkdir /tmp/gone; cd /tmp/gone")
    await own_shell("rm -rf /tmp/gone")
    assert await own_shell("pwd") == "/testbed\n[exit 0]"
    await own_shell("rm -rf /tmp/.* /testbed")
    assert await own_shell("pwd") == "/\n[exit 0]"


async def test_repository_holds_nothing_of_the_shell(shell: Shell) -> None:
    """Case F2: nothing the environment itself made is in the patch."""
    await shell("X=1; cd tests; ls")
    assert await shell("git status --porcelain --ignored --untracked-files=all") == "[exit 0]"


async def test_submit_ends(shell: Shell) -> None:
    outcome = await shell.scaffold.call("submit", {}, timeout_s=LIMIT_S)
    assert outcome.finished


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("python", {"code": "1"}, "The tools are bash (argument: command) and submit"),
        ("bash", {}, "needs the argument command"),
        ("bash", {"command": 5}, "needs the argument command"),
        ("bash", {"command": "  \n"}, "The command is empty"),
        ("bash", {"command": "ls", "timeout": 5}, "it has no 'timeout'"),
        ("bash", {"command": "echo \0"}, "NUL"),
        ("submit", {"message": "done"}, "submit takes no argument"),
    ],
)
async def test_mistake_is_told_in_words(shell: Shell, name: str, arguments: dict[str, object], words: str) -> None:
    outcome = await shell.scaffold.call(name, arguments, timeout_s=LIMIT_S)
    assert words in outcome.text
    assert not outcome.finished


async def test_container_that_is_gone_is_a_fault(own_shell: Shell) -> None:
    engine = own_shell.sandbox.engine
    await engine.call(lambda: engine.client.api.kill(own_shell.sandbox.id))
    with pytest.raises(SandboxFault):
        await own_shell("ls")


async def test_folder_that_is_not_there_is_a_fault(container: DockerSandbox) -> None:
    with pytest.raises(SandboxFault, match="no folder /nowhere"):
        await BashScaffold().open(container, "/nowhere")


async def test_opening_does_not_read_the_issue_as_a_template() -> None:
    scaffold: Scaffold = make_scaffold("bash")
    system, user = scaffold.opening("f'{workdir}' {0} %s fails\n", "/testbed")
    assert system["role"] == "system"
    assert user["content"].endswith("Fix this issue:\n\nf'{workdir}' {0} %s fails")
    assert "/testbed" in user["content"]
    assert [tool["function"]["name"] for tool in scaffold.tools] == ["bash", "submit"]
