"""Offers: episodes that nobody leased a ticket for, such as conversations that users have judged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.episode import Episode
from agent.store.config import StoreConfig
from agent.store.protocol import Ending, StoreFault

if TYPE_CHECKING:
    from agent.store.ledger import Ledger

SERVED = "served"
"""The kind of an offered episode."""


class Offers:
    """Episodes without tickets in one ledger.

    An offered episode begins as ready and goes the way of every other one: claimed, trained, or stale if it is too
    old when its turn comes. It takes a slot of the staleness budget, so that fewer tickets are dealt while it waits,
    but it is never refused for want of one: what a user has said is not there a second time.
    """

    def __init__(self, ledger: Ledger, config: StoreConfig) -> None:
        self._db = ledger
        self._config = config

    def take(self, episode: Episode, data: bytes) -> Ending:
        """Accept a valid episode (`data` is its encoding). The id decides: a second one is a "duplicate".

        Raises `StoreFault` where it could never be trained: an untrainable stop reason, or a run of a group method.
        """
        db = self._db
        if db.one("SELECT 1 FROM episodes WHERE id = ?", episode.id) or db.one(
            "SELECT 1 FROM tickets WHERE id = ?", episode.id
        ):
            db.count("duplicate")
            return Ending("duplicate")
        if self._config.group_size > 1:
            raise StoreFault(
                f"a group method needs {self._config.group_size} rollouts of one prompt, and a served conversation is "
                "one: choose a single-rollout algorithm"
            )
        if not episode.stop_reason.trainable:
            raise StoreFault(f"episode {episode.id} ended with {episode.stop_reason.value}: nothing to train on")
        status, reason = "ready", ""
        if self._config.drop_truncated and episode.stop_reason.truncated:
            status, reason = "dropped", f"{episode.stop_reason.value}, and drop_truncated is set"
        versions = [v for action in episode.actions for v in action.versions]
        unit = int(db.meta("units", "0"))
        db.set_meta("units", str(unit + 1))
        now = db.clock()
        db.sql.execute(
            "INSERT INTO episodes (id, kind, status, unit, task_index, epoch, group_id, env_id, task_id, reward, "
            "tokens, turns, oldest_version, newest_version, stop_reason, worker, attempt, issued_at, issued_version, "
            "finished_at, evaluation, data) VALUES (?, ?, ?, ?, -1, 0, NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?, "
            "NULL, ?)",
            (
                *(episode.id, SERVED, status, unit, episode.env_id, episode.task_id, episode.reward),
                *(episode.action_tokens, len(episode.actions), min(versions), max(versions)),
                *(episode.stop_reason.value, episode.worker, episode.timings.issued_at or now, versions[0], now, data),
            ),
        )
        db.count("accepted")
        db.count("offered")
        if status == "ready":
            return Ending("accepted")
        db.count("dropped")
        db.event(now, episode.id, "dropped", reason)
        return Ending("dropped", reason)

    def forget(self, episode_id: str) -> None:
        """Wipe what an offered episode says; its figures stay, so that it is not taken a second time.

        One that is not trained yet never will be. Forgetting twice, or what was never here, is harmless. Raises
        `StoreFault` while a claim holds it: repeat the call when the learner's step is over.
        """
        db = self._db
        rows = db.all("SELECT status, kind FROM episodes WHERE id = ?", episode_id)
        if not rows:
            return
        if rows[0]["kind"] != SERVED:
            raise StoreFault(f"episode {episode_id} belongs to a ticket and to the record of its run; it stays")
        if rows[0]["status"] == "claimed":
            raise StoreFault(f"episode {episode_id} is in a claim just now: repeat the call when the step is over")
        db.sql.execute(
            "UPDATE episodes SET data = x'', status = CASE status WHEN 'ready' THEN 'dropped' ELSE status END "
            "WHERE id = ?",
            (episode_id,),
        )
        db.count("forgotten")
