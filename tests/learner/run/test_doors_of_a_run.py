"""A whole run behind its own key: closed to others, open to `agent.inspect --live`, the key in one file alone."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from run_tools import CHILDREN, ROOT, last_step, training, write_run

from agent.doors.door import WrongKey
from agent.store.client import StoreClient

pytestmark = pytest.mark.timeout(400)


async def version(url: str, key: str) -> int:
    async with StoreClient(url, key=key) as store:
        return (await store.status()).version


def store_of(learner: psutil.Process) -> str:
    """The address of the store among the learner's children."""
    [store] = [child for child in learner.children() if "agent.store" in child.cmdline()]
    [port] = {c.laddr.port for c in store.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return f"http://127.0.0.1:{port}"


def test_a_run_is_closed_to_others_and_its_key_is_in_its_file_alone(tmp_path: Path) -> None:
    recipe = write_run(tmp_path, steps=1000, value_pretraining=None, learner={"algorithm": "sao_running_mean"})
    run, shown = tmp_path / "runs" / "micro", tmp_path / "live"
    environment = {name: text for name, text in os.environ.items() if name != "SAO_KEY"}
    with training(str(recipe), output=tmp_path / "output") as command, shown.open("wb") as written:
        command.wait_for(lambda: (run / "runtime.port").exists(), within_s=200)
        live = subprocess.Popen(
            [sys.executable, "-m", "agent.inspect", str(run), "--live"],
            cwd=ROOT, env={**environment, "COLUMNS": "200"}, stdout=written, stderr=written,
        )  # fmt: skip
        try:
            key = (run / "key").read_text().strip()
            url = store_of(psutil.Process(command.process.pid))
            assert asyncio.run(version(url, key)) >= 0
            for wrong in ("", "the-key-of-another-run"):
                with pytest.raises(WrongKey):
                    asyncio.run(version(url, wrong))
            command.wait_for(lambda: last_step(run) >= 1 and " ends (" in shown.read_text(), within_s=200)
            words = command.words()
            assert set(CHILDREN) <= words
            assert not [word for word in words if key in word]
            command.process.send_signal(signal.SIGINT)
            assert command.end(within_s=200) in (0, 130), command.said[-4000:]
            live.wait(60)
        finally:
            live.kill()
            live.wait()
    said = shown.read_text()
    assert live.returncode == 0, said
    assert f"{run} has ended" in said
    for event in ("begins task", "prompt (turn 0", "action (turn 1", "ends ("):
        assert event in said, said[-4000:]
    assert stat.S_IMODE((run / "key").stat().st_mode) == 0o600
    text_files = [path for path in run.rglob("*") if path.suffix in (".log", ".yaml", ".jsonl", ".json", ".md")]
    assert {"recipe.yaml", "store.log", "runtime.log", "engine.log"} <= {path.name for path in text_files}
    assert not [path for path in text_files if key in path.read_text(errors="replace")]
    assert key not in command.said + said
    assert not (run / "runtime.port").exists()
