"""The ledger of work: which tickets are out, which episodes are ready, what has been trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agent.store import rules
from agent.store.asides import Asides
from agent.store.claims import Claims
from agent.store.config import StoreConfig
from agent.store.evaluations import Evaluations
from agent.store.offers import Offers
from agent.store.protocol import StoreStatus
from agent.store.retention import NOTHING, Pruned, prune_step
from agent.store.tables import Tables
from agent.store.tickets import Tickets

RECENT = 512
"""How many finished episodes the displayed quantiles look back on."""


class Ledger(Tables):
    """Tickets, episodes and claims in one SQLite file; synchronous, for one thread.

    `Tables` owns the rows; each of the four parts moves some of them. The life of an episode's row, with who moves it
    (a slot of the staleness budget is held while it is ready or claimed; brackets say what gives it back)::

        tickets.deliver, offers.take ──▶ ready    (or at once dropped: a truncated one that is not wanted)

        ready ──claims.take──────────▶ claimed ──claims.commit──▶ trained [slot back once its version is published]
          ▲                               │
          └──claims.release, recover──────┘
        ready ──claims.take: too old────────────────────────────▶ stale [slot back]
        ready ──tickets.fail: a member of its group is lost─────▶ dropped [slot back]
        ready ──offers.forget───────────────────────────────────▶ dropped, and wiped [slot back]
        ready ──offers.replace──────────────────────────────────▶ ready, with another verdict, in its place
        ready, claimed, trained since ──asides.put──────────────▶ set_aside [slot back] ──asides.give_back──▶ ready

        trained, stale, dropped, set_aside ──prune, make_room──▶ the same without its tokens (`agent.store.retention`)

        tickets.deliver, of an evaluation's ticket ──▶ evaluation: no slot, in no claim

    Before it is an episode it is a ticket, whose life is drawn in `Tickets`, or it is offered without one. A claim's
    life is drawn in `Claims`.

        ledger = Ledger("runs/x/episodes.sqlite", StoreConfig(tasks=100, batch=16))
        [tickets] = ledger.apply([lambda: ledger.tickets.lease(16, "runtime-0")])
        [ending] = ledger.apply([lambda: ledger.tickets.deliver(tickets[0].id, episode, agent.episode.encode(episode))])
        [claim] = ledger.apply([lambda: ledger.claims.take("c1", 16, version=0)])
        ledger.apply([lambda: ledger.claims.commit("c1", version=1)])

    Methods run inside `apply`, which makes them durable before it returns.
    """

    def __init__(
        self, path: Path | str, config: StoreConfig | None = None, *, clock: Callable[[], float] | None = None
    ) -> None:
        super().__init__(path, config, clock=clock)
        try:
            self.tickets = Tickets(self)
            self.evaluations = Evaluations(self)
            self.claims = Claims(self)
            self.offers = Offers(self)
            self.asides = Asides(self)
        except BaseException:
            self.close()
            raise

    def prune(self) -> Pruned:
        """Take the tokens of some finished episodes, if there are more than `keep_trained`."""
        keep = self.config.keep_trained
        return NOTHING if keep is None else prune_step(self.sql, keep)

    def make_room(self) -> bool:
        """Take the tokens of some finished episodes because the file is full; whether there were any."""
        keep = self.config.kept_when_full
        if keep is None:
            return False
        [pruned] = self.apply([lambda: prune_step(self.sql, keep)])
        return isinstance(pruned, Pruned) and pruned.episodes > 0

    def set_version(self, version: int) -> None:
        """Announce the version that the engines serve from now on (lower after a rollback)."""
        self.set_meta("version", str(version))
        self.claims.published(version)

    def status(self) -> StoreStatus:
        """Counts, sums since the run began, and quantiles of what was issued against what was consumed (D9)."""
        live = {
            (row["kind"], row["status"]): row["n"]
            for row in self.all(
                "SELECT kind, status, count(*) AS n FROM tickets WHERE status IN ('waiting', 'leased') "
                "GROUP BY kind, status"
            )
        }
        counters = self.counters()
        now = self.clock()
        issued = self.all(
            "SELECT tokens, finished_at - issued_at AS latency FROM episode_rows WHERE kind != 'evaluate' "
            "ORDER BY number DESC LIMIT ?",
            RECENT,
        )
        consumed = self.all(
            "SELECT tokens, finished_at - issued_at AS latency, claimed_at - finished_at AS wait FROM episode_rows "
            "WHERE kind != 'evaluate' AND status IN ('claimed', 'trained') ORDER BY number DESC LIMIT ?",
            RECENT,
        )
        running = self.all("SELECT issued_at FROM tickets WHERE status = 'leased' AND kind = 'train'")
        return StoreStatus(
            version=self.version,
            ready=self.one("SELECT count(*) FROM episode_rows WHERE status = 'ready'"),
            leased=live.get(("train", "leased"), 0),
            set_aside=self.one("SELECT count(*) FROM episode_rows WHERE status = 'set_aside'"),
            claimed=self.one("SELECT count(*) FROM episode_rows WHERE status = 'claimed'"),
            trained=counters.get("trained", 0),
            epoch=min((self.cursor(share.name)[0] for share in self.config.environments), default=self.cursor()[0]),
            counters=counters,
            metrics={
                "waiting": live.get(("train", "waiting"), 0),
                "outstanding": self.outstanding(),
                "capacity": self.config.capacity,
                **({"takeable": self.claims.takeable()} if self.config.max_share_per_user is not None else {}),
                "position": self.cursor()[1],
                "environments": {
                    share.name: dict(zip(("epoch", "position"), self.cursor(share.name), strict=True))
                    for share in self.config.environments
                },
                "evaluate_waiting": live.get(("evaluate", "waiting"), 0),
                "evaluate_leased": live.get(("evaluate", "leased"), 0),
                "workers": self.tickets.workers,
                "issued_tokens": rules.quantiles([row["tokens"] for row in issued]),
                "consumed_tokens": rules.quantiles([row["tokens"] for row in consumed]),
                "issued_latency_s": rules.quantiles([row["latency"] for row in issued]),
                "consumed_latency_s": rules.quantiles([row["latency"] for row in consumed]),
                "running_age_s": rules.quantiles([now - row["issued_at"] for row in running]),
                "consumed_lag": rules.quantiles(list(self.claims.lags)),
                "queue_wait_s": rules.quantiles([row["wait"] for row in consumed]),
            },
        )
