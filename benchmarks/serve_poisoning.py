"""What one user of fifty can do to the others: he judges the opposite of everybody, and far more often.

    python benchmarks/serve_poisoning.py --seeds 0,1,2 --out runs/poisoning [--quick]

The tiny model of `recipes/style_shift_tiny.yaml` (after its cold start) is trained by the real learner on batches from
a real store; only HTTP is left out. In every round 49 users give `--honest` verdicts, each of a user drawn at random:
reward = quality x style, the style being cute. They teach for `--alone` rounds. Then the fiftieth joins them, who gives
`--poison` verdicts a round, each 1 less what the reply deserves. After each round the learner takes every batch that
the store lets it have. Three arms on the same seeds (paired: the same users ask the same things):

    quiet      he never comes
    uncapped   max_share_per_user is off
    capped     max_share_per_user is 1/8, the default of served recipes

`fall` is how much lower the others' mean reward is than in the quiet arm over the last third of the rounds after he
came. The claim: the fall with the cap is less than a tenth of the fall without. Finished arms are files in `--out`, and
are not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from agent.chat.renderer import ChatRenderer
from agent.episode import Episode, SamplingParams, Segment, StopReason, decode, encode
from agent.simulate.compare import make_env
from agent.store.config import StoreConfig
from agent.store.ledger import Ledger
from benchmarks.report import save_json, show
from envs.style_shift.env import StyleShift
from learner.config import load_recipe
from learner.run.learner import Learner

RECIPE = Path("recipes/style_shift_tiny.yaml")
STYLE, ROUND_S = "cute", 20.0
RATE = 6e-4  # three times the recipe's: the same in a third of the rounds
ARMS: dict[str, float | None] = {"quiet": None, "uncapped": None, "capped": 0.125}


@dataclass(frozen=True)
class Plan:
    """How many verdicts of whom, and for how long."""

    rounds: int
    alone: int
    honest: int
    poison: int

    def verdicts(self, arm: str, at: int) -> list[str]:
        """Who judges in round `at`, in order: the poisoner's come between the others'."""
        rng = random.Random(f"users:{at}")
        judges = [f"user-{rng.randrange(49)}" for _ in range(self.honest)]
        if arm != "quiet" and at >= self.alone:
            judges += ["poisoner"] * self.poison
            rng.shuffle(judges)
        return judges

    @property
    def late(self) -> int:
        """The first of the rounds that count."""
        return self.rounds - (self.rounds - self.alone) // 3


class Served:
    """The policy as a server has it: replies to prompts, as episodes without a verdict yet."""

    def __init__(self, learner: Learner, renderer: ChatRenderer, env: StyleShift, most: int) -> None:
        self._learner, self._renderer, self._env, self._most = learner, renderer, env, most

    @torch.no_grad()
    def replies(self, tasks: Sequence[str], seed: str) -> list[Segment]:
        """One sampled action for each task, [prompt, action] as segments one after the other."""
        prompts = [self._renderer.start(self._env.messages(task, 0), None).token_ids for task in tasks]
        generator = torch.Generator().manual_seed(random.Random(seed).randrange(2**31))
        stop, pad = self._renderer.stop_token_ids, 0
        longest = max(map(len, prompts))
        ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        model = self._learner.policy.unwrapped.model
        live, cache = torch.ones(len(tasks), dtype=torch.bool), None
        drawn: list[torch.Tensor] = []
        scores: list[torch.Tensor] = []
        given = ids
        while live.any() and len(drawn) < self._most:
            places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -given.shape[1] :]
            out = model(given, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logprobs = out.logits[:, -1].float().log_softmax(-1)
            token = torch.multinomial(logprobs.exp(), 1, generator=generator)
            drawn.append(token[:, 0])
            scores.append(logprobs.gather(1, token)[:, 0])
            live &= ~torch.isin(token[:, 0], torch.tensor(stop))
            given, mask = token, torch.cat([mask, torch.ones(len(tasks), 1, dtype=mask.dtype)], 1)
        tokens, values = torch.stack(drawn, 1).tolist(), torch.stack(scores, 1).tolist()
        version = self._learner.progress.version
        found = []
        for prompt, row, score in zip(prompts, tokens, values, strict=True):
            end = next((i + 1 for i, token in enumerate(row) if token in stop), len(row))
            found.append(Segment("prompt", prompt))
            found.append(
                Segment(
                    "action",
                    row[:end],
                    text=self._renderer.decode(row[:end]),
                    logprobs=score[:end],
                    versions=[version] * end,
                    finish_reason="stop" if row[end - 1] in stop else "length",
                )
            )
        return found


async def run_arm(arm: str, seed: int, plan: Plan, model: Path, folder: Path) -> dict[str, Any]:
    """One arm with one seed: by round, what the others' replies deserved on average, and the versions made so far."""
    words = [f"runs_dir={folder}", f"seed={seed}", "learner.online=true", "learner.held_out_probe=null"]
    words.append(f"learner.policy.lr={RATE}")
    recipe = load_recipe(RECIPE, words)
    torch.manual_seed(seed)
    learner = Learner.build(recipe, Accelerator(cpu=True), policy_folder=model, critic_folder=folder / "none")
    env = make_env(RECIPE, [])
    most = recipe.runtime.max_tokens_per_turn
    served = Served(learner, await asyncio.to_thread(recipe.runtime.chat.load, model), env, most)
    size = recipe.learner.batch_size
    config = StoreConfig(tasks=0, batch=size, max_lag=4, max_share_per_user=ARMS[arm])
    now = [0.0]
    ledger = Ledger(folder / "episodes.sqlite", config, clock=lambda: now[0])
    ledger.sql.execute("PRAGMA synchronous=OFF")  # nothing here outlives the process
    rewards, versions, poisoned = [], [], []
    try:
        for at in range(plan.rounds):
            now[0] += ROUND_S
            judges = plan.verdicts(arm, at)
            told = await _round(served, env, judges, f"{seed}:{at}", ledger)
            rewards.append(math.fsum(told) / len(told))
            taken = _train(ledger, learner, size, at)
            poisoned.append(sum(judge == "poisoner" for judge in taken) / max(len(taken), 1))
            versions.append(learner.progress.version)
            if at % 10 == 9:
                recent = math.fsum(rewards[-10:]) / 10
                print(f"{arm} seed {seed} round {at + 1}: others {recent:.3f}, version {versions[-1]}", flush=True)
    finally:
        ledger.close()
        await env.aclose()
    return {"arm": arm, "seed": seed, "rewards": rewards, "versions": versions, "poisoned": poisoned}


async def _round(served: Served, env: StyleShift, judges: list[str], seed: str, ledger: Ledger) -> list[float]:
    """Everybody asks and judges, and the store has it; what the honest users' replies deserved."""
    of = {poisoner: random.Random(f"tasks:{seed}:{poisoner}") for poisoner in (True, False)}
    tasks = [of[judge == "poisoner"].choice(env.task_ids) for judge in judges]
    segments = served.replies(tasks, seed)
    told, offers = [], []
    for number, (judge, task) in enumerate(zip(judges, tasks, strict=True)):
        prompt, action = segments[2 * number : 2 * number + 2]
        deserved = (await env.verdict(task, action.text, 0)).reward(STYLE)
        if judge != "poisoner":
            told.append(deserved)
        reward = 1.0 - deserved if judge == "poisoner" else deserved
        offers.append((judge, _episode(f"{seed}:{number}", task, prompt, action, reward)))
    ledger.apply([lambda e=e, j=j: ledger.offers.take(e, encode(e), j) for j, e in offers])  # type: ignore[misc]
    return told


def _episode(name: str, task: str, prompt: Segment, action: Segment, reward: float) -> Episode:
    return Episode(
        id=name,
        env_id="serve",
        task_id=task,
        segments=(prompt, action),
        turn_rewards=(reward,),
        stop_reason=StopReason.TERMINATED,
        sampling=SamplingParams(temperature=1.0),
    )


def _train(ledger: Ledger, learner: Learner, size: int, at: int) -> list[str]:
    """Train on every batch that there is; whose verdicts were in them."""
    taken: list[str] = []
    for number in range(1000):
        name = f"{at}-{number}"
        [claim] = ledger.apply([lambda: ledger.claims.take(name, size, learner.progress.version)])  # noqa: B023
        if isinstance(claim, Exception):
            raise claim
        if claim is None:
            break
        taken += [row["judge"] for row in ledger.all("SELECT judge FROM episode_rows WHERE claim = ?", name)]
        _, result = learner.step([decode(data) for data in claim.episodes])
        learner.progress.version += result.policy_moved
        ledger.apply([lambda: ledger.claims.commit(name, learner.progress.version)])  # noqa: B023
        ledger.apply([lambda: ledger.set_version(learner.progress.version)])
    return taken


def falls(results: Sequence[dict[str, Any]], plan: Plan) -> dict[str, Any]:
    """By seed: the others' late reward in each arm, and how far it has fallen below the quiet one's."""
    seeds = sorted({result["seed"] for result in results})
    late = {(r["arm"], r["seed"]): math.fsum(r["rewards"][plan.late :]) / (plan.rounds - plan.late) for r in results}
    rows = []
    for seed in seeds:
        if all((arm, seed) in late for arm in ARMS):
            quiet, without, capped = (late[arm, seed] for arm in ARMS)
            rows.append({"seed": seed, "quiet": quiet, "uncapped": without, "capped": capped})
    mean = {arm: math.fsum(row[arm] for row in rows) / len(rows) for arm in ARMS} if rows else {}
    fall = {arm: mean["quiet"] - mean[arm] for arm in ("uncapped", "capped")} if rows else {}
    share = fall["capped"] / fall["uncapped"] if rows and fall["uncapped"] > 0 else math.nan
    return {"seeds": rows, "mean": mean, "fall": fall, "share": share}


def draw(results: Sequence[dict[str, Any]], plan: Plan, target: Path) -> None:
    """The others' reward by round, a line an arm: the mean over seeds and their range, over five rounds each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8.0, 4.0), layout="constrained")
    for arm, colour in zip(ARMS, ("#555555", "#c44e52", "#4c72b0"), strict=True):
        lines = [_smoothed(r["rewards"]) for r in results if r["arm"] == arm]
        if not lines:
            continue
        columns = list(zip(*lines, strict=True))
        places = range(1, len(columns) + 1)
        label = {"quiet": "he never comes", "uncapped": "no cap", "capped": "at most 1/8 of a batch"}[arm]
        axis.plot(places, [math.fsum(c) / len(c) for c in columns], color=colour, label=label)
        axis.fill_between(places, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.2)
    axis.axvline(plan.alone, color="black", linewidth=0.8, linestyle=":")
    axis.set(xlabel=f"round of {plan.honest} verdicts of 49 users", ylabel="their mean reward", ylim=(0, 1))
    axis.set_title("One of fifty judges the opposite from the dotted line on", fontsize=10)
    axis.legend(frameon=False, loc="upper left")
    figure.savefig(target, dpi=150)
    plt.close(figure)


def _smoothed(values: Sequence[float], width: int = 5) -> list[float]:
    parts = [values[max(0, i + 1 - width) : i + 1] for i in range(len(values))]
    return [math.fsum(part) / len(part) for part in parts]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 if the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0", help="e.g. 0,1,2 (default: 0)")
    parser.add_argument("--arms", default=",".join(ARMS), help="which to run now (default: all)")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--alone", type=int, default=12, help="rounds before he comes (default: 12)")
    parser.add_argument("--honest", type=int, default=32, help="verdicts of all others in a round (default: 32)")
    parser.add_argument("--poison", type=int, default=160, help="his in a round (default: 160)")
    parser.add_argument("--model", type=Path, default=Path("runs/style_shift_tiny/sft"), help="after `learner.sft`")
    parser.add_argument("--out", type=Path, default=Path("runs/poisoning"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it runs")
    words = parser.parse_args(argv)
    plan = Plan(words.rounds, words.alone, words.honest, words.poison)
    if words.quick:
        plan = Plan(6, 2, 32, 64)
    if not (words.model / "config.json").is_file():
        print(f"no model in {words.model}: make it with `python -m learner.sft {RECIPE}`", file=sys.stderr)
        return 2
    words.out.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in map(int, words.seeds.split(",")):
        for arm in ARMS:
            path = words.out / f"{arm}-{seed}-{plan.rounds}-{plan.alone}-{plan.honest}-{plan.poison}.json"
            if not path.exists() and arm in words.arms.split(","):
                began = time.monotonic()
                with tempfile.TemporaryDirectory() as folder:
                    found = asyncio.run(run_arm(arm, seed, plan, words.model, Path(folder)))
                path.write_text(json.dumps(found | {"seconds": time.monotonic() - began}))
            if path.exists():
                results.append(json.loads(path.read_text()))
    found = falls(results, plan)
    columns = ["seed", *ARMS]
    rows = [[str(row["seed"]), *(f"{row[arm]:.3f}" for arm in ARMS)] for row in found["seeds"]]
    if found["mean"]:
        rows.append(["mean", *(f"{found['mean'][arm]:.3f}" for arm in ARMS)])
        rows.append(["fall", "", *(f"{found['fall'][arm]:+.3f}" for arm in ("uncapped", "capped"))])
    note = f"with the cap the others lose {found['share']:.1%} of what they lose without it; wanted: less than 10 %"
    show("The others' reward over the last rounds", columns, rows, [note])
    draw(results, plan, words.out / "serve_poisoning.png")
    save_json(words.json, found)
    return 0 if not found["seeds"] or found["share"] < 0.1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
