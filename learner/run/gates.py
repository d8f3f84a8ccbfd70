"""What stands between a step and its publication: held-out answers, and held-out verdicts. Each may drop the step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from agent.episode import Episode
from learner.config import Recipe
from learner.parallel.ranks import Ranks
from learner.probes.held_out import HeldOutProbe, decide
from learner.probes.judged import JudgedGate, Value, compare
from learner.run.display import Display
from learner.run.learner import Learner


@dataclass
class Gates:
    """The gates of a recipe, which may have none.

        await gates.prepare()                              # once a session
        episodes = gates.split(episodes)                   # of each batch
        await gates.before_step()
        ...                                                # the step
        moved, figures = await gates.judge(moved)

    Dropped means that policy, critic and moments are again as before the step, so a checkpoint never holds weights that
    may not be served. The batch counts as trained: it would spoil them again.
    """

    recipe: Recipe
    learner: Learner
    ranks: Ranks
    display: Display
    _probe: HeldOutProbe | None = None
    _verdicts: JudgedGate | None = None
    _before: Value | None = None

    async def prepare(self) -> None:
        """Read the held-out texts; weights that are served already say how good is good enough."""
        config = self.recipe.learner
        if config.judged_gate is not None:
            self._verdicts = JudgedGate(config.judged_gate.share, config.judged_gate.keep)
        if config.held_out_probe is None:
            return
        renderer = await asyncio.to_thread(self.recipe.runtime.chat.load, self.learner.source)
        self._probe = await asyncio.to_thread(HeldOutProbe.build, self.recipe, renderer)
        progress = self.learner.progress
        if self._probe is not None and progress.best_score is None:
            progress.best_score = await asyncio.to_thread(self._probe.score, self.ranks.policy)

    def split(self, episodes: list[Episode]) -> Sequence[Episode]:
        """What of a batch is trained on."""
        return episodes if self._verdicts is None else self._verdicts.split(episodes)

    async def before_step(self) -> None:
        """Keep what a gate may go back to."""
        if self._probe is None and self._verdicts is None:
            return
        await asyncio.to_thread(self.ranks.call, "remember")
        if self._verdicts is not None:
            self._before = await self._value(self._verdicts)

    async def judge(self, moved: bool) -> tuple[bool, dict[str, float]]:
        """Drop what the step made of the weights if a gate says so; whether the policy has moved after all, and the
        gates' figures."""
        if not moved or (self._probe is None and self._verdicts is None):
            return moved, {}
        started, progress = time.monotonic(), self.learner.progress
        figures: dict[str, float] = {}
        reasons, best = [], progress.best_score
        if self._probe is not None:
            assert self.recipe.learner.held_out_probe is not None
            score = await asyncio.to_thread(self._probe.score, self.ranks.policy)
            decision = decide(score, progress.best_score, self.recipe.learner.held_out_probe.margin)
            best, reasons = decision.best, [decision.reason] if not decision.publish else []
            figures["publication/held_out_score"] = score
        if self._verdicts is not None and self._before is not None:
            config = self.recipe.learner.judged_gate
            assert config is not None
            after = await self._value(self._verdicts)
            change = compare(self._before, after, tolerance=config.tolerance, least=config.least)
            reasons += [] if change.publish else [change.reason]
            figures |= {"publication/judged_reward": after.reward, "publication/judged_effective": after.effective}
        if reasons:
            await asyncio.to_thread(self.ranks.call, "roll_back")
            progress.dropped += 1
            self.display.log(
                f"step {progress.step}: the candidate is dropped, version {progress.version} stays: "
                f"{'; '.join(reasons)}"
            )
        else:
            progress.best_score = best
        return not reasons, figures | {
            "publication/dropped": float(progress.dropped),
            "time/held_out_probe_s": time.monotonic() - started,
        }

    async def _value(self, verdicts: JudgedGate) -> Value:
        temperature = self.recipe.runtime.sampling.temperature
        return await asyncio.to_thread(verdicts.value, self.ranks.policy, temperature)
