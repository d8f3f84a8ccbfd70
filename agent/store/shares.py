"""How much of a batch one user's verdicts may fill. Decisions only.

A user who judges a hundred times as often as everybody else would be everybody: the policy is trained on batches, and
batches fill with whoever clicks. So a batch takes at most a share of itself from one user. Where there are too few
users to fill a batch so, equal parts are fair; a server with one user is that user's own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def within_share(judges: Sequence[str], count: int, *, share: float, active: int, relaxed: bool) -> list[bool]:
    """Which of the waiting units a batch of `count` may take; `judges[i]` judged unit i, "" is nobody and not bounded.

    The bound a user is the first of these that fills the batch:

    1. `share` of it, at least one unit;
    2. an equal part of it for each of the `active` users (who have judged lately, or have verdicts that wait), where
       these are few. One who is alone is not bounded;
    3. with `relaxed` (no batch was made for long) the smallest bound that fills it: everybody else's verdicts are taken
       whole, and the most prolific users share what is missing.

    Where none fills it, the first one holds, and the batch waits. Of each user the oldest units are taken.
    """
    waiting = Counter(filter(None, judges))
    free = len(judges) - waiting.total()

    def fills(bound: int) -> bool:
        return free + sum(min(bound, n) for n in waiting.values()) >= count

    bounds = [most := max(1, math.floor(share * count))]
    bounds.append(max(most, math.ceil(count / max(1, active, len(waiting)))))
    if relaxed:
        bounds.append(count)
    bound = next((b for b in bounds if fills(b)), most)
    while bound > most and fills(bound - 1):
        bound -= 1
    return _first(judges, bound)


def _first(judges: Sequence[str], bound: int) -> list[bool]:
    """The first `bound` units of each user, and all of nobody's."""
    seen: Counter[str] = Counter()
    allowed = []
    for judge in judges:
        seen[judge] += 1
        allowed.append(not judge or seen[judge] <= bound)
    return allowed
