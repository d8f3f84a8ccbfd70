"""Where a shared key comes from, and which hosts need one."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.doors.door import DoorFault, bearer, check_host, is_loopback, opens
from agent.doors.keys import found_key, given_key, run_key


@pytest.fixture(autouse=True)
def no_key_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAO_KEY", raising=False)


def test_a_run_makes_one_key_that_nobody_else_can_read_and_keeps_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: run_key(tmp_path / "run"), range(16)))
    assert len(keys) == 1
    assert len(keys.pop()) >= 32
    files = list((tmp_path / "run").iterdir())
    assert [file.name for file in files] == ["key"]
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o600
    assert found_key(tmp_path / "run") == run_key(tmp_path / "run")


def test_a_named_file_comes_before_the_environment_and_that_before_the_runs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = run_key(tmp_path)
    monkeypatch.setenv("SAO_KEY", "from-the-environment\n")
    (tmp_path / "named").write_text("from-the-named-file\n")
    assert run_key(tmp_path) == given_key() == "from-the-environment"
    assert run_key(tmp_path, tmp_path / "named") == given_key(tmp_path / "named") == "from-the-named-file"
    monkeypatch.setenv("SAO_KEY", " ")
    assert given_key() == ""
    assert run_key(tmp_path) == own


@pytest.mark.parametrize("text", ["short", "with blanks in it", "ümlaute-überall", ""])
def test_a_malformed_key_is_refused_and_not_shown(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad").write_text(text)
    with pytest.raises(DoorFault, match="at least 8 characters") as fault:
        given_key(tmp_path / "bad")
    assert str(tmp_path / "bad") in str(fault.value)
    assert not text or text not in str(fault.value)


def test_a_named_file_that_is_not_there_is_no_missing_key(tmp_path: Path) -> None:
    with pytest.raises(DoorFault, match=r"cannot read the shared key in .*nowhere: No such file"):
        run_key(tmp_path, tmp_path / "nowhere")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_the_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    check_host(host, "", "the store")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.5", "node-7", "localhost.example", "::ffff:8.8.8.8"])
def test_any_other_host_is_refused_without_a_key(host: str) -> None:
    with pytest.raises(DoorFault, match=r"the store does not listen on .* without a key: .* SAO_KEY .* 127"):
        check_host(host, "", "the store")
    check_host(host, "some-shared-key", "the store")


@given(key=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=8), shown=st.text())
def test_only_the_key_itself_opens(key: str, shown: str) -> None:
    assert opens(key, bearer(key)["Authorization"])
    assert opens(key, f"bearer  {key} ")
    assert opens(key, shown) is (shown.partition(" ")[0].lower() == "bearer" and shown.partition(" ")[2].strip() == key)
    assert not opens(key, key)
    assert not opens(key, f"Bearer {key}x")
    assert opens("", shown)
    assert not os.environ.get("SAO_KEY")


def test_an_evaluation_of_a_folder_leaves_no_run_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from learner.config import Recipe
    from learner.services.shared_key import shared_key, with_own_key

    recipe = Recipe.model_validate({"name": "x", "runs_dir": str(tmp_path / "runs"), "model": {"path": "m"}})
    scratch = tmp_path / "scratch"
    assert shared_key(with_own_key(recipe, scratch)) == (scratch / "key").read_text().strip()
    assert not (tmp_path / "runs").exists()
    monkeypatch.setenv("SAO_KEY", "from-the-environment")
    assert shared_key(with_own_key(recipe, tmp_path / "other")) == "from-the-environment"
    assert not (tmp_path / "other").exists()
