"""The training loop: claim, step, checkpoint, commit, publish, report; evaluation in between.

The order is what makes a crash harmless: a claim is committed only after a checkpoint holds what was learned from
it, and a version is published only after that.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from agent import episode as records
from agent.annotations import AnnotationWriter, TokenAnnotations
from agent.chat import ChatRenderer
from agent.episode import Episode
from agent.store.protocol import Claim
from learner.batch import Batch
from learner.cli import LearnerFault
from learner.config import Recipe
from learner.display import Display
from learner.engines import Weights
from learner.evaluate import run_evaluation
from learner.learner import Learner
from learner.losses import log_bounds
from learner.metrics import episode_metrics, finite, lag_metrics, quantiles
from learner.probe import Probe
from learner.publication import HeldOutProbe, decide
from learner.ranks import Ranks
from learner.run_dir import append_metrics
from learner.sao import StepResult
from learner.services import Services

_CLAIM_WAIT_S = 2.0
_NEXT_VERSION = re.compile(r"next_version=(\d+)")  # docs/serve.md: how a server refuses a number that is taken
# The store leaves out counters that never counted; a fault count of 0 is a figure too.
_NO_FAULTS = dict.fromkeys(("retried", "given_up", "dropped", "stale", "aborted"), 0)


@dataclass
class Loop:
    """One session of training; `run` returns the episodes of the last evaluation."""

    recipe: Recipe
    learner: Learner
    ranks: Ranks
    services: Services
    folder: Path
    display: Display
    stop: asyncio.Event
    held_out: int
    last_evaluation: list[Episode] = field(default_factory=list)
    evaluated_at: int = -1
    probe: Probe | None = None
    held_out_probe: HeldOutProbe | None = None
    # An evaluation that Ctrl-C gave up must not be found again by the next session under the same name.
    session: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    async def run(self) -> list[Episode]:
        """Train until the recipe's last step or until `stop` is set."""
        recipe, progress = self.recipe, self.learner.progress
        accelerator = self.learner.policy.accelerator
        accelerator.init_trackers("sao", config={"recipe": recipe.name, "seed": recipe.seed})
        self.probe = await Probe.build(recipe, self.learner)
        await self._prepare_held_out_probe()
        await self._align()
        for report in await self.probe.gate(self.services.engines):
            self.display.log(str(report))
        if progress.step == 0:
            await self._evaluate()
        with AnnotationWriter(self.folder) as annotations:
            while progress.step < recipe.learner.steps and not self.stop.is_set():
                started = time.monotonic()
                claim = await self._claim()
                if claim is None:
                    break
                waited = time.monotonic() - started
                version = progress.version
                episodes = [records.decode(data) for data in claim.episodes]
                async with self.services.weights_change():
                    if self.held_out_probe is not None:
                        await asyncio.to_thread(self.ranks.call, "remember")
                    batch, result = await asyncio.to_thread(self.ranks.call, "step", episodes)
                    judged = await self._judge(result)
                    stepped = time.monotonic()
                    published = await self._keep(claim, result) | judged
                figures = self._figures(claim, episodes, batch, result, version) | published
                annotations.write(_annotations(batch, result, version, self.learner))
                figures |= {"time/waited_s": waited, "time/learner_s": stepped - started - waited}
                figures |= await self._service_figures()
                figures["time/step_s"] = time.monotonic() - started
                figures["time/learner_idle"] = waited / figures["time/step_s"]
                if progress.step % recipe.learner.evaluate_every == 0 or progress.step == recipe.learner.steps:
                    figures |= await self._evaluate(record=False)
                self._report(figures)
        if progress.claims:  # stopped while it waited for episodes, as one that learns online mostly does
            await self._checkpoint()
        if self.evaluated_at != progress.step and not self.stop.is_set():
            await self._evaluate()
        return self.last_evaluation

    async def _align(self) -> None:
        """At the start: settle what an earlier session left open, and serve this learner's weights.

        The version only grows, over restarts too, so that it never names two sets of weights: what a session before
        has published and then lost, because it died before its first checkpoint, is not ours.
        """
        progress = self.learner.progress
        await self.services.store.recover(progress.claims)
        progress.claims.clear()
        status = await self.services.store.status()
        served = max([status.version, *(health.version for health in await self.services.engine_healths())])
        if progress.step > 0 or served > 0:
            progress.version = max(progress.version, served) + 1
            await self._publish()

    async def _prepare_held_out_probe(self) -> None:
        """Read the held-out texts; weights that are served already say how good is good enough."""
        if self.recipe.learner.held_out_probe is None:
            return
        renderer = await asyncio.to_thread(ChatRenderer.from_pretrained, self.learner.source)
        self.held_out_probe = await asyncio.to_thread(HeldOutProbe.build, self.recipe, renderer)
        progress = self.learner.progress
        if self.held_out_probe is not None and progress.best_score is None:
            progress.best_score = await asyncio.to_thread(self.held_out_probe.score, self.learner.policy.unwrapped)

    async def _judge(self, result: StepResult) -> dict[str, float]:
        """Drop what the step made of the weights if the held-out probe says so; the probe's figures.

        Dropped means that policy, critic and moments are again as before the step, so a checkpoint never holds
        weights that may not be served. The batch counts as trained: it would spoil them again.
        """
        probe, config, progress = self.held_out_probe, self.recipe.learner.held_out_probe, self.learner.progress
        if probe is None or config is None or not result.policy_moved:
            return {}
        started = time.monotonic()
        score = await asyncio.to_thread(probe.score, self.learner.policy.unwrapped)
        decision = decide(score, progress.best_score, config.margin)
        if decision.publish:
            progress.best_score = decision.best
        else:
            await asyncio.to_thread(self.ranks.call, "roll_back")
            result.policy_moved, progress.dropped = False, progress.dropped + 1
            self.display.log(
                f"step {progress.step}: the candidate is dropped, version {progress.version} stays: {decision.reason}"
            )
        return {
            "publication/held_out_score": score,
            "publication/dropped": float(progress.dropped),
            "time/held_out_probe_s": time.monotonic() - started,
        }

    async def _claim(self) -> Claim | None:
        """The next batch; None when asked to stop. A child that has ended, or a silence of both store and runtime,
        is an error that says so."""
        patience, heard, before = self.recipe.learner.rollout_patience_s, time.monotonic(), -1
        if self.recipe.learner.online:  # people may be asleep
            patience = math.inf
        while not self.stop.is_set():
            self.services.check()
            claim = await self.services.store.claim(
                self.recipe.learner.batch_size, self.learner.progress.version, wait_s=_CLAIM_WAIT_S
            )
            if claim is not None:
                return claim
            await asyncio.to_thread(self.ranks.heartbeat)
            status = await self.services.store.status()
            # An engine that is being started again has its own patience; see `Fleet.check`.
            if status.ready != before or not self.services.engines:
                heard, before = time.monotonic(), status.ready
            if time.monotonic() - heard > patience:
                raise LearnerFault(
                    f"no episode has finished for {patience:g} s ({status.ready} of {self.recipe.learner.batch_size} "
                    f"ready, {status.leased} under way): is a runtime running? See its log in {self.folder}"
                )
        return None

    async def _keep(self, claim: Claim, result: StepResult) -> dict[str, float]:
        """Checkpoint, commit, publish; the publication's figures."""
        config, progress = self.recipe.learner, self.learner.progress
        progress.claims.append(claim.id)
        if result.policy_moved:
            progress.version += 1
        if progress.step % config.checkpoint_every == 0 or progress.step == config.steps or self.stop.is_set():
            await self._checkpoint()
        return await self._publish() if result.policy_moved else {}

    async def _checkpoint(self) -> None:
        """Write a checkpoint; what it has learned from is trained for good."""
        progress = self.learner.progress
        await asyncio.to_thread(self.learner.save, self.folder / "checkpoints")
        for claim_id in progress.claims:
            await self.services.store.commit(claim_id, progress.version)
        progress.claims.clear()

    async def _publish(self) -> dict[str, float]:
        """Serve the learner's weights as the present version, and have every engine show that it does.

        Where one samples from something else, the publication is made once more; then it is a `LearnerFault`.
        """
        config, version, started = self.recipe.learner, self.learner.progress.version, time.monotonic()
        weights = await self._weights(version)
        figures: dict[str, float] = {"parity/published_again": 0.0}
        while True:
            try:
                await self.services.publish(version, weights, timeout_s=config.publication_timeout_s)
            except LearnerFault as refusal:
                free = _NEXT_VERSION.search(str(refusal))
                if free is None or int(free.group(1)) <= version:
                    raise
                # The server has gone back to older weights meanwhile, and named them with this number.
                version = self.learner.progress.version = int(free.group(1))
                weights = await self._weights(version)
                continue
            served = time.monotonic()
            figures["time/publish_s"] = served - started
            if self.probe is None or config.probe_every == 0 or version % config.probe_every:
                return figures
            found, fault = await self.probe.check(self.services.engines, version)
            figures |= found | {"time/probe_s": time.monotonic() - served}
            if not fault:
                return figures
            if figures["parity/published_again"]:
                raise LearnerFault(
                    f"{fault}. It was published twice: the engine does not take these weights as they are. Mend the "
                    "cause, or raise learner.parity_threshold if you know why"
                )
            self.display.log(f"{fault}. Publishing once more")
            figures["parity/published_again"] = 1.0

    async def _weights(self, version: int) -> Weights:
        """A snapshot in the run's folder, or what gives the policy's weights as they are."""
        if self.recipe.engine.transfer == "snapshot":
            return await asyncio.to_thread(self.learner.export, self.folder / "weights" / f"v{version}")
        return self.learner.weights

    async def _evaluate(self, *, record: bool = True) -> dict[str, float]:
        """Evaluate the served version; nothing is published meanwhile. Without held-out tasks: nothing."""
        progress = self.learner.progress
        if self.held_out == 0:
            return {}
        started = time.monotonic()
        episodes = await run_evaluation(
            self.services.store,
            self.services.check,
            version=progress.version,
            tasks=self.held_out,
            samples=self.recipe.evaluation.samples,
            timeout_s=self.recipe.evaluation.timeout_s,
            name=f"step {progress.step}, session {self.session}",
            stop=self.stop,
        )
        if not episodes:
            return {}
        self.last_evaluation, self.evaluated_at = episodes, progress.step
        count = len(episodes)
        figures = {
            "evaluation/success": sum(e.reward > 0 for e in episodes) / count,
            "evaluation/reused_output": sum(bool(e.metrics.get("reused_output")) for e in episodes) / count,
            "evaluation/action_tokens": sum(e.action_tokens for e in episodes) / count,
            "time/evaluation_s": time.monotonic() - started,
        }
        if record:
            self._report(figures)
        return figures

    def _figures(
        self, claim: Claim, episodes: list[Episode], batch: Batch, result: StepResult, version: int
    ) -> dict[str, float]:
        figures = dict(result.figures) | episode_metrics(episodes)
        figures |= lag_metrics(batch.versions, batch.action_mask, batch.turn_ids, version)
        figures |= quantiles([f["claimed_at"] - f["finished_at"] for f in claim.facts], "queue/wait_s")
        figures["policy/version"] = self.learner.progress.version
        return figures

    async def _service_figures(self) -> dict[str, float]:
        """Queue length, counters, issued against consumed; tokens/s and idle share of the engines."""
        status = await self.services.store.status()
        healths = await self.services.engine_healths()
        uptime = sum(h.uptime_s for h in healths) or math.nan
        figures: dict[str, float] = {
            "queue/ready": status.ready,
            "queue/leased": status.leased,
            "engine/tokens_per_s": sum(h.tokens_generated for h in healths) / (uptime / max(len(healths), 1)),
            "engine/idle": 1.0 - sum(h.busy_s for h in healths) / uptime,
        }
        figures |= {f"count/{name}": float(n) for name, n in (_NO_FAULTS | status.counters).items()}
        figures |= {f"queue/{name}": float(v) for name, v in _flat(status.metrics).items()}
        return figures

    def _report(self, figures: dict[str, Any]) -> None:
        step = self.learner.progress.step
        append_metrics(self.folder, step, figures)
        self.learner.policy.accelerator.log(finite(figures), step=step)
        self.display.step(step, self.recipe.learner.steps, figures)


def _flat(metrics: dict[str, Any], prefix: str = "") -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}_")
        elif isinstance(value, int | float):
            found[prefix + name] = float(value)
    return found


def _annotations(batch: Batch, result: StepResult, version: int, learner: Learner) -> list[TokenAnnotations]:
    """What the step thought of every action token, for `agent.inspect`."""
    if result.logprobs is None or result.advantages is None:
        return []
    low, high = log_bounds(learner.algorithm.eps_low, learner.algorithm.eps_high)
    values = result.values if result.values is not None else torch.zeros_like(result.advantages)
    log_ratio = result.logprobs - batch.rollout_logprobs
    gated = (log_ratio >= high).int() - (log_ratio <= low).int()
    gated = torch.where(log_ratio.isfinite(), gated, 2)
    return [
        TokenAnnotations(
            episode_id=episode_id,
            trained_version=version,
            logprobs=result.logprobs[row][mask].tolist(),
            values=values[row][mask].tolist(),
            advantages=result.advantages[row][mask].tolist(),
            gated=gated[row][mask].tolist(),
        )
        for row, (episode_id, mask) in enumerate(zip(batch.episode_ids, batch.action_mask, strict=True))
    ]
