"""Which rank learns from which rows of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations

from agent.episode import Episode

EVEN_ENOUGH = 1.01
"""The most loaded rank against what can be reached, from where on nothing is exchanged any more."""


def groups_of(episodes: Sequence[Episode]) -> list[list[int]]:
    """The episodes of each group of a batch, by index, in the order in which groups come; one without is its own."""
    groups: dict[str, list[int]] = {}
    for row, episode in enumerate(episodes):
        groups.setdefault(episode.group_id or episode.id, []).append(row)
    return list(groups.values())


def tokens_of(episodes: Sequence[Episode], chosen: Sequence[int]) -> int:
    """How many tokens the chosen ones have together, in all their chains."""
    return sum(episodes[index].tokens for index in chosen)


def rows_of_rank(episodes: Sequence[Episode], rank: int, world: int) -> list[int]:
    """The episodes of a batch, by index, that are for `rank` of `world`.

    They are whole groups, dealt so that ranks have as many tokens.

    A group is never split, because its advantages compare its members. Tokens are what is evened out, not their cost
    in attention: micro-batches, memory and most of the time follow them. Where there are fewer groups than ranks, the
    last ranks get none and run blank rows.
    """
    if world == 1:
        return list(range(len(episodes)))
    members = groups_of(episodes)
    if len(members) < world:
        return sorted(members[rank]) if rank < len(members) else []
    tokens = [tokens_of(episodes, rows) for rows in members]
    return sorted(row for group in deal(tokens, world)[rank] for row in members[group])


def deal(weights: Sequence[int], world: int) -> list[list[int]]:
    """Share indices out to `world` ranks so that the largest sum of `weights` is small; at least one index each.

    Longest first to the least loaded rank, then the most loaded one gives something away, or exchanges it for what is
    lighter, as long as that helps. No rank can have less than the mean or than the largest weight, so that is the bound
    where one thing outweighs the mean. The same on every rank. At least `world` weights are needed.
    """
    shares: list[list[int]] = [[] for _ in range(world)]
    loads = [0] * world
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        least = min(range(world), key=lambda r: (len(shares[r]) > 0, loads[r], r))
        shares[least].append(index)
        loads[least] += weights[index]
    reachable = max(sum(weights) / world, max(weights, default=0))
    while max(loads) > EVEN_ENOUGH * reachable:
        top = loads.index(max(loads))
        found = _best_exchange(weights, shares, loads, top, 1) or _best_exchange(weights, shares, loads, top, 2)
        if found is None:
            break
        other, given, taken = found
        shares[top] = [i for i in shares[top] if i not in given] + list(taken)
        shares[other] = [i for i in shares[other] if i not in taken] + list(given)
        for rank in (top, other):
            loads[rank] = sum(weights[i] for i in shares[rank])
    return shares


def _best_exchange(
    weights: Sequence[int], shares: list[list[int]], loads: list[int], top: int, most: int
) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """With whom `top` exchanges what for what, at most `most` things a side, so that the heavier of both is lightest;
    None if nothing helps."""
    best, lightest = None, loads[top]
    gifts = [(part, sum(weights[i] for i in part)) for part in _parts(shares[top], 1, most)]
    for other in range(len(shares)):
        if other == top:
            continue
        for taken in _parts(shares[other], 0, most):
            back = sum(weights[i] for i in taken)
            for given, away in gifts:
                heavier = max(loads[top] - away + back, loads[other] + away - back)
                if heavier < lightest and len(given) - len(taken) < len(shares[top]):
                    best, lightest = (other, given, taken), heavier
    return best


def _parts(share: list[int], least: int, most: int) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(share, size) for size in range(least, most + 1))
