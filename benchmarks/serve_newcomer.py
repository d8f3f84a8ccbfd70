"""How many verdicts, and minutes, until a newcomer sees that the model has learned?

    python benchmarks/serve_newcomer.py [--recipe recipes/serve_tiny.yaml] [--style cute] [--pace 4] [--minutes 5]

One user who clicks at a person's pace: asks one of the recipe's prompts, reads, says Good to a sound answer in
`--style` and Bad to any other, and asks again `--pace` seconds after the last time. The clock starts at the first
question, the learner being ready. "Seen" is the first verdict at which eight of the last ten answers were in the style;
the model knows four, so two or three of ten are at the start. `--pace 0` clicks as soon as the version that the
verdicts have made is served, for trying recipes out.

`--without-server` leaves server, store and engine out: the recipe's learner takes each batch as soon as it is judged,
in this process. It says how many verdicts are needed however busy the machine is, and no time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml

from agent.chat.renderer import ChatRenderer
from agent.episode import Episode, SamplingParams, Segment, StopReason, Timings
from agent.simulate.processes import cold_start
from benchmarks.report import save_json, show
from benchmarks.serving import ServedRun, get, session
from envs.style_shift.judging.lexical import LexicalJudge
from envs.style_shift.prompts import tasks
from envs.style_shift.schedule import STYLES

WINDOW, ENOUGH = 10, 8
_READY_S = 240.0
_NO_END = 10_000


@dataclass(frozen=True)
class Click:
    """One verdict: seconds after the first question, the answer's style, whether it was liked, its version."""

    at_s: float
    style: str
    liked: bool
    version: int


def seen(clicks: Sequence[Click], style: str) -> int | None:
    """After how many verdicts `ENOUGH` of the last `WINDOW` answers were in `style`; None if that never was so."""
    for end in range(WINDOW, len(clicks) + 1):
        if sum(click.style == style for click in clicks[end - WINDOW : end]) >= ENOUGH:
            return end
    return None


async def use(
    http: aiohttp.ClientSession,
    url: str,
    style: str,
    *,
    pace_s: float,
    limit_s: float,
    most: int,
    batch: int,
    seed: int,
) -> list[Click]:
    """Click until `limit_s` is over or `most` verdicts are given."""
    rng, judge, clicks = random.Random(seed), LexicalJudge(), list[Click]()
    model = (await get(http, url, "/v1/models"))["data"][0]["id"]
    began = time.monotonic()
    while time.monotonic() - began < limit_s and len(clicks) < most:
        asked_at = time.monotonic()
        prompt = rng.choice(tasks("tiny")).prompt
        body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
        async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            reply = await answer.json()
        verdict = await judge.judge(prompt, reply["choices"][0]["message"]["content"] or "", style)
        liked = verdict.reward(style) > 0
        if pace_s:
            await asyncio.sleep(max(0.0, pace_s - (time.monotonic() - asked_at)))
        async with http.post(f"{url}/v1/feedback", json={"response_id": reply["id"], "reward": int(liked)}) as answer:
            answer.raise_for_status()
        clicks.append(Click(time.monotonic() - began, verdict.style, liked, reply["policy_version"]))
        if not pace_s and len(clicks) % batch == 0:
            await _version(http, url, reply["policy_version"] + 1)
    return clicks


async def _version(http: aiohttp.ClientSession, url: str, number: int) -> None:
    """Wait, half a minute at most (a version may be dropped), until `number` is served."""
    for _ in range(300):
        if (await get(http, url, "/v1/versions"))["served"] >= number:
            return
        await asyncio.sleep(0.1)


async def _learner_ready(http: aiohttp.ClientSession, url: str) -> None:
    """Wait until the page would say "0 of 8 verdicts to the next version"."""
    async with asyncio.timeout(_READY_S), http.get(f"{url}/v1/events") as events:
        async for line in events.content:
            if line.startswith(b"data: "):
                progress = json.loads(line[6:]).get("progress") or {}
                if progress.get("waits_for") == "verdicts":
                    return


async def measure(arguments: argparse.Namespace, runs: Path) -> list[dict[str, Any]]:
    """A run for each seed, one after the other."""
    found, batch = [], int(yaml.safe_load(arguments.recipe.read_text())["learner"]["batch_size"])
    for word in arguments.overrides:
        if word.startswith("learner.batch_size="):
            batch = int(word.partition("=")[2])
    for seed in range(arguments.seeds):
        run = ServedRun(arguments.recipe, runs, f"newcomer-{seed}", (f"seed={seed}", *arguments.overrides))
        await run.prepare()
        began = time.monotonic()
        await run.start(learn=True)
        try:
            async with session(timeout_s=_READY_S) as http:
                await _learner_ready(http, run.url)
                ready_s = time.monotonic() - began
                clicks = await use(
                    http,
                    run.url,
                    arguments.style,
                    pace_s=arguments.pace,
                    limit_s=60 * arguments.minutes,
                    most=arguments.most,
                    batch=batch,
                    seed=seed,
                )
        finally:
            await run.stop()
        found.append(_figures(clicks, arguments.style, batch) | {"seed": seed, "ready_s": ready_s})
    return found


def alone(arguments: argparse.Namespace, runs: Path) -> list[dict[str, Any]]:
    """The same clicks on the recipe's learner alone, one run for each seed."""
    # Not at the top: torch, which clicks on a server do without.
    import torch
    from accelerate import Accelerator

    from learner.config import load_recipe
    from learner.run.learner import Learner

    model_folder = asyncio.run(cold_start(arguments.recipe, runs, ()))
    renderer, accelerator, found = ChatRenderer.from_pretrained(model_folder), Accelerator(cpu=True), []
    for seed in range(arguments.seeds):
        torch.manual_seed(seed)
        recipe = load_recipe(arguments.recipe, [f"seed={seed}", f"runs_dir={runs}", *arguments.overrides])
        learner = Learner.build(
            recipe, accelerator, policy_folder=model_folder, critic_folder=runs / "no-pretrained-critic"
        )
        rng, judge, clicks = random.Random(seed), LexicalJudge(), list[Click]()
        while len(clicks) < arguments.most:
            batch = []
            for _ in range(recipe.learner.batch_size):
                prompt = rng.choice(tasks("tiny")).prompt
                episode = _sampled(learner, renderer, prompt, recipe.runtime.max_tokens_per_turn, len(clicks))
                text = episode.segments[1].text
                verdict = asyncio.run(judge.judge(prompt, text, arguments.style))
                liked = verdict.reward(arguments.style) > 0
                clicks.append(Click(math.nan, verdict.style, liked, learner.progress.step))
                batch.append(msgspec.structs.replace(episode, turn_rewards=(float(liked),)))
            learner.step(batch)
        found.append(_figures(clicks, arguments.style, recipe.learner.batch_size) | {"seed": seed})
    return found


def _sampled(learner: Any, renderer: ChatRenderer, prompt: str, most: int, number: int) -> Episode:
    import torch

    opening = renderer.start([{"role": "user", "content": prompt}])
    ids, logprobs, stops = list(opening.token_ids), list[float](), set(renderer.stop_token_ids)
    with torch.no_grad():
        while len(logprobs) < most and (not logprobs or ids[-1] not in stops):
            scores = learner.policy.unwrapped.model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            ids.append(int(torch.multinomial(scores.exp(), 1)))
            logprobs.append(float(scores[ids[-1]]))
    action = tuple(ids[len(opening.token_ids) :])
    said = Segment(
        "action",
        action,
        renderer.decode([token for token in action if token not in stops]),
        logprobs=tuple(logprobs),
        versions=(learner.progress.version,) * len(action),
        finish_reason="stop" if action[-1] in stops else "length",
    )
    return Episode(
        id=f"click-{number}",
        env_id="serve",
        task_id=f"prompt-{number}",
        segments=(Segment("prompt", opening.token_ids, opening.text), said),
        turn_rewards=(0.0,),
        stop_reason=StopReason.TERMINATED,
        sampling=SamplingParams(),
        timings=Timings(issued_at=0.0, finished_at=1.0, generate_s=1.0),
        worker="clicks",
        metrics={},
    )


def _figures(clicks: Sequence[Click], style: str, batch: int) -> dict[str, Any]:
    after = seen(clicks, style)
    rows = [clicks[i : i + batch] for i in range(0, len(clicks) - batch + 1, batch)]
    return {
        "verdicts": len(clicks),
        "seen_after": after,
        "seen_s": None if after is None else clicks[after - 1].at_s,
        "versions": clicks[-1].version,
        "share_by_batch": [sum(c.style == style for c in row) / batch for row in rows],
        "last_share": sum(c.style == style for c in clicks[-20:]) / min(20, len(clicks)),
        "last_liked": sum(c.liked for c in clicks[-20:]) / min(20, len(clicks)),
    }


def report(found: Sequence[dict[str, Any]], style: str) -> None:
    """Print the table."""
    rows = []
    for run in found:
        minutes = "-" if run["seen_s"] is None or math.isnan(run["seen_s"]) else f"{run['seen_s'] / 60:.1f}"
        share = " ".join(f"{math.floor(100 * part)}" for part in run["share_by_batch"])
        rows.append(
            [
                *(str(run["seed"]), str(run["seen_after"] or "never"), minutes, str(run["verdicts"])),
                *(str(run["versions"]), f"{run['last_share']:.0%}", f"{run['last_liked']:.0%}", share),
            ]
        )
    columns = ["seed", "seen after", "minutes", "verdicts", "versions", f"last 20 {style}", "liked", "% by batch"]
    show("A newcomer's clicks", columns, rows, ["seen: eight of the last ten answers in the style"])


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--recipe", type=Path, default=Path("recipes/serve_tiny.yaml"))
    parser.add_argument("--style", choices=STYLES, default="cute")
    parser.add_argument("--pace", type=float, default=4.0, help="seconds between two verdicts (default: 4)")
    parser.add_argument("--minutes", type=float, default=5.0, help="for a run (default: 5)")
    parser.add_argument("--most", type=int, default=_NO_END, help="verdicts of a run")
    parser.add_argument("--seeds", type=int, default=1, help="how many runs (default: 1)")
    parser.add_argument("--runs", type=Path, help="a folder to keep; the cold start is made once in it")
    parser.add_argument("--without-server", action="store_true", help="the recipe's learner alone; needs --most")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_intermixed_args(argv)
    if arguments.without_server and arguments.most == _NO_END:
        parser.error("--without-server has no clock: say --most")
    with tempfile.TemporaryDirectory() as scratch:
        runs = arguments.runs or Path(scratch)
        found = alone(arguments, runs) if arguments.without_server else asyncio.run(measure(arguments, runs))
    report(found, arguments.style)
    save_json(arguments.json, {"newcomer": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
