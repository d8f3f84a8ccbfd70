"""A batch in several parts, where the policy is updated more than once: the same parts on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from agent.episode import Episode
from learner.parallel.dealing import groups_of, rows_of_rank, tokens_of


def minibatches_of(episodes: Sequence[Episode], count: int) -> list[list[int]]:
    """The episodes, by index, of each of `count` parts of a batch.

    Whole groups, as many in each part (one more at most), of like length.

    It looks at the whole batch, so the parts are the same however many ranks share them. In each round every part is
    given a group, the one with the fewest tokens the longest. Raises `ValueError` for fewer groups than parts.
    """
    if count == 1:
        return [list(range(len(episodes)))]
    groups = groups_of(episodes)
    if len(groups) < count:
        raise ValueError(f"a batch of {len(groups)} prompts has no {count} parts; lower learner.policy_minibatches")

    def tokens(rows: list[int]) -> int:
        return tokens_of(episodes, rows)

    order = sorted(groups, key=tokens, reverse=True)
    parts: list[list[int]] = [[] for _ in range(count)]
    for start in range(0, len(order), count):
        takers = sorted(range(count), key=lambda part: tokens(parts[part]))
        for taker, rows in zip(takers, order[start : start + count], strict=False):
            parts[taker] += rows
    return [sorted(rows) for rows in parts]


def share_of_rank(episodes: Sequence[Episode], parts: Sequence[Sequence[int]], rank: int, world: int) -> list[int]:
    """The episodes, by index, that are for `rank` of `world`: its share of every part, in the order of the batch."""
    rows: list[int] = []
    for part in parts:
        rows += [part[row] for row in rows_of_rank([episodes[row] for row in part], rank, world)]
    return sorted(rows)


def places(rows: Sequence[int], parts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Where among a rank's `rows` those of each part stand; a part may have none of them."""
    place = {row: index for index, row in enumerate(rows)}
    return [[place[row] for row in part if row in place] for part in parts]
