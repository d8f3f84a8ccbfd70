"""Who judged: names that say nothing of the person, for the share of a batch that one user may have.

A verdict's judge is not always its conversation's owner, and an address is in no conversation. So it is written down
with the verdict, as a keyed hash: whoever reads the store learns that two verdicts are of one user, and not whose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

ANONYMOUS = "anonymous"
"""The name behind requests to a server without keys."""


class Judges:
    """Names for callers. `secret`: what the hash is keyed with; the same one gives the same names after a restart.

    `by`: what counts as one user, see `serve.judged_by`.
    """

    def __init__(self, secret: str, by: Literal["user", "key"]) -> None:
        self._secret = hashlib.blake2b(secret.encode()).digest()
        self._by = by

    def name(self, key: str, user: str, address: str) -> str:
        """The name of who calls with `key` for `user` from `address`.

        Without keys a `user` is only what a client calls itself, and one client could call itself fifty: there it is
        the address. A key answers for the users that it names.
        """
        known = ["key", key] if self._by == "key" else ["user", key, user]
        parts = ["address", address] if key == ANONYMOUS else known
        text = "\0".join(parts).encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, key=self._secret, digest_size=8).hexdigest()


def judge_of(verdicts: Sequence[tuple[float, str]]) -> str:
    """Whose an episode is, of the verdicts (when, judge) on its responses: who judged most of them, of equals the last.

    "" where nobody is known.
    """
    known = [(at, judge) for at, judge in verdicts if judge]
    counts: dict[str, tuple[int, float]] = {}
    for at, judge in known:
        n, last = counts.get(judge, (0, 0.0))
        counts[judge] = (n + 1, max(last, at))
    return max(counts, key=lambda judge: counts[judge], default="")
