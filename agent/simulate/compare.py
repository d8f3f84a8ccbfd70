"""The comparison: search a rate for each method, run every seed of both, report; what is finished is not done again."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from agent.serve.config import ServeRecipe, load_recipe
from agent.serve.doors.own_key import own_key
from agent.simulate.audience import Audience, EnvironmentAudience, StyleAudience
from agent.simulate.clock import PolicyClock, Stalled
from agent.simulate.processes import clear, cold_start, learning_server
from agent.simulate.recovery import Interaction
from agent.simulate.report import draw, table
from agent.simulate.runs import Run, best_rate, read_csv, write_csv
from agent.simulate.users import Users
from envs import make_core
from envs.key_values import override
from envs.style_shift.env import StyleShift

REQUEST_S = 120.0
DEFAULT_STEPS = 60  # as a recipe's learner.steps
_TOLD_EVERY_S = 10.0


@dataclass(frozen=True)
class Settings:
    """What a comparison is: recipe, overrides, methods, seeds, the grid and its seed, and where it is kept.

    `grid` empty: both methods take the recipe's rate.
    """

    recipe: Path
    overrides: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    grid: tuple[float, ...]
    tuning_seed: int
    folder: Path
    concurrency: int = 16
    ahead: int = 1
    patience_s: float = 600.0

    @property
    def runs(self) -> Path:
        """Where the servers work."""
        return self.folder / "runs"


def _read(recipe: Path, overrides: Sequence[str]) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    override(data, overrides)
    return data


def make_env(recipe: Path, overrides: Sequence[str]) -> StyleShift:
    """The environment of `recipe`, whose prompts, schedule and judge the users have; `ValueError` if it is another."""
    data = _read(recipe, overrides).get("env") or {}
    core = make_core(str(data.get("id")), **(data.get("kwargs") or {}))
    if not isinstance(core, StyleShift):
        raise ValueError(
            f"{recipe}: methods are compared on the shifts of sao/StyleShift-v0, and env.id is {data.get('id')!r}; "
            "users of any environment come to a server that runs: python -m agent.simulate URL --recipe ..."
        )
    return core


def audience_of(recipe: Path, overrides: Sequence[str]) -> Audience:
    """The users of `recipe`'s environment; those that are no styles' stay for `learner.steps`.

    Raises `ValueError` without an environment.
    """
    data = _read(recipe, overrides)
    env = data.get("env") or {}
    if not env.get("id"):
        raise ValueError(f"{recipe}: env.id is missing: say which environment's users there are, e.g. env.id=...")
    kwargs = env.get("kwargs") or {}
    core = make_core(str(env["id"]), **kwargs)
    if isinstance(core, StyleShift):
        return StyleAudience(core)
    steps = int((data.get("learner") or {}).get("steps", DEFAULT_STEPS))
    return EnvironmentAudience.of(str(env["id"]), kwargs, steps)


@dataclass
class Teller:
    """Says how far a run is, every ten seconds, and how long the rest will take."""

    name: str
    steps: int
    runs_left: int
    say: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)
    told: float = 0.0
    latest: deque[Interaction] = field(default_factory=lambda: deque(maxlen=128))

    def __call__(self, interaction: Interaction) -> None:
        """One interaction is over."""
        self.latest.append(interaction)
        now, done = time.monotonic(), interaction.step
        if now - self.told < _TOLD_EVERY_S or done < 1:
            return
        self.told = now
        pace = (now - self.began) / done
        reward = math.fsum(i.reward for i in self.latest) / len(self.latest)
        liked = sum(i.style == interaction.target for i in self.latest) / len(self.latest)
        style = f", {interaction.target} {liked:.0%}" if interaction.target else ""
        left, all_left = pace * (self.steps - done), pace * (self.steps * self.runs_left - done)
        self.say(
            f"{self.name}: step {done}/{self.steps}, reward {reward:.2f}{style}, "
            f"{left / 60:.1f} min left; {all_left / 60:.0f} min for all runs"
        )


async def use_server(
    url: str,
    audience: Audience,
    *,
    batch: int,
    seed: int,
    concurrency: int,
    ahead: int,
    patience_s: float,
    pace_s: float = 0.0,
    key: str = "",
    on_interaction: Callable[[Interaction], None] = lambda interaction: None,
) -> list[Interaction]:
    """Let simulated users use the server at `url` until the audience leaves."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        async with session.get(f"{url}/v1/models", headers=headers) as answer:
            answer.raise_for_status()
            model = (await answer.json())["data"][0]["id"]
        async with PolicyClock.watching(session, url, headers) as clock:
            users = Users(
                session,
                url,
                model,
                audience,
                clock,
                batch=batch,
                seed=seed,
                concurrency=concurrency,
                ahead=ahead,
                patience_s=patience_s,
                pace_s=pace_s,
                headers=headers,
                on_interaction=on_interaction,
            )
            try:
                return await users.run()
            finally:
                await audience.aclose()


class Comparison:
    """Carries out `Settings`; `run` returns the table. May be stopped and called again at any time."""

    def __init__(self, settings: Settings, say: Callable[[str], None] = print) -> None:
        self.settings, self._say = settings, say
        self._recipe: ServeRecipe = load_recipe(settings.recipe, list(settings.overrides))
        self._env = make_env(settings.recipe, settings.overrides)
        learner = _read(settings.recipe, settings.overrides).get("learner") or {}
        self._rate = float((learner.get("policy") or {}).get("lr", 1e-3))

    async def run(self) -> str:
        """Do what is not done yet, then report. Raises what a run raises; what is finished stays."""
        settings = self.settings
        settings.folder.mkdir(parents=True, exist_ok=True)
        tuning = [Run(m, settings.tuning_seed, lr) for lr in settings.grid for m in settings.methods]
        left = [run for run in tuning if not run.path(settings.folder).is_file()]
        unknown = sum(not Run(m, s, self.rates().get(m, -1.0)).path(settings.folder).is_file()
                      for m in settings.methods for s in settings.seeds)  # fmt: skip
        if left or unknown:
            await cold_start(settings.recipe, settings.runs, settings.overrides)
        for i, run in enumerate(left):
            await self._one(run, len(left) - i + unknown)
        rates = self.rates()
        runs = [Run(m, seed, rates[m]) for seed in settings.seeds for m in settings.methods]
        missing = [run for run in runs if not run.path(settings.folder).is_file()]
        for i, run in enumerate(missing):
            await self._one(run, len(missing) - i)
            self.report()
        return self.report()

    def rates(self) -> Mapping[str, float]:
        """The rate of each method, as far as the search has found it."""
        settings, rates = self.settings, {}
        for method in settings.methods:
            rate: float | None = self._rate
            if settings.grid:
                steps = self._env.schedule.steps
                rate = best_rate(settings.folder, method, settings.tuning_seed, settings.grid, steps)
            if rate is not None:
                rates[method] = rate
        return rates

    def report(self) -> str:
        """Draw `style_shift.png` and write `style_shift.md` from all finished seeds; the table."""
        settings, rates = self.settings, self.rates()
        results: dict[str, dict[int, list[Interaction]]] = {}
        for method in settings.methods:
            for seed in settings.seeds:
                if method in rates and (path := Run(method, seed, rates[method]).path(settings.folder)).is_file():
                    results.setdefault(method, {})[seed] = read_csv(path)
        if not results:
            return "no run is finished\n"
        text = table(results, self._env.schedule, rates)
        (settings.folder / "style_shift.md").write_text(text, encoding="utf-8")
        draw(results, self._env.schedule, settings.folder / "style_shift.png")
        return text

    async def _one(self, run: Run, runs_left: int) -> None:
        settings, env = self.settings, self._env
        steps = env.schedule.steps
        overrides = [
            *settings.overrides,
            f"seed={run.seed}",
            f"learner.algorithm={run.method}",
            f"learner.policy.lr={run.lr!r}",
            f"learner.steps={steps}",
            "learner.tracker=null",
        ]
        self._say(f"{run.name}: starting a server and its learner")
        model = settings.runs / "start" / "sft"
        async with learning_server(settings.recipe, settings.runs, run.name, model, overrides) as url:
            try:
                interactions = await use_server(
                    url,
                    StyleAudience(env),
                    batch=self._recipe.learner.batch_size,
                    seed=run.seed,
                    concurrency=settings.concurrency,
                    ahead=settings.ahead,
                    patience_s=settings.patience_s,
                    key=own_key(settings.runs / run.name / "serve").key,
                    on_interaction=Teller(run.name, steps, runs_left, self._say),
                )
            except* Stalled as group:
                raise Stalled(f"{group.exceptions[0]}; see the logs in {settings.runs / run.name}") from group
        write_csv(run.path(settings.folder), interactions)
        clear(settings.runs, run.name, settings.folder)
