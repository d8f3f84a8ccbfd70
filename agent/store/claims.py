"""Claims: batches that the learner takes from the ready episodes, and commits once they are in a checkpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from agent.store import rules
from agent.store.protocol import Claim, StoreFault
from agent.store.tables import Tables

REFERENCE = 512
"""How many finished units order "quota" takes as the distribution of latencies."""

RECENT_LAGS = 512


class Claims:
    """The claims of one ledger.

    A claim's life: take ──▶ open ──commit──▶ committed: its episodes are trained, for good
                              └──release, recover──▶ released: its episodes are ready again (deleted ones: dropped)

    A committed claim may hold its slots of the staleness budget a little longer: until the version that it made is
    announced, or until the next claim (which shows that the learner has published, or will not).
    """

    def __init__(self, tables: Tables) -> None:
        self._tables, self._config = tables, tables.config
        self._void: set[str] = set()
        self.lags: deque[int] = deque(maxlen=RECENT_LAGS)
        """Versions between an episode's oldest token and its claim, of the last ones that this process saw."""

    def take(self, claim_id: str, count: int, version: int) -> Claim | None:
        """Claim exactly `count` ready episodes for a learner at `version`, whole groups only; None: not yet.

        The same `claim_id` gives the same claim again while it is open. With stale_policy "drop", what is too old
        goes first: it is counted and its slot is free again.
        """
        config = self._config
        if count % config.group_size or count < 1:
            raise StoreFault(f"a claim of {count} episodes: only whole groups of {config.group_size} are released")
        if count > config.capacity:
            raise StoreFault(
                f"a claim of {count} episodes would wait for ever: batch={config.batch} and max_lag={config.max_lag} "
                f"allow {config.capacity} outstanding; raise one of them or claim less"
            )
        if claim_id in self._void:
            return None
        state = self._tables.one("SELECT status FROM claims WHERE id = ?", claim_id)
        if state is not None:
            if state != "open":
                raise StoreFault(f"claim {claim_id} is {state}: take a new one")
            claim = self._read(claim_id)
            if not all(claim.episodes):
                raise StoreFault(f"an episode of claim {claim_id} was deleted at its user's wish: take a new one")
            return claim
        self.prepare(version)
        chosen = rules.choose(
            config,
            ready := self._ready(),
            count // config.group_size,
            pending=(pending := self._pending({unit.number for unit in ready})),
            ages_s=self._ages(pending),
            recent_s=self._recent(),
            active=self._active_users(),
            waited_s=self._waited_s(),
        )
        if chosen is None:
            return None
        now = self._tables.clock()
        self._tables.sql.execute(
            "INSERT INTO claims (id, status, version, size, opened_at) VALUES (?, 'open', ?, ?, ?)",
            (claim_id, version, count, now),
        )
        self._tables.sql.executemany(
            "UPDATE episode_rows SET status = 'claimed', claim = ?, claimed_at = ? WHERE unit = ? AND status = 'ready'",
            [(claim_id, now, unit.number) for unit in chosen],
        )
        self._tables.sql.execute(
            "INSERT INTO claim_members SELECT claim, id FROM episode_rows WHERE claim = ?", (claim_id,)
        )
        self._tables.count("claims")
        claim = self._read(claim_id)
        lags = [int(facts["lag"]) for facts in claim.facts]
        self.lags.extend(lags)
        self._tables.count("claimed", len(lags))
        self._tables.count("claimed_lag", sum(lags))
        return claim

    def prepare(self, version: int) -> int:
        """Free the slots that a claim at `version` frees even if it then waits; how many episodes those are."""
        held = self._tables.one("SELECT coalesce(sum(size), 0) FROM claims WHERE held = 1")
        self._tables.sql.execute("UPDATE claims SET held = 0 WHERE held = 1")
        return int(held) + self._drop_stale(version)

    def void(self, claim_ids: Sequence[str]) -> None:
        """Release claims whose answer never reached the learner, now or when they come."""
        self._void.update(claim_ids)
        for claim_id in claim_ids:
            if self._tables.one("SELECT status FROM claims WHERE id = ?", claim_id) == "open":
                self.release(claim_id)

    def commit(self, claim_id: str, version: int) -> None:
        """The claim's episodes are trained, and a checkpoint that knows it is on the disk. Twice is harmless.

        `version`: the policy version that the step made, or the present one if it will publish none.
        """
        state = self._state(claim_id)
        if state == "committed":
            return
        if state == "released":
            raise StoreFault(
                f"claim {claim_id} was released, its episodes may be in another claim by now: "
                "do not keep the step that used it; go back to the last checkpoint"
            )
        trained = self._tables.sql.execute(
            "UPDATE episode_rows SET status = 'trained' WHERE claim = ? AND status = 'claimed'", (claim_id,)
        )
        self._tables.sql.execute(
            "UPDATE claims SET status = 'committed', closed_at = ?, held = ? WHERE id = ?",
            (self._tables.clock(), int(version > self._tables.version), claim_id),
        )
        self._tables.sql.execute("UPDATE claims SET version = max(version, ?) WHERE id = ?", (version, claim_id))
        self._tables.count("trained", trained.rowcount)

    def release(self, claim_id: str) -> None:
        """The claim's episodes are ready again, in their old places. Twice is harmless; not after a commit."""
        state = self._state(claim_id)
        if state == "committed":
            raise StoreFault(f"claim {claim_id} is committed: its episodes were trained and cannot be given back")
        self._tables.sql.execute(
            "UPDATE episode_rows SET status = CASE WHEN gone IS NULL THEN 'ready' ELSE 'dropped' END, claim = NULL, "
            "claimed_at = NULL WHERE claim = ? AND status = 'claimed'",
            (claim_id,),
        )
        self._tables.sql.execute(
            "UPDATE claims SET status = 'released', closed_at = ? WHERE id = ?", (self._tables.clock(), claim_id)
        )

    def recover(self, trained: Sequence[str]) -> None:
        """Bring the claims in line with the learner's checkpoint, which holds exactly the claims `trained`
        (of those that are not committed yet; committed ones may be named too): they are committed, every other
        open claim is released. To be called by a learner when it starts or resumes, never beside another one."""
        for claim_id in trained:
            self._state(claim_id)
        for row in self._tables.all("SELECT id FROM claims WHERE status = 'open'"):
            if row["id"] not in trained:
                self.release(row["id"])
        for claim_id in trained:
            if self._state(claim_id) == "released":
                # Released by mistake while its checkpoint existed; nothing is open now, so it can be taken back.
                self._reopen(claim_id)
            self.commit(claim_id, self._tables.version)
        self._tables.sql.execute("UPDATE claims SET held = 0 WHERE held = 1")

    def published(self, version: int) -> None:
        """The engines serve `version`: the claims that led to it hold no slots any more."""
        self._tables.sql.execute("UPDATE claims SET held = 0 WHERE held = 1 AND version <= ?", (version,))

    def _reopen(self, claim_id: str) -> None:
        self._tables.sql.execute(
            "UPDATE episode_rows SET status = 'claimed', claim = ?, claimed_at = ? WHERE status = 'ready' AND id IN "
            "(SELECT episode FROM claim_members WHERE claim = ?)",
            (claim_id, self._tables.clock(), claim_id),
        )
        self._tables.sql.execute("UPDATE claims SET status = 'open' WHERE id = ?", (claim_id,))

    def _state(self, claim_id: str) -> str:
        state = self._tables.one("SELECT status FROM claims WHERE id = ?", claim_id)
        if state is None:
            raise KeyError(
                f"no claim {claim_id} in {self._tables.path}: "
                "do the checkpoint and the episode store belong to one run?"
            )
        return str(state)

    def _drop_stale(self, version: int) -> int:
        if self._config.lag_limit is None:
            return 0
        dropped = 0
        units = self._tables.all(
            "SELECT unit, min(oldest_version) AS oldest, min(id) AS id FROM episode_rows WHERE status = 'ready' "
            "GROUP BY unit HAVING count(*) = ?",
            self._config.group_size,
        )
        for unit in units:
            if rules.is_stale(self._config, unit["oldest"], version):
                self._tables.sql.execute(
                    "UPDATE episode_rows SET status = 'stale' WHERE unit = ? AND status = 'ready'", (unit["unit"],)
                )
                self._tables.count("stale", self._config.group_size)
                reason = f"sampled by version {unit['oldest']}, claimed at {version}, limit {self._config.lag_limit}"
                self._tables.event(self._tables.clock(), unit["id"], "stale", reason)
                dropped += self._config.group_size
        return dropped

    def _ready(self) -> list[rules.Unit]:
        rows = self._tables.all(
            "SELECT unit, max(number) AS completed, max(finished_at - issued_at) AS latency, "
            "min(oldest_version) AS oldest, min(judge) AS judge FROM episode_rows WHERE status = 'ready' "
            "GROUP BY unit HAVING count(*) = ?",
            self._config.group_size,
        )
        return [
            rules.Unit(row["unit"], row["completed"], row["latency"], row["oldest"], judge=row["judge"]) for row in rows
        ]

    def takeable(self) -> int:
        """How many of the ready episodes a claim of the usual size may take: all, or those within the users' shares."""
        count = self._config.batch // self._config.group_size
        found = rules.takeable(
            self._config, self._ready(), count, active=self._active_users(), waited_s=self._waited_s()
        )
        return len(found) * self._config.group_size

    def _active_users(self) -> int:
        """How many users have judged something lately, trained or not, or have verdicts that wait."""
        if self._config.max_share_per_user is None:
            return 0
        since = self._tables.clock() - self._config.user_window_s
        query = (
            "SELECT count(*) FROM (SELECT judge FROM episode_rows WHERE judge != '' AND finished_at >= ? "
            "UNION SELECT judge FROM episode_rows WHERE judge != '' AND status = 'ready')"
        )
        return int(self._tables.one(query, since))

    def _waited_s(self) -> float:
        """For how long a batch could have been made and none was: since the last claim, or the oldest ready episode."""
        if self._config.max_share_per_user is None:
            return 0.0
        claimed = self._tables.one("SELECT max(opened_at) FROM claims")
        oldest = self._tables.one("SELECT min(finished_at) FROM episode_rows WHERE status = 'ready'")
        now = self._tables.clock()
        return float(now - max(claimed or 0.0, now if oldest is None else oldest))

    def _pending(self, ready: set[int]) -> list[int]:
        """Numbers of the units that something still runs for."""
        if self._config.order == "completion":
            return []
        rows = self._tables.all(
            "SELECT DISTINCT unit FROM tickets WHERE kind = 'train' AND doomed = 0 AND status IN ('waiting', 'leased')"
        )
        return [row["unit"] for row in rows if row["unit"] not in ready]

    def _ages(self, pending: Sequence[int]) -> list[float]:
        if self._config.order != "quota" or not pending:
            return []
        now = self._tables.clock()
        rows = self._tables.all(
            "SELECT unit, min(coalesce(issued_at, ?)) AS issued FROM tickets "
            "WHERE kind = 'train' AND doomed = 0 AND status IN ('waiting', 'leased') GROUP BY unit",
            now,
        )
        return [max(0.0, now - row["issued"]) for row in rows]

    def _recent(self) -> list[float]:
        if self._config.order != "quota":
            return []
        rows = self._tables.all(
            "SELECT max(finished_at - issued_at) AS latency FROM "
            "(SELECT unit, finished_at, issued_at FROM episode_rows WHERE kind != 'evaluate' "
            "ORDER BY number DESC LIMIT ?) GROUP BY unit",
            REFERENCE * self._config.group_size,
        )
        return [row["latency"] for row in rows]

    def _read(self, claim_id: str) -> Claim:
        version = self._tables.one("SELECT version FROM claims WHERE id = ?", claim_id)
        rows = self._tables.all("SELECT * FROM episodes WHERE claim = ? ORDER BY number", claim_id)
        facts = [
            {
                "issued_at": row["issued_at"],
                "finished_at": row["finished_at"],
                "claimed_at": row["claimed_at"],
                "issued_version": float(row["issued_version"]),
                "task_index": float(row["task_index"]),
                "epoch": float(row["epoch"]),
                "attempt": float(row["attempt"]),
                "lag": float(version - row["oldest_version"]),
            }
            for row in rows
        ]
        return Claim(claim_id, [row["data"] for row in rows], facts)
