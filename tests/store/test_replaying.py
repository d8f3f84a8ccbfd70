"""A store's episodes, offered again to another run's learner."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from store_tools import Bench, make_episode, running_store

from agent.episode import decode, encode
from agent.store.__main__ import main
from agent.store.config import StoreConfig
from agent.store.reading import EpisodeFilter
from learner.data.batch import build_batch
from learner.run.metrics import lag_metrics


def source(folder: Path) -> Bench:
    """A run that has trained some, whose episodes are of versions 3 to 7; one is deleted and one is an evaluation's."""
    store = Bench(folder / "episodes.sqlite", StoreConfig(batch=2, max_lag=9))
    for version in range(3, 8):
        episode = msgspec.structs.replace(make_episode(f"e{version}", version), turn_rewards=(version / 10,))
        store.do(lambda episode=episode: store.ledger.offers.take(episode, encode(episode)))
    store.claim("c", 2)
    store.commit("c", 1)
    store.do(lambda: store.ledger.offers.forget("e5"))
    store.ledger.close()
    return store


def test_what_was_judged_is_learned_from_again_as_off_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the numbers of the old run, tokens of version 7 would be of the future of a run that begins at 0."""
    source(tmp_path / "old")
    command = ["replay", str(tmp_path / "old"), "--into", str(tmp_path / "new"), "batch=4"]
    assert main([*command, "--dry-run"]) == 0
    assert not (tmp_path / "new").exists()
    assert main(command) == 0
    assert "4 accepted" in capsys.readouterr().out
    assert main(command) == 0
    assert "4 duplicate" in capsys.readouterr().out, "twice is harmless"
    store = Bench(tmp_path / "new" / "episodes.sqlite", StoreConfig(batch=4))
    claim = store.claim("c", 4, version=0)
    assert claim is not None
    episodes = [decode(data) for data in claim.episodes]
    assert [episode.id for episode in episodes] == ["e3", "e4", "e6", "e7"]
    assert [episode.reward for episode in episodes] == pytest.approx([0.3, 0.4, 0.6, 0.7])
    assert [episode.sampled_by for episode in episodes] == [[-5], [-4], [-2], [-1]]
    assert episodes[0].metrics["replayed"] == {"from": "old", "versions": [3]}
    assert episodes[0].actions[0].logprobs == make_episode("e3").actions[0].logprobs
    assert [fact["lag"] for fact in claim.facts] == [5, 4, 2, 1]
    batch = build_batch(episodes)
    lags = lag_metrics(batch.versions, batch.action_mask, batch.turn_ids, 0)
    assert (lags["lag/min"], lags["lag/max"]) == (1, 5)


async def test_a_store_that_runs_is_offered_them_over_http(tmp_path: Path) -> None:
    source(tmp_path / "old")
    path = tmp_path / "new" / "episodes.sqlite"
    path.parent.mkdir()
    async with running_store(path, "batch=4") as (store, _):
        words = ["replay", str(tmp_path / "old"), "--into", store.url, "--limit", "2"]
        assert await asyncio.to_thread(main, words) == 0
        rows = await store.episodes(EpisodeFilter())
    assert [(row.id, row.oldest_version) for row in rows] == [("e6", -2), ("e7", -1)]


def test_a_store_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path), "--into", str(tmp_path / "new")]) == 2
    assert "no episode store" in capsys.readouterr().err
    source(tmp_path / "old")
    assert main(["replay", str(tmp_path / "old"), "--into", str(tmp_path / "new")]) == 2
    assert "start the new run first" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
