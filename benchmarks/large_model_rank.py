"""What one rank of `benchmarks/large_model.py` does in its first run, and in its second.

FOLDER holds `recipe.yaml` and the model. The first run makes a step, begins a checkpoint and publishes beside it; the
second goes on from that checkpoint in new processes, and makes a step beside the next.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import hashlib
import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import DTensor

import learner.sao
from agent.engines.client import HttpEngine
from agent.engines.local.launch import local_engine
from agent.episode import Episode, SamplingParams
from benchmarks import layouts
from benchmarks.memory_watch import first_to_go
from learner.config import load_recipe
from learner.parallel.ranks import Ranks, make_accelerator, world_size
from learner.plan.start import check_start
from learner.probes.parity_report import compare, sample
from learner.run.checkpoint import Checkpoints, checkpoints
from learner.run.learner import Learner
from learner.run.state import state_of

EPISODES = 4
VOCABULARY = 8192
_WAIT_S = 1200.0


def episodes(seed: int) -> list[Episode]:
    """Few and short ones, with the log-probs of an even distribution, so that nothing of them is gated."""
    even = -math.log(VOCABULARY)
    return [
        msgspec.structs.replace(
            episode,
            segments=tuple(
                msgspec.structs.replace(s, logprobs=(even,) * len(s.token_ids)) if s.kind == "action" else s
                for s in episode.segments
            ),
        )
        for episode in layouts.episodes(seed, EPISODES)
    ]


def mark(folder: Path, rank: int, phase: str) -> None:
    """Say what `rank` does from here on. What was freed goes back first, so that a phase's peak is its own."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    place = folder / f"phase_{rank}"
    place.with_suffix(".new").write_text(phase)
    place.with_suffix(".new").rename(place)


class SlowDisk(Checkpoints):
    """A checkpoint that is still being written when the next step is over, as on a slow disk."""

    held = threading.Event()

    def _write(self, *arguments: Any) -> None:
        self.held.wait(_WAIT_S)
        super()._write(*arguments)


class Watched(Learner):
    """A learner whose ranks say what they do."""

    folder: Path
    report: dict[str, Any]
    copied = False

    def mark(self, phase: str) -> None:
        """What is measured from here on."""
        mark(self.folder, self.policy.accelerator.process_index, phase)

    def copy(self, folder: Path) -> None:
        """Begin a checkpoint, whose copy stays until `let_write`."""
        self.copied = True
        self.begin_save(folder)

    def digest(self) -> None:
        """A number of this rank's weights and moments, to the last bit."""
        found = hashlib.sha256()
        for key, tensor in sorted(state_of(dict(self._trainees())).items()):
            part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found.update(key.encode())
            found.update(part.detach().contiguous().flatten().view(torch.uint8).numpy().data if part.numel() else b"")
        self.report["digest"] = found.hexdigest()

    def let_write(self) -> None:
        """The disk is free."""
        SlowDisk.held.set()

    def write_report(self, name: str) -> None:
        """Leave what was found where the command reads it."""
        rank = self.policy.accelerator.process_index
        (self.folder / f"{name}_{rank}.json").write_text(json.dumps(self.report))


def watch_updates(own: Watched) -> None:
    """Have both updates say when they begin, and whether a checkpoint's copy stands beside them."""
    for name in ("update_critic", "update_policy"):
        setattr(learner.sao, name, _marked(getattr(learner.sao, name), own, name.removeprefix("update_") + " update"))


def _marked(update: Any, own: Watched, phase: str) -> Any:
    def run(*arguments: Any, **named: Any) -> Any:
        own.mark(phase if own.copied else f"first {phase}")
        return update(*arguments, **named)

    return run


def first(ranks: Ranks, own: Watched, folder: Path) -> None:
    """A step, a checkpoint in the background, and meanwhile a publication; then an engine is asked."""
    _, result = timed(own, "step", ranks.call, "step", episodes(0))
    own.report["figures"] = result.figures
    ranks.call("mark", "rest")
    ranks.call("digest")
    save(ranks, own, folder, lambda: own.export(folder / "weights" / "v1", ranks.weights()), "publication")
    own.report["parity"] = timed(own, "engine", asyncio.run, ask_engine(ranks, own, folder))


def second(ranks: Ranks, own: Watched, folder: Path) -> None:
    """The state of the checkpoint, and a step while it is written again."""
    ranks.call("digest")
    save(ranks, own, folder, lambda: ranks.call("step", episodes(1)), "step")


def save(ranks: Ranks, own: Watched, folder: Path, meanwhile: Callable[[], object], name: str) -> None:
    """A checkpoint whose copy stands beside what is done `meanwhile`."""
    ranks.call("mark", "checkpoint")
    timed(own, "copy", ranks.call, "copy", folder / "checkpoints")
    ranks.call("mark", name)
    timed(own, f"{name} beside a checkpoint", meanwhile)
    ranks.call("mark", "rest")
    ranks.call("let_write")
    timed(own, "write", own.finish_save)
    ranks.call("mark", "rest")


def timed(own: Watched, name: str, work: Any, *arguments: Any) -> Any:
    """What `work` gives; its seconds go to the report."""
    started = time.monotonic()
    found = work(*arguments)
    own.report["seconds"][name] = round(time.monotonic() - started, 1)
    return found


async def ask_engine(ranks: Ranks, own: Watched, folder: Path) -> dict[str, Any]:
    """How a local engine, started with the untrained weights and then published to, agrees with the trainer."""
    prompts = [list(range(start, start + 12)) for start in (5, 40, 90, 150)]
    async with local_engine(own.source, log=folder / "engine.log", max_context=128, max_sequences=4) as url:
        engine = HttpEngine(url)
        try:
            before = await sample(engine, prompts, SamplingParams(max_tokens=12), timeout_s=_WAIT_S)
            await engine.publish(1, folder / "weights" / "v1")
            after = await sample(engine, prompts, SamplingParams(max_tokens=12), timeout_s=_WAIT_S)
        finally:
            await engine.close()
    found = []
    for answers in (before, after):  # the first are of other weights, so that agreement means something
        bounds = own.algorithm.trusted_log_ratios
        report = await asyncio.to_thread(compare, ranks.policy, prompts, answers, bounds=bounds, threshold=1e9)
        found.append({"version": report.version, "tokens": report.tokens, "mean": report.mean_difference})
    return {"before": found[0], "after": found[1]}


def main(folder: Path, run: str) -> None:
    """One rank's life, in the "first" run or the "second"."""
    first_to_go()
    recipe = load_recipe(folder / "recipe.yaml")
    check_start(recipe, world_size())
    accelerator = make_accelerator(recipe)
    mark(folder, accelerator.process_index, "process")
    time.sleep(2.0)  # a moment to be measured in
    mark(folder, accelerator.process_index, "loading")
    torch.manual_seed(0)
    started = time.monotonic()
    own = Watched.build(recipe, accelerator, policy_folder=folder / "model", critic_folder=folder / "none")
    assert isinstance(own, Watched)
    assert own.critic is not None
    torch.nn.init.constant_(own.critic.unwrapped.head.weight, 0.01)
    own.folder, own.report = folder, {"seconds": {"loading": round(time.monotonic() - started, 1)}}
    own.checkpoints = SlowDisk(accelerator, keep=2)
    if run == "second":
        own.mark("resuming")
        timed(own, "resuming", own.resume, checkpoints(folder / "checkpoints")[-1])
        own.mark("rest")
    watch_updates(own)
    ranks = Ranks(own)
    if not accelerator.is_main_process:
        ranks.follow()
    else:
        with ranks.led():
            {"first": first, "second": second}[run](ranks, own, folder)
    own.write_report(run)
    if not accelerator.is_main_process:
        ranks.leave()
