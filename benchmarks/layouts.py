"""Layouts of a learner against one process: loss, gradient norm and weights after three full SAO steps, and memory.

    python -m benchmarks.layouts                                          # dense, MoE tied and untied; 1, 2 and 4 ranks
    python -m benchmarks.layouts --models moe --layouts fsdp=2 fsdp=2,tp=2 --json layouts.json
    python -m benchmarks.layouts --size small                             # weights large enough for peaks to show them

Every layout runs on so many processes on the CPU (gloo), in the same three steps on the same episodes: K = 2 critic
updates with frozen attention, values read again, a policy update. Then it writes a checkpoint, which every other layout
reads, and gives its weights layer by layer, which are held against what one process gives that has read the checkpoint.
Differences are the largest of any rank, of policy and critic together.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import multiprocessing
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from agent.episode import Episode, SamplingParams, Segment, StopReason
from benchmarks.report import save_json, show
from learner.config import TinyModelConfig, parse_recipe
from learner.model.layers import whole
from learner.model.tiny import write_tiny_model
from learner.parallel.ranks import Ranks, make_accelerator
from learner.run.learner import Learner
from learner.run.state import state_of

MIB = 2**20
MODELS = ("dense", "moe", "untied")
TWO = ("fsdp=2", "tp=2", "fsdp=2,ep=2", "replicate=2", "context=2")
FOUR = ("fsdp=4,ep=2", "fsdp=2,tp=2", "replicate=2,fsdp=2", "fsdp=2,context=2")
LAYOUTS = ("", *TWO, *FOUR)
SIZES: dict[str, dict[str, int]] = {
    "micro": {
        "hidden_size": 16,
        "layers": 2,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 8,
        "experts": 4,
        "expert_width": 16,
    },
    "small": {
        "hidden_size": 256,
        "layers": 4,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "experts": 8,
        "expert_width": 512,
    },
    "medium": {
        "hidden_size": 512,
        "layers": 8,
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 64,
        "experts": 8,
        "expert_width": 1024,
    },
}
COLUMNS = ("model, layout", "ranks", "loss", "norm", "weights", "held", "step", "peak MiB", "checkpoint", "stream")
NOTES = (
    "loss, norm, weights: the largest difference from one process; loss and norm relative, over three steps",
    "held: share of the policy's weights on the rank with most; peak MiB: memory of the largest rank over its start, "
    "which holds what the layouts before it have left in the process",
    "checkpoint: the largest difference of weights and moments in any other layout of the table that read it; "
    "stream: of the weights it publishes from those of one process with the same state",
)


def sizes(keys: str) -> dict[str, int]:
    """`fsdp=2,tp=2` as keys of `hardware`."""
    return {name: int(size) for name, size in (word.split("=") for word in keys.split(",") if word)}


def world(keys: str) -> int:
    """How many processes a layout takes; experts lie across the others."""
    count = 1
    for name, size in sizes(keys).items():
        count *= 1 if name == "ep" else size
    return count


def write_model(folder: Path, name: str, size: str) -> Path:
    """A model folder with random weights."""
    keys = {**SIZES[size], **({"experts": 0} if name == "dense" else {})}
    write_tiny_model(folder, TinyModelConfig(vocab_size=320, max_context=1024, **keys), ["What is 1 + 1?"] * 4, 0)
    if name == "untied":
        config = AutoConfig.from_pretrained(folder)
        config.tie_word_embeddings = False
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def episodes(seed: int, count: int = 16) -> list[Episode]:
    """Episodes of one turn, of quite different lengths."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        prompt = tuple(rng.randrange(263) for _ in range(rng.randint(2, 40)))
        ids = tuple(rng.randrange(263) for _ in range(rng.randint(1, 80)))
        action = Segment("action", ids, logprobs=(-5.7,) * len(ids), versions=(0,) * len(ids), finish_reason="stop")
        found.append(
            Episode(
                id=f"e{number}",
                env_id="sao/PythonTIR-v0",
                task_id=f"t{number}",
                segments=(Segment("prompt", prompt), action),
                turn_rewards=(float(rng.random() < 0.5),),
                stop_reason=StopReason.TERMINATED,
                sampling=SamplingParams(),
                group_id=f"g{number}",
            )
        )
    return found


Job = tuple[str, str]
"""The name of a model, and a layout."""


def place(folder: Path, job: Job) -> Path:
    """Where what a job leaves lies."""
    return folder / f"{job[0]}_{job[1].replace(',', '_') or 'one'}"


def build(folder: Path, job: Job) -> Any:
    """This rank's learner, with a critic whose head is not 0."""
    optimizer = {"lr": 1e-3, "warmup_steps": 0, "eps": 1e-3, "clip_norm": 0.05}
    settings = {"batch_size": 16, "micro_batch_tokens": 400, "policy": optimizer, "critic": optimizer, "tracker": None}
    recipe = parse_recipe(
        {
            "name": "layouts",
            "runs_dir": str(folder),
            "model": {"path": str(folder / job[0])},
            "learner": settings,
            "engine": {"dtype": "bfloat16"},
            "hardware": sizes(job[1]),
        }
    )
    torch.manual_seed(0)
    accelerator = make_accelerator(recipe)
    own = Learner.build(recipe, accelerator, policy_folder=folder / job[0], critic_folder=folder / "none")
    assert own.critic is not None
    torch.nn.init.constant_(own.critic.unwrapped.head.weight, 0.01)
    return own


def whole_state(own: Any) -> dict[str, Any]:
    """Weights and moments, put together; all ranks."""
    return {
        name: whole(tensor).clone() for name, tensor in state_of({"policy": own.policy, "critic": own.critic}).items()
    }


def train(folder: Path, job: Job) -> Any:
    """Three steps, a checkpoint, a stream; what came of them goes to a file of this rank."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    start = psutil.Process().memory_info().rss
    own = build(folder, job)
    figures, seconds = [], []
    for step in range(3):
        started = time.monotonic()
        figures.append(own.step(episodes(step))[1].figures)
        seconds.append(time.monotonic() - started)
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 - start
    parameters = [p.detach() for p in own.policy.unwrapped.parameters()]
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    own.save(place(folder, job))
    found = {
        "figures": figures,
        "state": whole_state(own),
        "stream": [pair for index in range(own.layers) for pair in own.layer(index)],
        "held": held / sum(p.numel() for p in parameters),
        "peak": peak,
        "seconds": min(seconds[1:]),
    }
    torch.save(found, place(folder, job) / f"rank_{own.policy.accelerator.process_index}.pt")
    return own


def read(folder: Path, job: Job, writers: list[Job]) -> Any:
    """Read what every other layout wrote: the largest differences, by writer, of the state and of the stream."""
    own, differences = build(folder, job), {}
    for writer in writers:
        if writer[0] != job[0] or (writer == job and job[1]):
            continue
        own.resume(place(folder, writer) / "step_00003")
        wrote = torch.load(place(folder, writer) / "rank_0.pt")
        differences[writer[1]] = {"state": largest_difference(whole_state(own), wrote["state"])}
        if not job[1]:
            differences[writer[1]]["stream"] = largest_difference(dict(own.weights()), dict(wrote["stream"]))
    if own.policy.accelerator.is_main_process:
        (place(folder, job) / "read.json").write_text(json.dumps(differences))
    return own


def largest_difference(left: dict[str, Any], right: dict[str, Any]) -> float:
    """Between the numbers of two dicts of tensors; infinite where names, shapes or dtypes are not the same."""
    if {n: (t.shape, t.dtype) for n, t in left.items()} != {n: (t.shape, t.dtype) for n, t in right.items()}:
        return math.inf
    return max(float((tensor.double() - right[name].double()).abs().max()) for name, tensor in left.items())


def rank(folder: Path, stage: str, count: int) -> None:
    """What one of `count` processes does in a stage: every job of that many, one after another."""
    torch.set_num_threads(1)
    jobs: list[Job] = [(name, keys) for name, keys in json.loads((folder / "jobs.json").read_text())]
    own = None
    for job in jobs:
        if world(job[1]) == count:
            if own is not None:
                own.release()
            own = train(folder, job) if stage == "train" else read(folder, job, jobs)
    if count > 1:
        Ranks(own).leave()


def launch(folder: Path, stage: str, count: int) -> None:
    """Run a stage in `count` processes, forked from this one, so that libraries are imported once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=in_a_group, args=(number, count, port, rank, folder, stage, count))
        for number in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(codes := [process.exitcode for process in processes]):
        raise SystemExit(f"{stage} on {count} processes ended with {codes}; what they said is above")


def in_a_group(number: int, count: int, port: int, work: Callable[..., None], *arguments: Any) -> None:
    """Do `work` as rank `number` of `count`."""
    group = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if count > 1:
        os.environ.update({name: str(value) for name, value in group.items()})
    work(*arguments)


def measure(folder: Path, jobs: list[Job]) -> None:
    """Both stages of all jobs; what they leave lies in `place` of each."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    counts = sorted({world(keys) for _, keys in jobs})
    for job in jobs:
        place(folder, job).mkdir()
    for stage in ("train", "read"):
        for count in counts:
            launch(folder, stage, count)


def found_of(folder: Path, job: Job) -> list[dict[str, Any]]:
    """What each rank of a job found."""
    return [torch.load(place(folder, job) / f"rank_{number}.pt") for number in range(world(job[1]))]


def read_elsewhere(folder: Path, job: Job, jobs: list[Job]) -> dict[str, float]:
    """What the others made of a job's checkpoint and stream."""
    readers = {
        other[1]: json.loads((place(folder, other) / "read.json").read_text()) for other in jobs if other[0] == job[0]
    }
    states = [found[job[1]]["state"] for found in readers.values() if job[1] in found]
    return {"checkpoint": max(states), "readers": len(states), "stream": readers[""][job[1]]["stream"]}


def against(ranks: list[dict[str, Any]], one: dict[str, Any]) -> dict[str, float]:
    """The largest differences of any rank from one process."""

    def relative(names: tuple[str, ...]) -> float:
        return max(
            abs(found["figures"][step][name] - own[name]) / max(abs(own[name]), 1e-9)
            for found in ranks
            for step, own in enumerate(one["figures"])
            for name in names
        )

    return {
        "loss": relative(("policy/entropy", "policy/advantage_std")),
        "norm": relative(("policy/gradient_norm", "critic/gradient_norm")),
        "weights": max(
            float((found["state"][name] - weight).abs().max())
            for found in ranks
            for name, weight in one["state"].items()
            if ".weights." in name
        ),
        "held": max(found["held"] for found in ranks),
        "seconds": max(found["seconds"] for found in ranks),
        "peak_mib": max(found["peak"] for found in ranks) / MIB,
    }


def main(argv: list[str] | None = None) -> int:
    """Command line; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), metavar="KEYS", help="as fsdp=2,tp=2")
    parser.add_argument("--size", choices=sorted(SIZES), default="micro")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args(argv)
    os.environ.update({"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "TORCH_CPP_LOG_LEVEL": "ERROR"})
    torch.set_num_threads(1)
    rows, lines = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        layouts = ["", *(keys for keys in given.layouts if keys)]  # one process is what all are held against
        jobs = [(name, keys) for name in given.models for keys in layouts if name != "dense" or "ep" not in sizes(keys)]
        for name in given.models:
            write_model(folder / name, name, given.size)
        measure(folder, jobs)
        for name, keys in jobs:
            ranks, [one] = found_of(folder, (name, keys)), found_of(folder, (name, ""))
            more = read_elsewhere(folder, (name, keys), jobs)
            row = {"model": name, "layout": keys, "ranks": world(keys)} | against(ranks, one) | more
            rows.append(row)
            differences = [f"{row[column]:.1e}" for column in ("loss", "norm", "weights")]
            costs = [f"{row['held']:.0%}", f"{row['seconds']:.2f} s", f"{row['peak_mib']:.0f}"]
            passed = [f"{row['checkpoint']:g} in {row['readers']}", f"{row['stream']:g}"]
            lines.append([f"{name}, {keys or 'one process'}", str(row["ranks"]), *differences, *costs, *passed])
    show(f"Layouts against one process, {given.size} models", COLUMNS, lines, NOTES)
    save_json(given.json, {"rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
