# ruff: noqa: F722
"""Credit assignment: from rewards and values to one advantage per action token.

Pure functions on torch tensors. One row is one episode, [B, T], or one chain of an episode that has branches; packing
exists only around forwards. `values[b, t]` is
the value of the state in which token t was chosen (the critic's output at t-1), so that a turn's first action has seen
the observation before it. Off the action mask no input is read (it may be NaN) and outputs and gradients are 0.
Everything here is differentiable in `values`; the losses treat advantages and returns as constants.

float32 and float64 keep their dtype, narrower ones come back as float32. Recurrences run in float64 over the compacted
action tokens, in log2(L) vectorised passes: 128K tokens are 17 passes, not 128K iterations.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from learner.baselines import RunningMeanBaseline
from learner.maths.statistics import explained_variance
from learner.maths.tensors import as_mask, compute_dtype, require_rows, require_shape, scan_dtype

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped

__all__ = [
    "CreditInputs",
    "RunningMeanBaseline",
    "episode_rewards",
    "explained_variance",
    "group_advantages",
    "leave_one_out_advantages",
    "length_adaptive_lambda",
    "next_action_index",
    "normalize_by_task",
    "skip_observation_gae",
    "spread_over_actions",
    "step_level_gae",
    "turn_counts",
    "vtrace",
]

_MAX_LOG_RATIO = 80.0  # exp(80) is finite in float32 and beyond any ratio that means something


@dataclass(frozen=True)
class CreditInputs:
    """What an advantage or a value target may depend on; each baseline reads what it needs, and says what is missing.

    rewards, values, logprobs and rollout_logprobs float[B,T]; action_mask [B,T]; turn_ids int[B,T]; bootstrap float[B].
    `group_ids` [B]: episodes of one prompt, all of them in this call. `prompt_ids` [B]: for a running mean that is kept
    per prompt. `task_ids` [B]: the kind of task of each episode. `episodes` [B]: of which one each row is, where it may
    have several; what compares episodes counts each once, by the first of its rows. `values` count as constants.
    """

    rewards: Float[Tensor, "B T"]
    action_mask: Shaped[Tensor, "B T"]
    values: Float[Tensor, "B T"] | None = None
    turn_ids: Int[Tensor, "B T"] | None = None
    logprobs: Float[Tensor, "B T"] | None = None
    rollout_logprobs: Float[Tensor, "B T"] | None = None
    bootstrap: Float[Tensor, " B"] | None = None
    group_ids: Int[Tensor, " B"] | Sequence[Hashable] | None = None
    prompt_ids: Sequence[str | int] | None = None
    task_ids: Int[Tensor, " B"] | Sequence[Hashable] | None = None
    running_mean: RunningMeanBaseline | None = None
    episodes: Int[Tensor, " B"] | Sequence[Hashable] | None = None


class _Actions(NamedTuple):
    """Where the action tokens are, and where each stands among its episode's action tokens."""

    row: Int[Tensor, " N"]
    column: Int[Tensor, " N"]
    rank: Int[Tensor, " N"]
    counts: Int[Tensor, " B"]
    shape: tuple[int, int]

    @classmethod
    def of(cls, mask: Bool[Tensor, "B T"]) -> _Actions:
        row, column = mask.nonzero(as_tuple=True)
        rank = (mask.cumsum(1) - 1)[row, column]
        return cls(row, column, rank, mask.sum(1), (mask.shape[0], mask.shape[1]))

    @property
    def longest(self) -> int:
        return int(self.counts.max()) if self.counts.numel() else 0

    def compact(self, tensor: Shaped[Tensor, "B T"], dtype: torch.dtype) -> Shaped[Tensor, "B L"]:
        """The action tokens of each row side by side, zeros behind them."""
        out = torch.zeros(self.shape[0], self.longest, dtype=dtype, device=tensor.device)
        return out.index_put((self.row, self.rank), tensor[self.row, self.column].to(dtype))

    def expand(self, tensor: Shaped[Tensor, "B L"], dtype: torch.dtype) -> Shaped[Tensor, "B T"]:
        """The inverse of `compact`: zeros wherever there is no action token."""
        out = torch.zeros(self.shape, dtype=dtype, device=tensor.device)
        return out.index_put((self.row, self.column), tensor[self.row, self.rank].to(dtype))


def next_action_index(action_mask: Shaped[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Index of the next action token, int64[B, T]; -1 at the last action token and wherever there is none.

    This is the bridge over an observation: at a turn's last token it names the next turn's first (SAO, section 4.2).
    """
    mask = as_mask(action_mask)
    length = mask.shape[1]
    if mask.numel() == 0:
        return torch.empty(mask.shape, dtype=torch.int64, device=mask.device)
    positions = torch.arange(length, device=mask.device).expand(mask.shape)
    here = torch.where(mask, positions, length)
    after = torch.cat([here[:, 1:], here.new_full((mask.shape[0], 1), length)], dim=1)
    following = after.flip(1).cummin(1).values.flip(1)
    return torch.where(mask & (following < length), following, -1)


def length_adaptive_lambda(action_counts: Shaped[Tensor, " B"], alpha: float = 1.5) -> Float[Tensor, " B"]:
    """lambda = 1 - 1 / (alpha * l), clamped to [0, 1] (VAPO; SAO uses alpha = 1.5 for the policy only).

    `action_counts` is l, the number of action tokens of each row (turns for the step presets), never its length with
    observations; a chain of an episode with branches counts its own. Integers give float64: at l = 40,000 float32 would
    keep only three digits of 1 - lambda.
    """
    if not alpha > 0:
        raise ValueError(f"alpha is {alpha}, expected a number above 0")
    if action_counts.is_floating_point():
        counts = action_counts.to(compute_dtype(action_counts))
    else:
        counts = action_counts.to(scan_dtype(action_counts.device))
    return (1.0 - 1.0 / (alpha * counts)).clamp(0.0, 1.0)  # l = 0 is -inf before the clamp


def skip_observation_gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    action_mask: Shaped[Tensor, "B T"],
    *,
    gamma: float = 1.0,
    lam: float | Float[Tensor, " B"],
    bootstrap: Float[Tensor, " B"] | None = None,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Token-level GAE whose next state is the next *action* token: `(advantages, returns)`, both [B, T].

    With n the next action token after t, across any observation (SAO, section 4.2):

        delta_t = r_t + gamma * V_n - V_t,    A_t = delta_t + gamma * lambda * A_n,    returns_t = A_t + V_t

    `rewards` may stand on any action token (the packer uses each turn's last). After the last action V_n is
    `bootstrap` (None: 0) and A_n is 0. `lam` is one number or one per episode. With lam=1 and gamma=1 the returns are
    the rewards to come, whatever V is. Raises `ValueError` on shapes that do not match.
    """
    mask = as_mask(action_mask)
    require_shape(mask, rewards=rewards, values=values)
    actions, dtype = _Actions.of(mask), compute_dtype(values)
    wide = scan_dtype(values.device)
    value = actions.compact(values, wide)
    delta = actions.compact(rewards, wide) + gamma * _next_state(value, actions.counts, bootstrap) - value
    advantage = _discounted_sum(delta, gamma * _per_row("lam", lam, value))
    return actions.expand(advantage, dtype), actions.expand(advantage + value, dtype)


def step_level_gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    action_mask: Shaped[Tensor, "B T"],
    turn_ids: Int[Tensor, "B T"],
    *,
    gamma: float = 1.0,
    lam: float | Float[Tensor, " B"],
    pooling: Literal["average", "last"] = "average",
    bootstrap: Float[Tensor, " B"] | None = None,
) -> Float[Tensor, "B T"]:
    """GAE over turns, each token given its turn's advantage: [B, T] (SAO, section 4.3, the two step-level variants).

    `turn_ids` are equal inside an action segment and change from one to the next (off the mask they are not read).
    The value of a turn is the mean of its tokens' values (`average`) or the last one (`last`); its rewards are summed.
    For an adaptive lambda count l in turns (`turn_counts`). Raises `ValueError` on shapes or an unknown pooling.
    """
    if pooling not in ("average", "last"):
        raise ValueError(f"pooling is {pooling!r}, expected 'average' or 'last'")
    mask = as_mask(action_mask)
    require_shape(mask, rewards=rewards, values=values, turn_ids=turn_ids)
    actions, dtype = _Actions.of(mask), compute_dtype(values)
    wide = scan_dtype(values.device)
    turn, counts = _turns(actions, turn_ids)
    where = (actions.row, turn[actions.row, actions.rank])
    turns = int(counts.max()) if counts.numel() else 0
    zeros = torch.zeros(mask.shape[0], turns, dtype=wide, device=values.device)

    token_value = values[actions.row, actions.column].to(wide)
    reward = zeros.index_put(where, rewards[actions.row, actions.column].to(wide), accumulate=True)
    if pooling == "average":
        size = zeros.index_put(where, torch.ones_like(token_value), accumulate=True)
        value = zeros.index_put(where, token_value, accumulate=True) / size.clamp(min=1)
    else:
        ends = turn[actions.row, actions.rank] != _neighbour(turn, actions)
        value = zeros.index_put((where[0][ends], where[1][ends]), token_value[ends])
    delta = reward + gamma * _next_state(value, counts, bootstrap) - value
    advantage = _discounted_sum(delta, gamma * _per_row("lam", lam, value))
    out = torch.zeros(mask.shape, dtype=dtype, device=values.device)
    return out.index_put((actions.row, actions.column), advantage[where].to(dtype))


def turn_counts(action_mask: Shaped[Tensor, "B T"], turn_ids: Int[Tensor, "B T"]) -> Int[Tensor, " B"]:
    """Number of turns that hold an action token, int64[B]: the l of a step-level adaptive lambda."""
    mask = as_mask(action_mask)
    require_shape(mask, turn_ids=turn_ids)
    return _turns(_Actions.of(mask), turn_ids)[1]


def vtrace(
    logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    action_mask: Shaped[Tensor, "B T"],
    *,
    gamma: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    bootstrap: Float[Tensor, " B"] | None = None,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """V-trace targets and policy-gradient advantages over action tokens, `(vs, policy_advantages)`, both [B, T].

    IMPALA (Espeholt et al. 2018, equation 1 and section 4.2), n being the next action token, w = exp(log pi - log mu),
    rho = min(rho_bar, w), c = min(c_bar, w):

        vs_t = V_t + rho_t * (r_t + gamma * V_n - V_t) + gamma * c_t * (vs_n - V_n)
        policy_advantage_t = rho_t * (r_t + gamma * vs_n - V_t)

    The ratio is a constant: no gradient reaches `logprobs`. The policy loss is then plain -A * log pi. A token whose
    log-ratio is not finite has ratio 0. On-policy (w = 1) vs is the return of GAE with lam=1.
    """
    mask = as_mask(action_mask)
    require_shape(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs, rewards=rewards, values=values)
    for name, bar in (("rho_bar", rho_bar), ("c_bar", c_bar)):
        if not bar > 0:
            raise ValueError(f"{name} is {bar}, expected a number above 0")
    actions, dtype = _Actions.of(mask), compute_dtype(values)
    wide = scan_dtype(values.device)
    log_ratio = actions.compact(logprobs.detach(), wide) - actions.compact(rollout_logprobs.detach(), wide)
    finite = log_ratio.isfinite()

    def clipped(bar: float) -> Tensor:
        bounded = log_ratio.clamp(max=min(math.log(bar), _MAX_LOG_RATIO))
        return torch.where(finite, bounded.exp(), torch.zeros_like(bounded))

    rho, c = clipped(rho_bar), clipped(c_bar)
    value, reward = actions.compact(values, wide), actions.compact(rewards, wide)
    delta = rho * (reward + gamma * _next_state(value, actions.counts, bootstrap) - value)
    target = value + _discounted_sum(delta, gamma * c)
    advantage = rho * (reward + gamma * _next_state(target, actions.counts, bootstrap) - value)
    return actions.expand(target, dtype), actions.expand(advantage, dtype)


def group_advantages(
    rewards: Float[Tensor, " N"],
    group_ids: Int[Tensor, " N"] | Sequence[Hashable],
    *,
    normalize: bool = True,
    eps: float = 1e-8,
) -> Float[Tensor, " N"]:
    """Reward minus the group's mean, over its standard deviation: one advantage an episode, [N] (GRPO).

    The deviation is the population's with `eps` inside the root, sqrt(mean((R - mean)^2) + eps); `normalize=False`
    leaves it out. A group of equal rewards gives 0. Raises `ValueError` for a group of one, which has no baseline.
    """
    wide, group, size, mean = _groups(rewards, group_ids)
    centred = wide - mean[group]
    if normalize:
        variance = torch.zeros_like(size).index_add(0, group, centred**2) / size
        centred = centred / (variance + eps).sqrt()[group]
    return centred.to(compute_dtype(rewards))


def leave_one_out_advantages(
    rewards: Float[Tensor, " N"], group_ids: Int[Tensor, " N"] | Sequence[Hashable]
) -> Float[Tensor, " N"]:
    """Reward minus the mean reward of the *other* episodes of its group, [N] (RLOO, Ahmadian et al. 2024).

    Raises `ValueError` for a group of one.
    """
    wide, group, size, mean = _groups(rewards, group_ids)
    scale = (size / (size - 1))[group]
    return ((wide - mean[group]) * scale).to(compute_dtype(rewards))


def normalize_by_task(
    advantages: Float[Tensor, "B T"],
    action_mask: Shaped[Tensor, "B T"],
    task_ids: Int[Tensor, " B"] | Sequence[Hashable],
    *,
    eps: float = 1e-8,
) -> Float[Tensor, "B T"]:
    """Advantages standardised over all action tokens of the same task, [B, T] (AgentRL, task advantage normalisation).

    Without it a task with long or many-valued rewards drowns the others of a mixed batch. `eps` is inside the root.
    """
    mask = as_mask(action_mask)
    require_shape(mask, advantages=advantages)
    actions = _Actions.of(mask)
    task = _index_of("task_ids", task_ids, mask.shape[0], mask.device)[actions.row]
    wide = advantages[actions.row, actions.column].to(scan_dtype(advantages.device))
    zeros = torch.zeros(int(task.max()) + 1 if task.numel() else 0, dtype=wide.dtype, device=wide.device)
    size = zeros.index_add(0, task, torch.ones_like(wide)).clamp(min=1)
    centred = wide - (zeros.index_add(0, task, wide) / size)[task]
    variance = zeros.index_add(0, task, centred**2) / size
    dtype = compute_dtype(advantages)
    out = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return out.index_put((actions.row, actions.column), (centred / (variance + eps).sqrt()[task]).to(dtype))


def episode_rewards(rewards: Float[Tensor, "B T"], action_mask: Shaped[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """The undiscounted reward of each row's episode, [B]: the sum over its action tokens."""
    mask = as_mask(action_mask)
    require_shape(mask, rewards=rewards)
    dtype = compute_dtype(rewards)
    return torch.where(mask, rewards.to(dtype), torch.zeros((), dtype=dtype, device=rewards.device)).sum(1)


def spread_over_actions(
    episode_advantages: Float[Tensor, " B"], action_mask: Shaped[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Give every action token the advantage of its episode, [B, T]; 0 off the mask."""
    mask = as_mask(action_mask)
    require_rows("episode_advantages", episode_advantages, mask.shape[0])
    wide = episode_advantages.to(compute_dtype(episode_advantages))[:, None]
    return torch.where(mask, wide, torch.zeros_like(wide))


def _next_state(
    value: Float[Tensor, "B L"], counts: Int[Tensor, " B"], bootstrap: Float[Tensor, " B"] | None
) -> Float[Tensor, "B L"]:
    """The value one step later; `bootstrap` behind the last step of a row. `value` is 0 behind that step."""
    following = torch.nn.functional.pad(value[:, 1:], (0, 1)) if value.shape[1] else value
    if bootstrap is None:
        return following
    require_rows("bootstrap", bootstrap, value.shape[0])
    rows = counts.nonzero().squeeze(1)  # a row without a step reads no bootstrap either
    return following.index_put((rows, counts[rows] - 1), bootstrap[rows].to(value.dtype))


def _discounted_sum(delta: Float[Tensor, "B L"], decay: Float[Tensor, "B K"]) -> Float[Tensor, "B L"]:
    """x_t = delta_t + decay_t * x_{t+1} for every row, by doubling: after k passes x_t covers 2^k terms.

    No division and no power above 1, so it is as stable as the loop it replaces. `decay` has one column (K = 1)
    or one per step.
    """
    total, length = delta, delta.shape[1]
    decay = decay.expand_as(delta) if decay.shape[1] != 1 else decay
    reach = 1
    while reach < length:
        head = decay[:, : length - reach] if decay.shape[1] != 1 else decay
        total = total + torch.nn.functional.pad(head * total[:, reach:], (0, reach))
        if decay.shape[1] != 1:
            decay = torch.nn.functional.pad(decay[:, : length - reach] * decay[:, reach:], (0, reach))
        else:
            decay = decay * decay
        reach *= 2
    return total


def _per_row(name: str, number: float | Tensor, like: Float[Tensor, "B L"]) -> Float[Tensor, "B 1"]:
    """One number, or one per episode, as a column."""
    column = torch.as_tensor(number, dtype=like.dtype, device=like.device)
    if column.dim() == 0:
        return column.expand(like.shape[0], 1)
    require_rows(name, column, like.shape[0])
    return column[:, None]


def _turns(actions: _Actions, turn_ids: Int[Tensor, "B T"]) -> tuple[Int[Tensor, "B L"], Int[Tensor, " B"]]:
    """Turn number of every compacted action token, from 0 without gaps, and the number of turns of each row."""
    ids = actions.compact(turn_ids, torch.int64)
    begins = torch.ones_like(ids)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    turn = begins.cumsum(1) - 1
    counts = torch.zeros_like(actions.counts)
    rows = actions.counts.nonzero().squeeze(1)
    counts[rows] = turn[rows, actions.counts[rows] - 1] + 1
    return turn, counts


def _neighbour(turn: Int[Tensor, "B L"], actions: _Actions) -> Int[Tensor, " N"]:
    """For every action token the turn of the action token after it, -1 behind the last."""
    following = torch.nn.functional.pad(turn, (0, 1), value=-1)[actions.row, actions.rank + 1]
    last = actions.rank + 1 == actions.counts[actions.row]
    return following.masked_fill(last, -1)


def _groups(
    rewards: Float[Tensor, " N"], group_ids: Int[Tensor, " N"] | Sequence[Hashable]
) -> tuple[Float[Tensor, " N"], Int[Tensor, " N"], Float[Tensor, " G"], Float[Tensor, " G"]]:
    """(wide rewards, group index of each, group sizes, group means); refuses groups of one."""
    if rewards.dim() != 1:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}, expected [N]: one number an episode")
    group = _index_of("group_ids", group_ids, rewards.shape[0], rewards.device)
    wide = rewards.to(scan_dtype(rewards.device))
    zeros = torch.zeros(int(group.max()) + 1 if group.numel() else 0, dtype=wide.dtype, device=wide.device)
    size = zeros.index_add(0, group, torch.ones_like(wide))
    if bool((size < 2).any()):
        alone = int((size < 2).nonzero()[0])
        raise ValueError(
            f"group {_name_of(group_ids, group, alone)} has one episode: a group baseline needs at least 2"
        )
    return wide, group, size, zeros.index_add(0, group, wide) / size


def _index_of(name: str, ids: Tensor | Sequence[Hashable], rows: int, device: torch.device) -> Int[Tensor, " N"]:
    """Consecutive numbers for arbitrary ids, given as a tensor or as any sequence of hashable things."""
    if isinstance(ids, Tensor):
        require_rows(name, ids, rows)
        return ids.to(device).unique(return_inverse=True)[1]
    if len(ids) != rows:
        raise ValueError(f"{name} has {len(ids)} entries, expected {rows}: one an episode")
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(i, len(numbers)) for i in ids], dtype=torch.int64, device=device)


def _name_of(ids: Tensor | Sequence[Hashable], index: Int[Tensor, " N"], wanted: int) -> Hashable:
    position = int((index == wanted).nonzero()[0])
    return ids[position].item() if isinstance(ids, Tensor) else ids[position]
