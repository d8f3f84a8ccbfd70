"""Our side of OpenEnv's protocol against the library's: its client plays our server, our environment its server."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
from suite_pythons import OPENENV_PYTHON, have
from test_openenv import NAME
from test_recipes_train import python_tir

from envs import make_core
from envs.core import EnvironmentFault

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.suites,
    pytest.mark.skipif(not have(OPENENV_PYTHON), reason="needs `make suites`"),
    pytest.mark.timeout(400),
]


def test_the_librarys_client_plays_one_of_ours(tmp_path: Path) -> None:
    with python_tir(tmp_path) as url:
        done = subprocess.run(
            [str(OPENENV_PYTHON), str(HERE / "openenv_library_client.py"), url],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    episode = [["What is 1 + 1?", False], ["2", 0.0, False], ["", 1.0, True]]
    assert json.loads(done.stdout.splitlines()[-1]) == [*episode, *episode, 2]


async def test_a_server_of_the_librarys_is_played(tmp_path: Path) -> None:
    port = tmp_path / "port"
    command = [str(OPENENV_PYTHON), str(HERE / "openenv_library_server.py"), str(port)]
    process = subprocess.Popen(command, cwd=tmp_path)  # noqa: ASYNC220 (nothing else is in this loop)
    try:
        deadline = time.monotonic() + 300
        while not port.exists() or not port.read_text():
            assert process.poll() is None
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.1)  # noqa: ASYNC251
        env = make_core(NAME, url=f"http://127.0.0.1:{port.read_text()}", observation_key="echoed")
        assert (await env.areset(options={"task_id": "seed-4"}))[0] == "seed 4"
        assert (await env.astep("hi \ud83d"))[:3] == ("hi ?", 0.5, False)
        assert (await env.astep("stop"))[1:3] == (0.5, True)
        wrong = make_core(NAME, url=f"http://127.0.0.1:{port.read_text()}", action_key="text")
        await wrong.areset(options={"task_id": "seed-4"})
        with pytest.raises(EnvironmentFault, match="VALIDATION_ERROR"):
            await wrong.astep("hi")
        for one in (env, wrong):
            await one.aclose()
    finally:
        process.terminate()
        process.wait(60)
