"""Offers: episodes that nobody leased a ticket for, such as conversations that users have judged."""

from __future__ import annotations

from agent.episode import Episode
from agent.store import rules
from agent.store.protocol import Ending, StoreFault
from agent.store.tables import Tables

SERVED = "served"
"""The kind of an offered episode."""


class Offers:
    """Episodes without tickets in one ledger.

    An offered episode begins as ready and goes the way of every other one: claimed, trained, or stale if it is too
    old when its turn comes. It takes a slot of the staleness budget, so that fewer tickets are dealt while it waits,
    but it is never refused for want of one: what a user has said is not there a second time.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables, self._config = tables, tables.config

    def take(self, episode: Episode, data: bytes, judge: str = "") -> Ending:
        """Accept a valid episode (`data` is its encoding). The id decides: a second one is a "duplicate".

        `judge`: a name for whoever judged it, which says nothing of them; "" if nobody knows.
        Raises `StoreFault` where it could never be trained: an untrainable stop reason, or a run of a group method.
        """
        tables = self._tables
        if tables.one("SELECT 1 FROM episode_rows WHERE id = ?", episode.id) or tables.one(
            "SELECT 1 FROM tickets WHERE id = ?", episode.id
        ):
            tables.count("duplicate")
            return Ending("duplicate")
        if self._config.group_size > 1:
            raise StoreFault(
                f"a group method needs {self._config.group_size} rollouts of one prompt, and a served conversation is "
                "one: choose a single-rollout algorithm"
            )
        if not episode.stop_reason.trainable:
            raise StoreFault(f"episode {episode.id} ended with {episode.stop_reason.value}: nothing to train on")
        reason = rules.unwanted(self._config, episode.stop_reason)
        now = tables.clock()
        tables.add_episode(
            episode,
            data,
            kind=SERVED,
            status="dropped" if reason else "ready",
            unit=tables.next_unit(),
            task_index=-1,
            epoch=0,
            attempt=0,
            worker=episode.worker,
            issued_at=episode.timings.issued_at or now,
            issued_version=episode.actions[0].versions[0],
            finished_at=now,
            judge=judge,
        )
        tables.count("accepted")
        tables.count("offered")
        if not reason:
            return Ending("accepted")
        tables.count("dropped")
        tables.event(now, episode.id, "dropped", reason)
        return Ending("dropped", reason)

    def forget(self, episode_id: str) -> None:
        """Wipe what an offered episode says; its figures stay, so that it is not taken a second time.

        One that is not trained yet never will be. Forgetting twice, or what was never here, is harmless. Raises
        `StoreFault` while a claim holds it: repeat the call when the learner's step is over.
        """
        tables = self._tables
        rows = tables.all("SELECT status, kind FROM episode_rows WHERE id = ?", episode_id)
        if not rows:
            return
        if rows[0]["kind"] != SERVED:
            raise StoreFault(f"episode {episode_id} belongs to a ticket and to the record of its run; it stays")
        if rows[0]["status"] == "claimed":
            raise StoreFault(f"episode {episode_id} is in a claim just now: repeat the call when the step is over")
        tables.sql.execute(
            "DELETE FROM episode_data WHERE number = (SELECT number FROM episode_rows WHERE id = ?)", (episode_id,)
        )
        tables.sql.execute(
            "UPDATE episode_rows SET gone = 'wiped', status = CASE status WHEN 'ready' THEN 'dropped' ELSE status END "
            "WHERE id = ?",
            (episode_id,),
        )
        tables.count("forgotten")
