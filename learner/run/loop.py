"""The training loop: claim, step, judge, checkpoint, commit, publish, report; evaluation in between."""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent import episode as records
from agent.episode import Episode
from agent.inspect.annotations import AnnotationWriter
from agent.store.protocol import Claim
from learner.config import Recipe
from learner.data.batch import require_sampling
from learner.faults import LearnerFault
from learner.parallel.ranks import Ranks
from learner.probes.parity_probe import ParityProbe
from learner.run.annotations import step_annotations
from learner.run.display import Display
from learner.run.evaluation.evaluations import Evaluations
from learner.run.evaluation.rounds import copy_snapshot
from learner.run.evaluation.target import Reached, reached
from learner.run.folder import append_metrics
from learner.run.gates import Gates
from learner.run.hub import Hub
from learner.run.learner import Learner
from learner.run.metrics import finite, service_figures, step_figures
from learner.run.plots import read_metrics
from learner.run.profiling import trace_path
from learner.run.publication import Publication
from learner.run.recording import forget_after, record
from learner.run.trackers import start_tracker, step_of
from learner.sao import StepResult
from learner.services.processes import Services

_CLAIM_WAIT_S = 2.0


@dataclass
class Loop:
    """One session of training; `run` returns the episodes of the last evaluation of each set. A step, and what a
    crash then costs:

        claim         the store lends a batch; the next session gets it again
        step, judge   the weights move, in memory only, and a gate may take that back
        checkpoint    a copy of what was learned and the ids of its claims begin their way to the disk, together
        publish       engines get the weights, under a version that no session has used
        report        a line of metrics may be missing
        commit        once the checkpoint is on the disk, beside whatever the loop does then: the store counts the batch
                      as trained; the next session does this from the checkpoint's list

    So an episode is never trained twice and never lost: a claim is committed only after a checkpoint holds what was
    learned from it. With `learner.checkpoint_every` above 1 several steps share one checkpoint; weights are published
    all the same, and a crash goes back to the last checkpoint under a new version. `learner.commit_within` bounds how
    many steps that is.

    Evaluations are begun after a step's publication; see `Evaluations`. `held_out`: the tasks of each set, by name.
    `reached`: the target that ends the run before its last step, once it is met.
    """

    recipe: Recipe
    learner: Learner
    ranks: Ranks
    services: Services
    folder: Path
    display: Display
    stop: asyncio.Event
    held_out: Mapping[str, int]
    reached: Reached | None = None
    discarded_in_row: int = 0
    hub: Hub | None = None
    _committing: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.gates = Gates(self.recipe, self.learner, self.ranks, self.display)
        self.evaluations = Evaluations(
            self.recipe,
            self.services,
            self.folder,
            self.display,
            self.stop,
            tasks=self.held_out,
            export=self._export_evaluated,
        )

    async def run(self) -> dict[str, list[Episode]]:
        """Train until the recipe's last step, until its target is met, or until `stop` is set."""
        recipe, learner, progress = self.recipe, self.learner, self.learner.progress
        start_tracker(recipe, learner.policy.accelerator, self.folder)
        probe = await ParityProbe.build(recipe, self.ranks.policy, model=learner.source)
        publication = Publication(recipe, learner, self.services, self.folder, self.display, probe, self.ranks)
        await self.gates.prepare()
        await publication.begin()
        forget_after(self.folder, progress.step)
        self._look_for_target(read_metrics(self.folder / "metrics.jsonl"))
        async with self.evaluations as evaluations:
            if self.reached is None:
                await evaluations.begin(progress.step, progress.version)
                self._report_points()
            await self._train(publication)
            if not self.stop.is_set():
                await evaluations.finish(progress.step, progress.version)
                self._report_points()
        return evaluations.episodes

    async def _train(self, publication: Publication) -> None:
        recipe, progress = self.recipe, self.learner.progress
        with self._commits_end(), AnnotationWriter(self.folder) as annotations:
            while progress.step < recipe.learner.steps and not self.stop.is_set() and self.reached is None:
                started = time.monotonic()
                await self._wait_for_disk()
                claim = await self._claim()
                if claim is None:
                    break
                waited = time.monotonic() - started
                version = progress.version
                episodes = self.gates.split([records.decode(data) for data in claim.episodes])
                require_sampling(episodes, recipe.runtime.sampling.temperature)
                await asyncio.to_thread(self._record, claim)
                async with self.services.weights_change():
                    await self.gates.before_step()
                    batch, result = await asyncio.to_thread(self.ranks.call, "step", episodes)
                    moved, judged = await self.gates.judge(result.policy_moved)
                    stepped = time.monotonic()
                    progress.claims.append(claim.id)
                    progress.version += moved
                    if self._is_checkpoint_due():
                        await self._checkpoint()
                    saved = time.monotonic()
                    published = await publication.publish() if moved else {}
                figures = step_figures(claim, episodes, batch, result, version)
                figures |= {"policy/version": progress.version} | published | judged | self.learner.speed.figures
                annotations.write(step_annotations(batch, result, version))
                figures |= {"time/waited_s": waited, "time/learner_s": stepped - started - waited}
                figures["time/checkpoint_s"] = saved - stepped
                figures |= service_figures(await self.services.store.status(), await self.services.engine_healths())
                figures["time/step_s"] = time.monotonic() - started
                figures["time/learner_idle"] = waited / figures["time/step_s"]
                if progress.step < recipe.learner.steps or not recipe.evaluation.is_beside:  # else see `finish`
                    due = self.evaluations.due(progress.step)
                    await self.evaluations.start(progress.step, progress.version, due)
                self._report_points(figures)
                self._say_profile()
                await self._offer_to_hub()
                await self._heed_discards(result)
            await self._commit_all()  # one that learns online is mostly stopped while it waits for episodes

    async def _heed_discards(self, result: StepResult) -> None:
        """Say whose updates of this step were discarded; a `LearnerFault` once that was so for too many steps in a row.

        What was learned before is on disk by then, and the batch counts as trained: the same one would not be given
        again for ever.
        """
        found = [name for name in ("critic", "policy") if getattr(result, f"{name}_discarded")]
        self.discarded_in_row = self.discarded_in_row + 1 if found else 0
        if not found:
            return
        limit, step, who = self.recipe.learner.discard_limit, self.learner.progress.step, " and ".join(found)
        self.display.log(
            f"step {step}: discarded an update of {who}, whose gradient or loss was not finite "
            f"({self.discarded_in_row} in a row, the run ends at {limit})"
        )
        if self.discarded_in_row < limit:
            return
        await self._commit_all()
        raise LearnerFault(
            f"the last {limit} steps each had to discard an update of {who}: gradients or losses were not finite. The "
            f"weights are those before them, in {self.folder / 'checkpoints'}. Lower learner.policy.lr or "
            "learner.critic.lr, look at the episodes (python -m agent.inspect), or compute in float32 "
            "(model.compute_dtype); the same command goes on, learner.discard_limit says how many are borne"
        )

    async def _claim(self) -> Claim | None:
        """The next batch; None when asked to stop. A child that has ended, or a silence of both store and runtime,
        is an error that says so."""
        patience, heard, before = self.recipe.learner.rollout_patience_s, time.monotonic(), -1
        if self.recipe.learner.online:  # people may be asleep
            patience = math.inf
        while not self.stop.is_set():
            self.services.check()
            self.evaluations.check()
            self._check_commits()
            claim = await self.services.store.claim(
                self.recipe.learner.batch_size, self.learner.progress.version, wait_s=_CLAIM_WAIT_S
            )
            if claim is not None:
                return claim
            status = await self.services.store.status()
            # An engine that is being started again has its own patience; see `Fleet.check`.
            # And while a checkpoint is being written, all room may be taken by what waits for its commit.
            if status.ready != before or not self.services.engines or self._is_committing:
                heard, before = time.monotonic(), status.ready
            if time.monotonic() - heard > patience:
                raise LearnerFault(
                    f"no episode has finished for {patience:g} s ({status.ready} of {self.recipe.learner.batch_size} "
                    f"ready, {status.leased} under way): is a runtime running? See its log in {self.folder}"
                )
        return None

    def _is_checkpoint_due(self) -> bool:
        config, step = self.recipe.learner, self.learner.progress.step
        return step % config.checkpoint_every == 0 or step == config.steps or self.stop.is_set()

    async def _checkpoint(self) -> None:
        """Begin to write a checkpoint, after the one before; what it has learned from is committed when it is done."""
        await self._committed()
        await asyncio.to_thread(self.ranks.call, "begin_save", self.folder / "checkpoints")
        progress = self.learner.progress
        self._committing = asyncio.create_task(self._commit_when_saved(list(progress.claims), progress.version))

    async def _commit_when_saved(self, claims: list[str], version: int) -> None:
        await asyncio.to_thread(self.learner.finish_save)
        for claim_id in claims:
            await self.services.store.commit(claim_id, version)
            self.learner.progress.claims.remove(claim_id)

    async def _committed(self) -> None:
        """Wait for the checkpoint under way and its commits; raises what went wrong with them."""
        if self._committing is not None:
            await self._committing
            self._committing = None

    async def _commit_all(self) -> None:
        """Whatever was learned is on the disk and committed after this."""
        await self._committed()
        if self.learner.progress.claims:
            await self._checkpoint()
            await self._committed()

    async def _wait_for_disk(self) -> None:
        """Do not run further ahead of what is committed than the recipe allows (each step has one claim)."""
        within = self.recipe.learner.commit_within
        if within is not None and len(self.learner.progress.claims) >= within:
            await self._committed()

    def _check_commits(self) -> None:
        """Raise what has gone wrong with the checkpoint under way, if it has."""
        if self._committing is not None and self._committing.done():
            self._committing.result()

    @property
    def _is_committing(self) -> bool:
        return self._committing is not None and not self._committing.done()

    @contextlib.contextmanager
    def _commits_end(self) -> Iterator[None]:
        """Where the block ends early, the write goes on, and the next session commits what it holds."""
        try:
            yield
        finally:
            if self._committing is not None:
                self._committing.cancel()
                self._committing.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _export_evaluated(self, target: Path, version: int) -> None:
        """The policy as it is, for engines that evaluate it while it is trained on."""
        snapshot = self.folder / "weights" / f"v{version}"
        if snapshot.exists():
            await asyncio.to_thread(copy_snapshot, snapshot, target)
        else:
            await asyncio.to_thread(self.learner.export, target, self.ranks.weights())

    def _report_points(self, figures: dict[str, Any] | None = None) -> None:
        """Report what evaluations have given, each at its step; `figures` are those of the present step, if it is new.

        A point of the present step stands in one line with them.
        """
        step, late = self.learner.progress.step, []
        points = self.evaluations.take()
        for point in points:
            if figures is not None and point.step == step:
                figures |= point.figures
            else:
                late.append(point)
        if figures is not None:
            self._report(step, figures)
            self.display.step(step, self.recipe.learner.steps, figures)
        for point in late:
            self._report(point.step, point.figures)
            self.display.evaluation(point.step, point.figures)
        for point in points:
            self.evaluations.recorded(point)
        self._look_for_target([{"step": point.step, **point.figures} for point in points])

    async def _offer_to_hub(self) -> None:
        """Have the newest weights pushed, where that is due: the snapshot that engines read, else one of its own."""
        step = self.learner.progress.step
        if self.hub is None or not self.hub.is_due(step) or step == self.recipe.learner.steps:
            return
        snapshot = self.folder / "weights" / f"v{self.learner.progress.version}"
        own = None
        if not snapshot.exists() and not self.hub.is_busy:
            own = snapshot = self.folder / "weights" / "hub"
            await asyncio.to_thread(self.learner.export, snapshot, self.ranks.weights())
        await asyncio.to_thread(self.hub.offer, snapshot, step)
        if own is not None:
            await asyncio.to_thread(shutil.rmtree, own, ignore_errors=True)

    def _record(self, claim: Claim) -> None:
        """Keep what the next step is given, where the recipe says so, for `learner.replay`."""
        config, progress = self.recipe.learner, self.learner.progress
        if config.record_batches:
            record(
                self.folder,
                progress.step + 1,
                progress.version,
                claim.episodes,
                keep=config.record_batches,
                checkpoint_every=config.checkpoint_every,
            )

    def _say_profile(self) -> None:
        profile, step = self.recipe.learner.profile, self.learner.progress.step
        if profile is not None and profile.watches(step):
            path = trace_path(self.folder, step, rank=0)
            self.display.log(f"step {step}: profiled, open {path} in https://ui.perfetto.dev")

    def _look_for_target(self, records: list[dict[str, Any]]) -> None:
        """Note whether one of these lines of metrics meets the recipe's target."""
        step = self.learner.progress.step
        if self.reached is None and (found := reached(self.recipe, records, step)):
            self.reached = found
            self.display.log(f"the target is met ({found}): the run ends at step {step}")

    def _report(self, step: int, figures: dict[str, Any]) -> None:
        append_metrics(self.folder, step, figures)
        logged = step_of(self.recipe.learner.tracker, step, self.learner.progress.step)
        more = {"evaluation/step": float(step)} if logged != step else {}
        self.learner.policy.accelerator.log(finite(figures) | more, step=logged)
