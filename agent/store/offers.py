"""Offers: episodes that nobody leased a ticket for, such as conversations that users have judged."""

from __future__ import annotations

from agent.episode import Episode
from agent.store import rules, texts
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
            private=True,
            judge=judge,
        )
        tables.count("accepted")
        tables.count("offered")
        if not reason:
            return Ending("accepted")
        tables.count("dropped")
        tables.event(now, episode.id, "dropped", reason)
        return Ending("dropped", reason)

    def replace(self, episode: Episode, data: bytes) -> Ending:
        """Put `episode` in the place of the offered one of its id, whose verdict or length has changed; `take` it if
        there is none.

        Only what waits for the learner can be replaced; else "superseded", and the reason says where it is by now.
        """
        tables = self._tables
        rows = tables.all("SELECT number, status, kind, gone FROM episode_rows WHERE id = ?", episode.id)
        if not rows:
            return self.take(episode, data)
        row = rows[0]
        if row["kind"] != SERVED or row["status"] != "ready" or row["gone"] is not None:
            state = "deleted" if row["gone"] == "wiped" else row["status"]
            return Ending("superseded", f"its episode is {state}: only one that waits for the learner can change")
        versions = episode.sampled_by
        texts.put(tables.sql, data, row["number"])
        tables.sql.execute("DELETE FROM episode_data WHERE number = ?", (row["number"],))  # of an older version
        tables.sql.execute(
            "UPDATE episode_rows SET reward = ?, tokens = ?, turns = ?, oldest_version = ?, newest_version = ? "
            "WHERE number = ?",
            (episode.reward, episode.action_tokens, len(episode.actions), versions[0], versions[-1], row["number"]),
        )
        tables.count("replaced")
        return Ending("accepted")

    def forget(self, episode_id: str) -> bool:
        """Delete what an offered episode says; its figures stay, so that it is not taken a second time.

        One that is not trained yet never will be, unless a claim holds it: then its bytes are gone here, and False says
        that the learner has them in memory until its step is over. Deleting twice, or what was never here, is harmless.
        Raises `StoreFault` for an episode of a ticket. The file's log has the bytes until `settle`.
        """
        tables = self._tables
        rows = tables.all("SELECT number, status, kind FROM episode_rows WHERE id = ?", episode_id)
        if not rows:
            return True
        row = rows[0]
        if row["kind"] != SERVED:
            raise StoreFault(f"episode {episode_id} belongs to a ticket and to the record of its run; it stays")
        tables.sql.execute("DELETE FROM episode_data WHERE number = ?", (row["number"],))
        texts.drop(tables.sql, row["number"])
        # The task of a served episode is a digest of its prompt, by which a short one could be guessed.
        tables.sql.execute(
            "UPDATE episode_rows SET gone = 'wiped', task_id = 'wiped', "
            "status = CASE status WHEN 'ready' THEN 'dropped' ELSE status END WHERE number = ?",
            (row["number"],),
        )
        tables.count("forgotten")
        return bool(row["status"] != "claimed")
