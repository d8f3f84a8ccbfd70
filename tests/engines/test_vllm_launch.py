"""A vLLM server started as a child: what is said without one, and that none of its processes is left."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import aiohttp
import psutil
import pytest
from engine_tools import VLLM_READY_S, VLLM_TEST_S, make_model
from vllm_tools import have_vllm

from agent.child_processes import stop_child
from agent.doors.door import WrongKey, bearer
from agent.engines.base import EngineFault
from agent.engines.client import HttpEngine
from agent.engines.vllm.launch import launch_vllm
from agent.engines.vllm.weight_receiver import check
from agent.episode import SamplingParams

KEY = "the-key-of-this-run"

if have_vllm():  # or else not collected, as in conftest.py

    @pytest.mark.vllm
    @pytest.mark.timeout(VLLM_TEST_S)
    @pytest.mark.xdist_group("vllm-moe")
    async def test_vllm_and_its_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
        """Case D8: whoever started it being killed leaves no engine behind."""
        model = make_model(tmp_path / "model", "dense", 1, head_dim=32)
        code = (
            "import asyncio, pathlib, sys\n"
            "from agent.engines.vllm.launch import launch_vllm\n"
            "async def main():\n"
            "    folder = pathlib.Path(sys.argv[1])\n"
            "    limits = {'dtype': 'float32', 'ready_timeout_s': float(sys.argv[2])}\n"
            "    process, _ = await launch_vllm(folder, version=0, log=folder / 'log', **limits)\n"
            "    print(process.pid, flush=True)\n"
            "    await asyncio.Event().wait()\n"
            "asyncio.run(main())\n"
        )
        parent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, str(model), str(VLLM_READY_S), stdout=asyncio.subprocess.PIPE
        )
        assert parent.stdout is not None
        try:
            pid = int(await asyncio.wait_for(parent.stdout.readline(), VLLM_READY_S + 60))
            server = psutil.Process(pid)
            processes = [server, *server.children(recursive=True)]
            assert len(processes) > 1
        finally:
            parent.send_signal(signal.SIGKILL)
            await parent.wait()

        def alive() -> list[psutil.Process]:
            return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

        deadline = time.monotonic() + 120
        while alive():
            assert time.monotonic() < deadline, alive()
            await asyncio.sleep(0.1)

    @pytest.mark.vllm
    @pytest.mark.timeout(VLLM_TEST_S)
    @pytest.mark.xdist_group("vllm-dense")
    async def test_vllm_is_closed_on_every_path_to_whoever_has_no_key(tmp_path: Path) -> None:
        """Its own API key alone leaves paths open that change the weights."""
        model, log = make_model(tmp_path / "model", "dense", 1, head_dim=32), tmp_path / "log"
        limits = {"dtype": "float32", "ready_timeout_s": VLLM_READY_S}
        process, url = await launch_vllm(model, version=3, log=log, key=KEY, **limits)  # type: ignore[arg-type]
        try:
            for key in ("", "the-key-of-another-run"):
                async with aiohttp.ClientSession(url, headers=bearer(key)) as session:
                    for path in ("/pause", "/update_weights", "/inference/v1/generate", "/update_weight_version"):
                        async with session.post(path, json={}) as answer:
                            assert answer.status == 401, path
                    for path, status in (("/health", 200), ("/metrics", 401), ("/v1/models", 401)):
                        async with session.get(path) as answer:
                            assert answer.status == status, path
                engine = HttpEngine(url, key=key)
                with pytest.raises(WrongKey, match="SAO_KEY"):
                    await engine.health()
                await engine.close()
            engine = HttpEngine(url, key=KEY)
            assert (await engine.health()).version == 3
            assert (await engine.generate([5, 6], SamplingParams(max_tokens=4))).token_ids
            await engine.publish(4, model)
            assert (await engine.health()).version == 4
            await engine.close()
        finally:
            await stop_child(process)
        assert KEY not in log.read_text()

    @pytest.mark.vllm
    @pytest.mark.timeout(VLLM_TEST_S)
    @pytest.mark.xdist_group("vllm-moe")
    async def test_heads_that_vllm_cannot_serve_are_said_at_the_start(tmp_path: Path) -> None:
        model = make_model(tmp_path / "model", "dense", 1, head_dim=16)
        with pytest.raises(EngineFault, match="ended with code"):
            await launch_vllm(model, version=0, log=tmp_path / "log", ready_timeout_s=VLLM_READY_S)
        assert "no CPU attention for head_dim 16" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("returns_experts", [False, True])
async def test_a_server_that_returns_experts_is_started_with_the_runner_that_keeps_them(
    tmp_path: Path, returns_experts: bool
) -> None:
    (tmp_path / "config.json").write_text("{}")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$@" runner=$VLLM_USE_V2_MODEL_RUNNER\nexit 3\n')
    python.chmod(0o755)
    where = {"log": tmp_path / "log", "environment": tmp_path}
    with pytest.raises(EngineFault, match="ended with code 3"):
        await launch_vllm(tmp_path, version=0, **where, returns_experts=returns_experts)  # type: ignore[arg-type]
    said = (tmp_path / "log").read_text()
    assert ("--enable-return-routed-experts" in said, "runner=1" in said) == (returns_experts, returns_experts)


async def test_no_vllm_is_said_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineFault, match="make vllm"):
        await launch_vllm(tmp_path, version=0, log=tmp_path / "log", environment=tmp_path / "nothing")
    assert not (tmp_path / "log").exists()


def test_a_snapshot_of_another_model_is_told_by_its_tensors() -> None:
    expected = {"a": (2, 3), "b": (4,), "c": (1,)}
    check(dict(expected), expected, "snapshot x")
    with pytest.raises(ValueError, match=r"1 tensors missing \['c'\], 1 unknown \['d'\], 1 of another shape \['b'\]"):
        check({"a": (2, 3), "b": (5,), "d": (1,)}, expected, "snapshot x")
