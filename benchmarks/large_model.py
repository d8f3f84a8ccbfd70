"""A model that two whole copies of do not fit into this machine and two halves do: a step, a checkpoint, a publication.

    python -m benchmarks.large_model                          # 263 million parameters, for 24 GiB; about 10 minutes
    python -m benchmarks.large_model --layers 2 --memory-gib 4  # in small
    python -m benchmarks.large_model --kind dense --json large.json

Random weights are written a tensor at a time. `learner.train` is started with whole copies on two ranks, which its plan
refuses; then with `hardware.fsdp=2` two ranks make a real step (two critic updates, a policy update), begin a
checkpoint, publish and make another step beside it. Two new ones go on from the checkpoint and make the same step
again. Every phase's peak on each rank is held against what `learner.plan` says. Ranks are ended when the machine has
less than 1.5 GiB left.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

import learner.train
from benchmarks import large_model_rank
from benchmarks.large_model_rank import EPISODES, VOCABULARY
from benchmarks.memory_watch import Watch
from benchmarks.report import save_json, show
from learner.config import Recipe, TinyModelConfig, parse_recipe
from learner.model.layers import untied, write_snapshot
from learner.model.tiny import build_config, train_tokenizer
from learner.plan.phases import Plan, make_plan

GIB = 2**30
RANKS = 2
LEAST_BYTES = int(1.5 * GIB)


def sizes(kind: str, layers: int, hidden: int) -> TinyModelConfig:
    """Heads of 128, experts as wide as the model, two of eight a token; dense: an MLP of the same weights."""
    return TinyModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        layers=layers,
        heads=max(hidden // 128, 2),
        kv_heads=max(hidden // 256, 2),
        head_dim=128,
        experts=8 if kind == "moe" else 0,
        expert_width=hidden if kind == "moe" else 4 * hidden,
        init_std=0.02,
    )


def write_model(folder: Path, config: TinyModelConfig) -> None:
    """Random weights, made and written one after another: nothing is ever whole in memory."""
    tokenizer = train_tokenizer(["What is 1 + 1?"] * 4, 320)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(build_config(config, config.vocab_size, tokenizer.eos_token_id))
    generator = torch.Generator().manual_seed(0)

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, shape in untied(model).items():
            made = torch.empty(shape.shape)
            made = made.fill_(1.0) if made.dim() == 1 else made.normal_(std=config.init_std, generator=generator)
            yield from revert_weight_conversion(model, {name: made}).items()

    write_snapshot(model, weights(), folder, dtype=torch.float32)
    tokenizer.save_pretrained(folder)


def make_recipe(folder: Path, memory_gib: float | None, **hardware: int) -> Recipe:
    """The run's recipe: few tokens, so that a step takes about a minute."""
    optimizer = {"lr": 1e-3, "warmup_steps": 0}
    return parse_recipe(
        {
            "name": "large",
            "runs_dir": str(folder),
            "model": {"path": str(folder / "model")},
            "learner": {
                "batch_size": EPISODES,
                "micro_batch_tokens": 512,
                "policy": optimizer,
                "critic": optimizer,
                "tracker": None,
            },
            "engine": {"max_context": 128, "max_sequences": 4, "dtype": "bfloat16"},
            "runtime": {"concurrency": 4, "max_tokens_per_turn": 64, "max_context_tokens": 128},
            "hardware": {"memory_gib": memory_gib, **hardware},
        }
    )


def as_rank(rank: int, port: int, log: Path, work: Callable[..., Any], *arguments: Any) -> None:
    """Do `work` as one of the ranks, in a process of its own; what it says goes to `log`."""
    group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in group.items()})
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(work(*arguments))


def run_ranks(folder: Path, name: str, work: Callable[..., Any], *arguments: Any) -> tuple[list[int | None], Watch]:
    """Two ranks, forked from this process so that libraries are imported once, until they end: their exit codes, and
    their memory by phase."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for old in folder.glob("phase_*"):
        old.unlink()
    context = multiprocessing.get_context("fork")
    logs = [folder / f"{name}_{rank}.log" for rank in range(RANKS)]
    processes = [
        context.Process(target=as_rank, args=(rank, port, logs[rank], work, *arguments)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    try:
        with Watch([process.pid or 0 for process in processes], folder, LEAST_BYTES) as watch:
            for process in processes:
                process.join()
    finally:
        for process in processes:
            process.kill()
    if watch.ended:
        raise SystemExit(watch.ended)
    return [process.exitcode for process in processes], watch


def measured(folder: Path, run: str) -> tuple[list[dict[str, Any]], Watch]:
    """What the ranks of a run report, and their memory."""
    codes, watch = run_ranks(folder, run, large_model_rank.main, folder, run)
    if any(codes):
        logs = "\n".join((folder / f"{run}_{rank}.log").read_text()[-3000:] for rank in range(RANKS))
        raise SystemExit(f"the {run} run ended with {codes}:\n{logs}")
    return [json.loads((folder / f"{run}_{rank}.json").read_text()) for rank in range(RANKS)], watch


def refused(folder: Path, recipe: Recipe) -> str:
    """How `learner.train` answers two ranks with whole copies; ends the command where it does not refuse."""
    path = folder / "whole.yaml"
    path.write_text(as_yaml(recipe))
    codes, _ = run_ranks(folder, "whole", learner.train.main, [str(path)])
    said = " ".join((folder / "whole_0.log").read_text().split())
    if 0 in codes or "does not fit" not in said:
        raise SystemExit(
            f"two whole copies were not refused ({codes}): take more layers, or a lower --memory-gib\n{said}"
        )
    return said[said.index("this recipe does not fit") :]


def as_yaml(recipe: Recipe) -> str:
    """The recipe as a file for `learner.train`."""
    return yaml.safe_dump(json.loads(recipe.model_dump_json(exclude_defaults=True)))


def planned(plan: Plan) -> dict[str, float]:
    """Bytes of a rank by the names of phases that ranks use; an engine beside it is not counted."""
    own = {row.phase.removeprefix("RL, "): (row.usage.total - row.beside.total, row.usage.copies) for row in plan.rows}
    found = {phase: size for phase, (size, _) in own.items() if phase != "rollouts"}
    for phase in ("critic update", "policy update"):
        found[f"first {phase}"] = own[phase][0] - own[phase][1]
    found["resuming"] = own["rollouts"][0] - own["rollouts"][1]
    return found


def against_plan(plan: Plan, watches: list[Watch]) -> list[dict[str, Any]]:
    """Each phase's peak on the largest rank beside the plan's figure; the last row is of the run as a whole."""
    expected, rows = planned(plan), []
    for phase, size in expected.items():
        seen = [peaks[phase] for watch in watches for peaks in watch.peaks if phase in peaks]
        if seen:
            rows.append({"phase": phase, "planned": size, "measured": max(seen)})
    peak = max(max(peaks.values()) for watch in watches for peaks in watch.peaks)
    rows.append({"phase": "the run's peak", "planned": max(expected.values()), "measured": peak})
    for row in rows:
        row["off"] = row["planned"] / row["measured"] - 1
    return rows


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("moe", "dense"), default="moe")
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--hidden", type=int, default=1024, help="width of the model; a multiple of 256")
    parser.add_argument("--memory-gib", type=float, help="plan for a machine with so much (default: this one's)")
    parser.add_argument("--folder", type=Path, help="a place for the model and two checkpoints (default: the system's)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Command line; see `--help`."""
    given = parse(argv)
    os.environ.update({"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="large_model_", dir=given.folder) as scratch:
        folder = Path(scratch)
        write_model(folder / "model", sizes(given.kind, given.layers, given.hidden))
        recipe = make_recipe(folder, given.memory_gib, fsdp=RANKS)
        (folder / "recipe.yaml").write_text(as_yaml(recipe))
        plan = make_plan(recipe, RANKS)
        plan.check()
        answer = refused(folder, make_recipe(folder, given.memory_gib))
        print(f"two whole copies: {answer}\n", flush=True)
        needed, available = RANKS * max(planned(plan).values()) + LEAST_BYTES, psutil.virtual_memory().available
        if available < needed:
            raise SystemExit(
                f"{needed / GIB:.1f} GiB are needed and {available / GIB:.1f} are available: free some first"
            )
        first, seen = measured(folder, "first")
        second, seen_again = measured(folder, "second")
        same = [one["digest"] == other["digest"] for one, other in zip(first, second, strict=True)]
        rows = against_plan(plan, [seen, seen_again])
        before, after = (first[0]["parity"][name]["mean"] for name in ("before", "after"))
    lines = [[r["phase"], f"{r['planned'] / GIB:.2f}", f"{r['measured'] / GIB:.2f}", f"{r['off']:+.0%}"] for r in rows]
    notes = (
        "first: without a checkpoint's copy; the policy has no moments yet at the critic's",
        f"resumed in new processes: {'no difference' if all(same) else 'ANOTHER STATE'} in weights and moments",
        f"published to a local engine: mean |log-prob difference| {before:.1e} before, {after:.1e} after",
        f"seconds of the first run {first[0]['seconds']}, of the second {second[0]['seconds']}",
    )
    title = f"{plan.parameters / 1e6:.0f} million parameters ({given.kind}), {RANKS} ranks: GiB of the largest"
    show(title, ("phase", "plan", "measured", "plan is off by"), lines, notes)
    save_json(given.json, {"rows": rows, "refused": answer, "same": same, "first": first, "second": second})
    return 0 if all(same) else 1


if __name__ == "__main__":
    raise SystemExit(main())
