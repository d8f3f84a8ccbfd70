"""A step that is rewritten still takes the step that it took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
EXACT = ("figures", "tokens", "policy", "critic", "policy_moments", "critic_moments")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was recorded, and what the code makes of it now, in a process with the same kernels."""
    import recorded_steps

    target = tmp_path_factory.mktemp("record") / "now.json"
    command = [sys.executable, str(HERE / "recorded_steps.py"), str(target)]
    path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    environment = {**os.environ, **recorded_steps.ENVIRONMENT, "PYTHONPATH": path}
    subprocess.run(command, env=environment, check=True, timeout=110)
    return json.loads((HERE / "recorded_steps.json").read_text()), json.loads(target.read_text())


def test_two_steps_of_every_algorithm_are_those_that_were_recorded(
    records: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    """Bit for bit where this machine computes like the one that made the record; else to five digits."""
    recorded, now = records
    assert recorded["cases"].keys() == now["cases"].keys()
    alike = all(recorded[key] == now[key] for key in ("torch", "arithmetic"))
    for name, case in recorded["cases"].items():
        found = now["cases"][name]
        assert case.keys() == found.keys(), name
        if alike:
            assert case == found, name
            continue
        sizes = {key: value for key, value in case.items() if key.endswith("_size")}
        assert {key: found[key] for key in sizes} == pytest.approx(sizes, rel=1e-5), name
        figures = {key: value for key, value in case["figures"].items() if value is not None}
        assert {key: found["figures"][key] for key in figures} == pytest.approx(figures, rel=1e-3, abs=1e-5), name


def test_the_recorded_steps_move_what_they_should() -> None:
    """The test above can fail: no two cases left the same policy unless only their critics differ."""
    cases = json.loads((HERE / "recorded_steps.json").read_text())["cases"]
    policies = {name: case["policy"] for name, case in cases.items()}
    assert len(set(policies.values())) >= len(policies) - 1, policies
    assert all(
        any(n.startswith("1 critic/gradient_norm") for n in c["figures"]) for c in cases.values() if "critic" in c
    )
