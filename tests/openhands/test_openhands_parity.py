"""One scripted conversation through OpenHands' own loop on this machine, and through the scaffold in a container.

The model of OpenHands' loop is a server on loopback that answers with the script, so what is compared is what a model
would have read: system prompt, tool schemas, and the tool message of each call.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.sdk.event import ObservationEvent
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.task_tracker import TaskTrackerTool
from openhands.tools.terminal import TerminalTool

from envs.swe_bench.scaffolds.openhands.scaffold import OpenHandsScaffold
from sandboxes.docker.sandbox import DockerSandbox

pytestmark = [pytest.mark.openhands, pytest.mark.docker, pytest.mark.timeout(900), pytest.mark.xdist_group("openhands")]

NO_CHANGE_S = 2
# What a model takes to answer. OpenHands asks the shell for a prompt after each command and does not wait for it.
THINKING_S = 0.25

Call = tuple[str, dict[str, Any]]


def terminal(command: str, **more: Any) -> Call:
    return "terminal", {"command": command, **more}


def editor(command: str, path: str, **more: Any) -> Call:
    return "file_editor", {"command": command, "path": path, **more}


def script(repo: str) -> list[Call]:
    """Every call of the conversation, in order; each is one turn of the model."""
    a = f"{repo}/pkg/a.py"
    return [
        # The shell: folder, variables, exit codes, output long and wide.
        terminal("pwd; ls"),
        terminal("cd pkg && export GREETING='hello world' && local_one=1"),
        terminal('pwd; echo "$GREETING $local_one"'),
        terminal("cat missing-file"),
        terminal("false"),
        terminal("this-command-does-not-exist --now"),
        terminal("echo to stderr >&2; (exit 7)"),
        terminal("seq 1 20000"),
        terminal("python3 -c \"print('x' * 100000)\""),
        terminal("for i in 1 2 3; do\n  echo line $i\ndone"),
        terminal("cat <<'EOF' > notes.txt\n" + "\n".join(f"row {i} $HOME `x`" for i in range(60)) + "\nEOF"),
        terminal("wc -l notes.txt; tail -1 notes.txt; rm notes.txt"),
        terminal("echo a long line that does not fit into eighty columns " + "word " * 40 + "| wc -w"),
        terminal("echo naïve — 日本語"),
        terminal("printf 'no line feed'"),
        terminal("printf '\\033[31mred\\033[0m and a\\ttab\\n'"),
        terminal("echo one\necho two"),
        terminal("cd .."),
        terminal("git --version >/dev/null && git init -q . && git add -A && git status --short | head -3"),
        # Commands that take long.
        terminal("sleep 60", timeout=1),
        terminal("echo not now"),
        terminal(""),
        terminal("C-c", is_input=True),
        terminal("python3 -c \"name = input('name? '); print('hello', name)\"", timeout=2),
        terminal("Ada", is_input=True),
        terminal("cat", timeout=1),
        terminal("typed into cat", is_input=True),
        terminal("C-d", is_input=True),
        terminal("echo before; sleep 60"),
        terminal("C-c", is_input=True),
        terminal("C-c", is_input=True),
        terminal(""),
        # Mistakes.
        terminal("echo x", reset=True, is_input=True),
        ("terminal", {}),
        ("terminal", {"command": "ls", "colour": "red"}),
        ("terminal", {"command": "ls", "timeout": "soon"}),
        terminal('{"command": "ls"}'),
        ("paint", {"colour": "red"}),
        ("execute_bash", {"command": "echo by its old name"}),
        terminal("echo $GREETING", reset=True),
        ("terminal", {"command": "echo said", "summary": "Say it", "security_risk": "LOW"}),
        # The editor: views.
        editor("view", repo),
        editor("view", f"{repo}/many"),
        editor("view", f"{repo}/empty-folder"),
        editor("view", repo, view_range=[1, 2]),
        editor("view", a),
        editor("view", a, view_range=[2, 4]),
        editor("view", a, view_range=[18, 40]),
        editor("view", a, view_range=[5, -1]),
        editor("view", a, view_range=[9, 3]),
        editor("view", a, view_range=[90, 99]),
        editor("view", a, view_range="[2, 3]"),
        editor("view", f"{repo}/long.txt"),
        editor("view", f"{repo}/empty.txt"),
        editor("view", f"{repo}/binary.bin"),
        editor("view", f"{repo}/picture.png"),
        editor("view", f"{repo}/large.txt"),
        editor("view", f"{repo}/latin1.txt"),
        editor("view", f"{repo}/crlf.txt"),
        editor("view", f"{repo}/link.py"),
        editor("view", f"{repo}/dangling"),
        editor("view", f"{repo}/pkg/../pkg/a.py", view_range=[1, 1]),
        editor("view", f"{repo}/no such file.py"),
        editor("view", "pkg/a.py"),
        editor("view", "nowhere/a.py"),
        editor("view", ""),
        # The editor: changes.
        editor("str_replace", a, old_str="value_3 = 3\n", new_str="value_3 = 33\nvalue_3b = 34\n"),
        editor("str_replace", a, old_str="value_", new_str="x"),
        editor("str_replace", a, old_str="not in it", new_str="x"),
        editor("str_replace", a, old_str="value_5 = 5", new_str="value_5 = 5"),
        editor("str_replace", a, old_str="value_7 = 7\n"),
        editor("str_replace", a, old_str="value_7 = 7"),
        editor("str_replace", a, new_str="x"),
        editor("str_replace", f"{repo}/missing.py", old_str="a", new_str="b"),
        editor("str_replace", repo, old_str="a", new_str="b"),
        editor("str_replace", f"{repo}/latin1.txt", old_str="caf", new_str="Caf"),
        editor("str_replace", f"{repo}/crlf.txt", old_str="second", new_str="2nd"),
        editor("str_replace", f"{repo}/link.py", old_str="value_1 = 1", new_str="value_1 = 11"),
        editor("str_replace", f"{repo}/run.sh", old_str="echo", new_str="echo -n"),
        editor("insert", a, insert_line=0, new_str="# first line"),
        editor("insert", a, insert_line=2, new_str="# two\n# lines"),
        editor("insert", a, insert_line=900, new_str="x"),
        editor("insert", a, insert_line=-1, new_str="x"),
        editor("insert", a, new_str="x"),
        editor("insert", a, insert_line=1),
        editor("undo_edit", a),
        editor("undo_edit", a),
        editor("undo_edit", a),
        editor("undo_edit", a),
        editor("undo_edit", f"{repo}/long.txt"),
        editor("create", f"{repo}/pkg/new file [1].py", file_text="print('ü')\n"),
        editor("create", f"{repo}/pkg/new file [1].py", file_text="again"),
        editor("create", f"{repo}/no/folder/new.py", file_text="x"),
        editor("create", f"{repo}/long.txt/new.py", file_text="x"),
        editor("create", repo, file_text="x"),
        editor("create", f"{repo}/pkg/other.py"),
        editor("undo_edit", f"{repo}/pkg/new file [1].py"),
        editor("paint", a),
        ("file_editor", {"path": a}),
        ("str_replace_editor", {"command": "view", "path": a, "view_range": [1, 1]}),
        ("file_editor", {}),
        # What the shell does, the editor sees, and the other way round.
        terminal("git diff --stat; cat 'pkg/new file [1].py'; sed -i 's/value_9 = 9/value_9 = 99/' pkg/a.py"),
        editor("view", a, view_range=[8, 10]),
        # The rest.
        ("think", {"thought": "It is the sum that is wrong."}),
        ("think", {}),
        ("task_tracker", {"command": "view"}),
        (
            "task_tracker",
            {"command": "plan", "task_list": [{"title": "Look", "status": "done"}, {"title": "Fix", "notes": "soon"}]},
        ),
        ("task_tracker", {"command": "view"}),
        ("task_tracker", {"command": "plan", "task_list": [{"title": "Look", "status": "later"}]}),
        ("finish", {"message": "All is fixed."}),
    ]


DIFFERENT: dict[int, str] = {}
"""Calls whose observation may differ, by their place in the script, and why."""


def plant(repo: Path) -> None:
    """The tree that both work on."""
    for folder in ("pkg", "many", "empty-folder", ".hidden"):
        (repo / folder).mkdir(parents=True)
    (repo / "pkg/a.py").write_text("".join(f"value_{i} = {i}\n" for i in range(1, 21)))
    for i in range(250):
        (repo / f"many/a_file_with_quite_a_long_name_number_{i:04}.txt").write_text("")
    (repo / "many/below/twice").mkdir(parents=True)
    (repo / "many/below/b.txt").write_text("b")
    (repo / "long.txt").write_text("".join(f"{i} {'lorem ipsum ' * 4}\n" for i in range(1000)))
    (repo / "empty.txt").write_text("")
    (repo / "binary.bin").write_bytes(bytes(range(256)) * 8)
    (repo / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    (repo / "large.txt").write_bytes(b"0123456789abcde\n" * 700_000)
    (repo / "latin1.txt").write_bytes("le café est à côté de la forêt\n".encode("latin-1") * 20)
    (repo / "crlf.txt").write_bytes(b"first\r\nsecond\r\nthird\r\n")
    (repo / "run.sh").write_text("#!/bin/sh\necho run\n")
    (repo / "run.sh").chmod(0o755)
    (repo / "link.py").symlink_to("pkg/a.py")
    (repo / "dangling").symlink_to("nothing-here")


def packed(repo: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(repo, repo.name)
    return buffer.getvalue()


def contents(tar: bytes) -> dict[str, tuple[Any, ...]]:
    """Names, kinds, modes and bytes of what is in an archive, but for git's own folder."""
    found: dict[str, tuple[Any, ...]] = {}
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        for entry in archive:
            if "/.git" not in entry.name:
                data = archive.extractfile(entry) if entry.isreg() else None
                text = data.read() if data else entry.linkname
                found[entry.name] = (entry.type, oct(entry.mode & 0o7777) if entry.isreg() else "", text)
    return found


class ScriptedModel:
    """A chat completions server that answers the n-th request with the n-th call, and keeps the requests."""

    def __init__(self, calls: list[Call]) -> None:
        self.requests: list[dict[str, Any]] = []
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                number = len(model.requests)
                model.requests.append(request)
                name, arguments = calls[number]
                function = {"name": name, "arguments": json.dumps(arguments)}
                message = {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
                }
                answer = {
                    "id": f"answer-{number}",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "policy",
                    "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
                    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
                }
                body = json.dumps(answer).encode()
                time.sleep(THINKING_S)
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def text_of(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def through_openhands(repo: Path, calls: list[Call], home: Path) -> tuple[dict[str, Any], list[str]]:
    """Replay the script by OpenHands' loop; its first request, and the observations."""
    (home / "inputrc").write_text("set enable-bracketed-paste off\n")
    environment = {
        "INPUTRC": str(home / "inputrc"),
        "HOME": str(home),
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
    }
    model = ScriptedModel(calls)
    try:
        agent = Agent(
            llm=LLM(model="openai/policy", base_url=model.url, api_key="none", num_retries=0, timeout=60),
            tools=[
                Tool(
                    name=TerminalTool.name,
                    params={
                        "terminal_type": "subprocess",
                        "no_change_timeout_seconds": NO_CHANGE_S,
                        "env": environment,
                    },
                ),
                Tool(name=FileEditorTool.name),
                Tool(name=TaskTrackerTool.name),
            ],
            system_prompt_kwargs={"cli_mode": True, "soul_content": ""},
        )
        conversation = Conversation(agent=agent, workspace=str(repo), visualizer=None, stuck_detection=False)
        try:
            conversation.send_message("Go on.")
            conversation.run()
            last = [event for event in conversation.state.events if isinstance(event, ObservationEvent)][-1]
            finish = text_of([part.model_dump() for part in last.observation.to_llm_content])
        finally:
            conversation.close()
    finally:
        model.close()
    said = [text_of(message["content"]) for message in model.requests[-1]["messages"] if message["role"] == "tool"]
    return model.requests[0], [*said, finish]


async def through_scaffold(
    repo: Path, tar: bytes, calls: list[Call]
) -> tuple[list[dict[str, Any]], str, list[str], list[bool], bytes]:
    """Replay the script by the scaffold: schemas, system prompt, observations, which one ended it, the tree."""
    async with DockerSandbox(os.environ.get("SAO_TEST_IMAGE", "sao-base:debian")) as sandbox:
        await sandbox.run(["mkdir", "-p", str(repo.parent)])
        await sandbox.put_archive(str(repo.parent), tar)
        scaffold = OpenHandsScaffold(no_change_timeout_s=NO_CHANGE_S)
        await scaffold.open(sandbox, str(repo))
        try:
            system = scaffold.opening("Go on.", str(repo))[0]["content"]
            outcomes = [await scaffold.call(name, arguments, timeout_s=60) for name, arguments in calls]
            tools = scaffold.tools
        finally:
            await scaffold.close()
        tree = await sandbox.get_archive(str(repo))
        return tools, system, [each.text for each in outcomes], [each.finished for each in outcomes], tree


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Path]:
    repo = tmp_path / "repo"
    plant(repo)
    yield repo
    shutil.rmtree(repo, ignore_errors=True)


def same_each_time(text: str) -> str:
    """Without what varies from run to run: the random part of a temporary file's name, and a remark of the terminal.

    After a reset the remark is there, of a line or two, when the new shell's first prompts were not read in time, on
    either side.
    """
    text = re.sub(
        r"^\[Previous command outputs are truncated\. Showing the last \d lines of the output below\.\]\n", "", text
    )
    return re.sub(r"\.(\w+\.py)\.\w{8}\.tmp", r".\1.RANDOM.tmp", text)


async def test_observations_are_those_of_openhands_own_loop(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After a reset OpenHands would go on in tmux where that is installed.
    monkeypatch.setattr("openhands.tools.terminal.terminal.factory._is_tmux_available", lambda: False)
    calls = script(str(repo))
    tar = packed(repo)
    (tmp_path / "home").mkdir()
    request, expected = through_openhands(repo, calls, tmp_path / "home")
    tools, system, observed, finished, tree = await through_scaffold(repo, tar, calls)

    assert len(expected) == len(observed) == len(calls)
    wrong = [
        f"{number}: {calls[number]}\n--- OpenHands\n{theirs}\n--- scaffold\n{ours}"
        for number, (theirs, ours) in enumerate(zip(expected, observed, strict=True))
        if number not in DIFFERENT and same_each_time(theirs) != same_each_time(ours)
    ]
    assert not wrong, "\n\n".join([f"{len(wrong)} of {len(calls)} differ", *wrong])
    assert finished == [False] * (len(calls) - 1) + [True]
    assert contents(tree) == contents(packed(repo))
    assert tools == request["tools"]
    assert system == text_of(request["messages"][0]["content"])
