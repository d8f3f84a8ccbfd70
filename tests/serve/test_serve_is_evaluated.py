"""`python -m agent.evaluate` against this project's own server, as against any other OpenAI-compatible one."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

from rich.console import Console
from serve_tools import NAME, ServerProcess

from agent.evaluate.__main__ import main
from agent.evaluate.sample import decode

STYLES = ["sao/StyleShift-v0", "--env-arg", "prompts=tiny", "--env-arg", "step=0"]
MATH = ["sao/PythonTIR-v0", "--env-arg", "problems=[{problem: 1+1, answer: '2'}]", "--env-arg", "system_prompt=''"]


async def evaluated(server: ServerProcess, out: Path, *words: str) -> str:
    shown = io.StringIO()
    command = [*words, "--url", f"{server.url}/v1", "--model", NAME, "--max-tokens", "12", "--out", str(out)]
    status = await asyncio.to_thread(main, command, Console(file=shown, width=100, force_terminal=False))
    assert status == 0, shown.getvalue()
    return shown.getvalue()


async def test_samples_have_rewards_tokens_and_ends(server: ServerProcess, tmp_path: Path) -> None:
    shown = await evaluated(server, tmp_path, *STYLES, "--limit", "2", "--samples", "2", "--seed", "3")
    samples = [decode(line) for line in (tmp_path / "samples.jsonl").read_bytes().splitlines()]
    assert len(samples) == 4
    assert all(0 < sample.tokens.completion <= 12 and sample.tokens.prompt > 0 for sample in samples)
    assert "4 of 4" in shown


async def test_tools_are_sent_and_turns_that_are_cut_say_so(server: ServerProcess, tmp_path: Path) -> None:
    await evaluated(server, tmp_path, *MATH)
    (sample,) = [decode(line) for line in (tmp_path / "samples.jsonl").read_bytes().splitlines()]
    assert sample.stop_reason in ("truncated_turn_tokens", "terminated")


async def test_a_wrong_model_is_said_at_once(server: ServerProcess, tmp_path: Path, capsys: object) -> None:
    command = [*STYLES, "--url", f"{server.url}/v1", "--model", "other", "--out", str(tmp_path)]
    assert await asyncio.to_thread(main, command) == 3
