"""`benchmarks/gpu_smoke.sh`: harmless without a GPU; its path runs in small on a CPU; a broken bound is exit code 1."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_smoke

ROOT = Path(__file__).resolve().parents[2]


def script(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(ROOT / "benchmarks" / "gpu_smoke.sh"), *options],
        cwd="/",
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables},
        capture_output=True,
        text=True,
        timeout=350,
    )


def test_without_a_gpu_it_says_so_and_exits_with_0() -> None:
    done = script()
    assert done.returncode == 0, done.stderr
    assert "no CUDA GPU" in done.stdout


def test_without_pytorch_it_says_so_and_exits_with_0(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    done = script(PYTHON=str(fake))
    assert done.returncode == 0, done.stderr
    assert "has no PyTorch" in done.stdout


@pytest.mark.timeout(400)
def test_the_whole_path_holds_its_bounds_in_small(tmp_path: Path) -> None:
    target = tmp_path / "smoke.json"
    done = script("--device", "cpu", "--tiny", "--steps", "1", "--json", str(target))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line["name"]: line for line in json.loads(target.read_text())["lines"]}
    assert all(line["holds"] for line in lines.values())
    assert all(math.isfinite(line["figure"]) for line in lines.values())
    assert {"ipc: another process read other bytes", "broadcast in a group of one"} <= lines.keys()
    for what in ("layers kept", "layers computed again"):
        assert lines[f"bf16 SAO step, {what}: speed"]["figure"] > 0
    kept, again = (
        lines[f"bf16 SAO step, {x}: planned memory"]["figure"] for x in ("layers kept", "layers computed again")
    )
    assert again < kept
    assert "tokens/s" in done.stdout


def test_maths_that_is_wrong_breaks_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    from learner import advantages

    def rounded(*args, **kwargs):  # type: ignore[no-untyped-def]
        found = original(*args, **kwargs)
        return tuple(x if x.dtype == torch.float64 else x.bfloat16().float() for x in found)

    original = advantages.skip_observation_gae
    monkeypatch.setattr(advantages, "skip_observation_gae", rounded)
    lines = {line.name: line for line in gpu_smoke.maths_lines(torch.device("cpu"), 2, 128)}
    broken = [name for name, line in lines.items() if not line.holds]
    assert any(name.startswith("token-level GAE") for name in broken)
    assert not any(name.startswith("V-trace") for name in broken)
    assert lines[broken[0]].cells()[-1] == "BROKEN"


def test_a_figure_that_is_no_number_does_not_hold() -> None:
    assert not gpu_smoke.Line("x", math.nan, "", 1.0).holds
    assert gpu_smoke.Line("x", 5.0, "tokens/s").holds
