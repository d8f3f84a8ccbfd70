"""What came of it: rows by policy and source, the table, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One policy in one source. `earned` counts episodes that paid, `faults` those that were void; `examples` shows
    attempts that went the wrong way."""

    environment: str
    source: str
    policy: str
    honest: bool
    episodes: int
    earned: int
    faults: int
    examples: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """The share of episodes that earned, 0 to 1, of those that were not void."""
        return self.earned / max(1, self.episodes - self.faults)

    @property
    def wrong(self) -> bool:
        """An attacker that earned, an honest policy that did not always, or a fault."""
        return bool(self.faults) or (self.earned < self.episodes if self.honest else self.earned > 0)


def attackers_earned(rows: Sequence[Row]) -> int:
    """Episodes in which an attacker earned."""
    return sum(row.earned for row in rows if not row.honest)


def as_json(rows: Sequence[Row], seeds: Sequence[int], not_played: dict[str, str]) -> str:
    """The whole report as one JSON object."""
    attacks = [row for row in rows if not row.honest]
    honest = [row for row in rows if row.honest]
    report: dict[str, Any] = {
        "seeds": list(seeds),
        "attackers": _totals(attacks),
        "honest": _totals(honest),
        "not_played": not_played,
        "rows": [{**asdict(row), "share": row.share} for row in rows],
    }
    return json.dumps(report, ensure_ascii=False, indent=1)


def _totals(rows: Sequence[Row]) -> dict[str, Any]:
    episodes, earned, faults = (sum(getattr(row, key) for row in rows) for key in ("episodes", "earned", "faults"))
    return {"episodes": episodes, "earned": earned, "faults": faults, "share": earned / max(1, episodes - faults)}


def show(rows: Sequence[Row], console: Console) -> None:
    """Print two tables, attackers and honest policies, and examples of what went wrong."""
    for honest in (False, True):
        chosen = [row for row in rows if row.honest is honest]
        if not chosen:
            continue
        sums = _totals(chosen)
        what = "honest: taken" if honest else "attackers: earned"
        table = Table(title=f"{what} {sums['earned']} of {sums['episodes'] - sums['faults']} ({sums['share']:.2%})")
        for name in ("environment", "policy", "source"):
            table.add_column(name, overflow="fold")
        for name in ("episodes", "taken" if honest else "earned", "share", "faults"):
            table.add_column(name, justify="right")
        for row in sorted(chosen, key=lambda row: (row.environment, row.policy, row.source)):
            cells = [row.environment.partition("/")[2] or row.environment, row.policy, row.source, str(row.episodes)]
            cells += [str(row.earned), f"{row.share:.1%}", str(row.faults or "")]
            table.add_row(*cells, style="red" if row.wrong else None)
        console.print(table)
    for row in rows:
        for example in row.examples[:1] if row.wrong else ():
            end = "fault" if row.faults else "refused" if row.honest else "EARNED"
            console.print(f"{end}: {row.policy}, {row.source}: {example}", markup=False, highlight=False)
