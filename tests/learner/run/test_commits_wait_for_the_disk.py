"""A claim is committed when the checkpoint that holds it is complete: neither before, nor only at the next one."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from learner_tools import build_learner, random_episodes
from torch.distributed.checkpoint import FileSystemWriter

from learner.parallel.ranks import Ranks
from learner.run.checkpoint import CheckpointError, checkpoints, load_progress
from learner.run.display import Display
from learner.run.loop import Loop

BATCH = random_episodes(8, seed=3)


class Commits:
    """A store as far as commits go: which were made, and whether a complete checkpoint held them by then."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, list[str]()

    async def commit(self, claim_id: str, version: int) -> None:
        newest = checkpoints(self.folder / "checkpoints")[-1]
        assert claim_id in load_progress(newest).claims, "ahead of the disk"
        self.made.append(claim_id)


def loop_in(folder: Path, model: Path, **keys: Any) -> tuple[Loop, Commits]:
    learner, commits = build_learner(model, folder, learner=keys), Commits(folder)
    services: Any = SimpleNamespace(store=commits)
    display, stop = Display("commits"), asyncio.Event()
    return Loop(learner.recipe, learner, Ranks(learner), services, folder, display, stop, held_out={}), commits


def train(loop: Loop, claim: str) -> None:
    loop.learner.step(BATCH)
    loop.learner.progress.claims.append(claim)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that takes nothing until it is set."""
    ready, plain = threading.Event(), FileSystemWriter.write_data

    def late(*arguments: Any) -> Any:
        assert ready.wait(60)
        return plain(*arguments)

    monkeypatch.setattr(FileSystemWriter, "write_data", late)
    return ready


async def test_steps_go_on_while_a_checkpoint_is_written_and_its_claims_wait(
    micro_model: Path, tmp_path: Path, disk: threading.Event
) -> None:
    loop, commits = loop_in(tmp_path, micro_model, checkpoint_every=2, commit_within=4)
    for number in (1, 2):
        train(loop, f"claim {number}")
    assert loop._is_checkpoint_due()
    await loop._checkpoint()
    for number in (3, 4):
        await asyncio.wait_for(loop._wait_for_disk(), 30)  # no further than four
        train(loop, f"claim {number}")
    assert (commits.made, checkpoints(tmp_path / "checkpoints")) == ([], [])
    waiting = asyncio.create_task(loop._wait_for_disk())
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done
    disk.set()
    await waiting
    assert commits.made == ["claim 1", "claim 2"]
    assert loop.learner.progress.claims == ["claim 3", "claim 4"]
    await loop._checkpoint()
    await loop._committed()
    assert commits.made == [f"claim {number}" for number in (1, 2, 3, 4)]
    assert load_progress(checkpoints(tmp_path / "checkpoints")[-1]).claims == ["claim 3", "claim 4"]


async def test_a_write_that_fails_commits_nothing_and_is_said_while_the_loop_waits_for_a_batch(
    micro_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, commits = loop_in(tmp_path, micro_model)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    train(loop, "claim 1")
    await loop._checkpoint()
    assert loop._committing is not None
    await asyncio.wait([loop._committing], timeout=60)
    with pytest.raises(CheckpointError, match=r"step_00001: No space left on device\. Free some space") as raised:
        loop._check_commits()
    assert "\n" not in str(raised.value)
    assert commits.made == []
    assert loop.learner.progress.claims == ["claim 1"]
