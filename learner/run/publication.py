"""Publication: how the learner's weights become what the engines serve."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from pathlib import Path

from learner.config import Recipe
from learner.faults import LearnerFault
from learner.parallel.ranks import Ranks
from learner.probes.parity_probe import ParityProbe
from learner.run.display import Display
from learner.run.learner import Learner
from learner.services.processes import Services
from learner.services.weight_transfer import Weights

_NEXT_VERSION = re.compile(r"next_version=(\d+)")  # docs/serve.md: how a server refuses a number that is taken


@dataclass
class Publication:
    """Serves the learner's weights as version `learner.progress.version`, and has every engine show that it does.

        publication = Publication(recipe, learner, services, folder, display, probe, ranks)
        await publication.begin()              # once a session
        figures = await publication.publish()  # after each update that moved the policy and raised the version

    The version only grows, over restarts too, so that it never names two sets of weights.
    """

    recipe: Recipe
    learner: Learner
    services: Services
    folder: Path
    display: Display
    probe: ParityProbe
    ranks: Ranks | None = None  # None: this process is all there is

    async def begin(self) -> None:
        """Settle what an earlier session left open, serve this learner's weights, and hold the engines against them.

        What a session before has published and then lost, because it died before its first checkpoint, is not ours.
        Raises `LearnerFault` where an engine and the trainer disagree.
        """
        progress = self.learner.progress
        await self.services.store.recover(progress.claims)
        progress.claims.clear()
        status = await self.services.store.status()
        served = max([status.version, *(health.version for health in await self.services.engine_healths())])
        if progress.step > 0 or served > 0:
            progress.version = max(progress.version, served) + 1
            await self.publish()
        for report in await self.probe.gate(self.services.engines, self.learner.progress.version):
            self.display.log(str(report))

    async def publish(self) -> dict[str, float]:
        """Publish the weights as they are; the figures of it.

        Where an engine samples from something else, the publication is made once more; then it is a `LearnerFault`.
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
            if config.probe_every == 0 or version % config.probe_every:
                return figures
            parity, fault = await self.probe.check(self.services.engines, version)
            figures |= parity | {"time/probe_s": time.monotonic() - served}
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
        source = self.learner if self.ranks is None else self.ranks
        if self.recipe.engine.transfer == "snapshot":
            folder = self.folder / "weights" / f"v{version}"
            return await asyncio.to_thread(self.learner.export_for_engines, folder, source.weights())
        return source.weights
