"""With a real learner: what it recorded is deleted with the conversation, and what is kept teaches another run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import yaml
from online_tools import NAME, ROOT, call, learning_server, metrics, trained, until, write_recipe

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow, pytest.mark.xdist_group("online")]


def say(url: str, user: str) -> str:
    messages = [{"role": "user", "content": f"Write about {user}."}]
    answer = call(url, "/v1/chat/completions", {"model": NAME, "messages": messages, "user": user})
    call(url, "/v1/feedback", {"response_id": answer["id"], "reward": 0.5, "comment": f"dear {user}"})
    return str(answer["conversation"])


def files_with(run: Path, word: str) -> list[str]:
    files = [path for path in sorted(run.rglob("*")) if path.is_file()]
    return [str(path.relative_to(run)) for path in files if word.encode() in path.read_bytes()]


def test_a_deleted_conversation_leaves_a_running_learner_and_the_rest_teaches_another_run(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, steps=100, record_batches=2, keep_checkpoints=3)
    run = tmp_path / "runs" / NAME
    users = [f"quetzal-{number}-bird" for number in range(8)]

    def why() -> object:
        return trained(run), (run / "learner.log").read_text()[-3000:]

    with learning_server(recipe) as (url, _):
        said = {user: say(url, user) for user in users}
        until(lambda: list(trained(run).values()).count("trained") == 8, why)
        gone = users[-1]
        assert any(name.startswith("batches/") for name in files_with(run, gone))
        with urlopen(Request(f"{url}/v1/users/{gone}", method="DELETE"), timeout=60) as answer:
            assert json.loads(answer.read())["conversations"] == 1
        until(lambda: not files_with(run, gone), lambda: files_with(run, gone))
        assert not files_with(run, f"dear {gone}")
        assert files_with(run, users[0])
        say(url, "someone else")  # and everything goes on

    keys = yaml.safe_load(recipe.read_text())
    again = tmp_path / "again" / "recipe.yaml"  # beside it stands the file that tells the port
    again.parent.mkdir()
    again.write_text(yaml.safe_dump({**keys, "name": "again"}))
    other = tmp_path / "runs" / "again"
    with learning_server(again) as (url, _):
        command = [sys.executable, "-m", "agent.store", "replay", str(run), "--into", str(other), "--limit", "8"]
        done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "8 accepted" in done.stdout
        until(
            lambda: list(trained(other).values()).count("trained") == 8,
            lambda: (trained(other), (other / "learner.log").read_text()[-3000:]),
        )
        assert said[gone] not in trained(other)
        until(lambda: call(url, "/v1/versions")["served"] >= 2, lambda: call(url, "/v1/versions"))
    assert metrics(other)[0]["lag/min"] >= 1, "off-policy from the first step on"
