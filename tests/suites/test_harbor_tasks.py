"""Harbor's folders and reward files: what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs import make_core
from envs.adapters.harbor.reward import read_reward
from envs.adapters.harbor.task import TaskError, load_tasks, read_task, resolved
from envs.core import EnvironmentFault

NAME = "envs.adapters.harbor.env:Harbor"
SHIPPED = Path(__file__).parents[2] / "recipes" / "suites" / "harbor"


def write_task(folder: Path, toml: str = "", *, test: str = "echo 1 > /logs/verifier/reward.txt\n") -> Path:
    """A whole task; `toml` stands below its image."""
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "test.sh").write_text(f"#!/bin/sh\n{test}")
    (folder / "instruction.md").write_text("Do it.\n")
    (folder / "task.toml").write_text(f'[environment]\ndocker_image = "sao-base:debian"\n{toml}')
    return folder


def test_the_shipped_tasks_are_read_with_their_limits() -> None:
    counting, greeting = load_tasks(SHIPPED)
    assert (counting.name, counting.image, greeting.image) == ("counting", None, "sao-base:debian")
    assert (greeting.agent_s, greeting.verifier_s, greeting.memory_mb, greeting.network) == (120, 30, 256, False)
    assert greeting.instruction.startswith("Write the word hello")
    assert [task.name for task in load_tasks(SHIPPED / "greeting")] == ["greeting"]


def test_names_of_the_first_schema_are_read(tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path / "old", 'memory = "2G"\nstorage = "10G"\nallow_internet = false\n'))
    assert (task.memory_mb, task.network) == (2048, False)
    assert read_task(write_task(tmp_path / "new", 'network_mode = "public"\n')).network


def test_what_says_nothing_is_no_demand(tmp_path: Path) -> None:
    read_task(
        write_task(tmp_path / "a", "gpus = 0\nmcp_servers = []\n[metadata]\nanything = 1\n[verifier]\ncollect = []\n")
    )


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("gpus = 1", r"environment\.gpus: devices"),
        ('os = "windows"', r"environment\.os"),
        ('network_mode = "allowlist"', r"environment\.network_mode"),
        ("colour = 1", r"environment\.colour: unknown key"),
        ("[agent]\ntimeout_secs = 3", r"agent\.timeout_secs: unknown key"),
        ("[agent]\ntimeout_sec = 0", r"agent\.timeout_sec"),
        ("[verifier]\ntimeout_sec = -1", r"verifier\.timeout_sec"),
        ('[verifier]\nenvironment_mode = "separate"', r"verifier\.environment_mode"),
        ("[verifier.environment]\ncpus = 1", r"verifier\.environment: a container of the verifier's own"),
        ('[[verifier.collect]]\ncommand = "x"', r"verifier\.collect"),
        ('[[steps]]\nname = "a"', "steps: tasks of several steps"),
        ("[extra]\na = 1", "extra: unknown key"),
        ('memory = "lots"', "memory is a size"),
        ("memory_mb = 'x'", r"environment\.memory_mb"),
        ("[environment", "bad"),
    ],
)
def test_what_is_not_carried_out_is_refused_by_its_key(tmp_path: Path, toml: str, says: str) -> None:
    with pytest.raises(TaskError, match=says) as caught:
        make_core(NAME, path=str(write_task(tmp_path / "bad", toml)))
    assert "bad" in str(caught.value)


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("task.toml", "holds no Harbor task"),
        ("instruction.md", r"instruction\.md cannot be read"),
        ("tests/test.sh", r"no tests/test\.sh"),
    ],
)
def test_half_a_task_is_refused(tmp_path: Path, missing: str, says: str) -> None:
    folder = write_task(tmp_path / "half")
    (folder / missing).unlink()
    with pytest.raises(TaskError, match=says):
        make_core(NAME, path=str(folder))


def test_no_image_no_folder_and_no_such_task_are_refused(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "bare")
    (folder / "task.toml").write_text("")
    with pytest.raises(TaskError, match="neither environment/Dockerfile nor"):
        read_task(folder)
    with pytest.raises(TaskError, match="there is no folder"):
        make_core(NAME, path=str(tmp_path / "none"))
    with pytest.raises(TaskError, match="no task 'nine'; it has counting, greeting"):
        make_core(NAME, path=str(SHIPPED), tasks=["nine"])
    with pytest.raises(ValueError, match="reward_range"):
        make_core(NAME, path=str(SHIPPED), reward_range=[1, 0])
    with pytest.raises(ValueError, match="max_turns"):
        make_core(NAME, path=str(SHIPPED), max_turns=0)
    assert list(make_core(NAME, path=str(SHIPPED), tasks=["greeting"]).task_ids) == ["greeting"]


def test_variables_come_from_here_or_have_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAO_TEST_THERE", "yes")
    given = (("A", "${SAO_TEST_THERE}"), ("B", "${SAO_TEST_NOT_THERE:-no}"), ("C", "plain"))
    assert resolved(given, "x") == {"A": "yes", "B": "no", "C": "plain"}
    with pytest.raises(TaskError, match="SAO_TEST_NOT_THERE is not set"):
        resolved((("A", "${SAO_TEST_NOT_THERE}"),), "x")


def read(text: bytes | None = None, names: bytes | None = None) -> tuple[float, dict[str, float]]:
    return read_reward(text, names, key="reward", least=0.0, most=1.0)


def test_rewards_are_read_as_harbor_reads_them() -> None:
    assert read(b" 0.5\n") == (0.5, {})
    assert read(b"0", b'{"reward": 1, "style": 0.25}') == (1.0, {"style": 0.25})
    assert read(None, b"1") == (1.0, {})


@pytest.mark.parametrize(
    ("text", "names", "says"),
    [
        (None, None, "neither"),
        (b"", None, "empty"),
        (b"good", None, "no number"),
        (b"nan", None, "not finite"),
        (b"1e999", None, "not finite"),
        (b"1.5", None, "not from 0 to 1"),
        (b"\xff", None, "UTF-8"),
        (b"1" * 100_000, None, "bytes"),
        (None, b"{", "no JSON"),
        (None, b"[1]", "names and numbers"),
        (None, b'{"score": 1}', "no 'reward'; it has score"),
        (None, b'{"reward": true}', "not a finite number"),
        (None, b'{"reward": "1"}', "not a finite number"),
        (None, b'{"reward": 1, "x": NaN}', "not a finite number"),
        (None, b'{"reward": 1' + b"0" * 400 + b"}", "not a finite number"),
    ],
)
def test_what_no_sound_verifier_writes_is_its_fault(text: bytes | None, names: bytes | None, says: str) -> None:
    with pytest.raises(EnvironmentFault, match=says):
        read(text, names)


@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode) | st.floats().map(lambda x: str(x).encode()))
def test_any_file_is_a_reward_in_range_or_a_fault(data: bytes) -> None:
    for text, names in ((data, None), (None, data), (None, json.dumps({"reward": repr(data)}).encode())):
        try:
            value, _ = read(text, names)
        except EnvironmentFault:
            continue
        assert 0.0 <= value <= 1.0
