"""Does the learner do on this GPU what it does on a CPU, and how fast? One table, within 6 minutes.

    sh benchmarks/gpu_smoke.sh                       # without a GPU: says so, exit code 0
    sh benchmarks/gpu_smoke.sh --device cpu --tiny   # the same path in small
    python benchmarks/gpu_smoke.py --json smoke.json

Four parts: the learner's formulas in float32 on the device against float64 on the CPU; chunked log-probs against
those of one chunk, in value and gradient; weights handed to another process on the device; and whole SAO steps (two
critic updates, values, advantages, policy) of a random Qwen3-MoE of 0.6 billion parameters in bfloat16 on episodes of
8,192 tokens, with peak memory beside what `learner.plan` would have said. Exit code 1 where a bound is broken.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import save_json, show

GIB = 2**30


@dataclass(frozen=True)
class Size:
    """A Qwen3-MoE, the tokens of an episode and how many episodes a step has."""

    name: str
    config: dict[str, Any]
    length: int
    episodes: int
    chunk: int


LARGE = Size(
    "0.6B",
    {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "num_hidden_layers": 10,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 384,
        "intermediate_size": 3072,
    },
    length=8192,
    episodes=4,
    chunk=2048,
)
TINY = Size(
    "tiny",
    {
        "vocab_size": 512,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "intermediate_size": 64,
    },
    length=128,
    episodes=4,
    chunk=16,
)


@dataclass(frozen=True)
class Line:
    """One line of the table; `bound` None: a figure without a bound."""

    name: str
    figure: float
    unit: str
    bound: float | None = None

    @property
    def holds(self) -> bool:
        return self.bound is None or self.figure <= self.bound

    def cells(self) -> list[str]:
        shown = f"{self.figure:,.0f}" if self.figure >= 1000 else f"{self.figure:.3g}"
        verdict = "" if self.bound is None else "holds" if self.holds else "BROKEN"
        return [self.name, shown, self.unit, "" if self.bound is None else f"{self.bound:g}", verdict]


def relative_error(found: Tensor, reference: Tensor) -> float:
    """The largest difference, in units of the reference's largest value."""
    difference = (found.detach().double().cpu() - reference.detach().double().cpu()).abs().max()
    return float(difference / reference.detach().double().cpu().abs().max().clamp(min=1e-12))


def maths_lines(device: torch.device, rows: int, length: int) -> Iterator[Line]:
    """The formulas in float32 on `device` against float64 on the CPU, on the same numbers."""
    from learner.advantages import length_adaptive_lambda, skip_observation_gae, step_level_gae, vtrace
    from learner.losses import dis_policy_loss, masked_value_loss

    generator = torch.Generator().manual_seed(0)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(rows, length, generator=generator)

    turn_ids = torch.arange(length).div(32, rounding_mode="floor").expand(rows, length)
    mask = (turn_ids % 2 == 1) & (torch.rand(rows, 1, generator=generator) * length > torch.arange(length) * 0.5)
    mask[:, 32] = True
    rewards, values = (torch.rand(rows, length, generator=generator) < 0.01).float(), noise(0.5)
    rollout = -noise(1.0).abs()
    logprobs = rollout + noise(0.3)

    def formulas(dtype: torch.dtype, where: torch.device) -> dict[str, Tensor]:
        def on(tensor: Tensor) -> Tensor:
            return tensor.to(where, dtype) if tensor.is_floating_point() else tensor.to(where)

        r, v, m, t = on(rewards), on(values), on(mask), on(turn_ids)
        mu, policy = on(rollout), on(logprobs).requires_grad_(True)
        lam = length_adaptive_lambda(m.sum(1)).to(dtype)
        advantages, returns = skip_observation_gae(r, v, m, lam=lam)
        loss = dis_policy_loss(policy, mu, advantages, m, eps_low=0.3, eps_high=5.0).loss
        loss.backward()
        assert policy.grad is not None
        return {
            "token-level GAE": advantages,
            "returns": returns,
            "turn-level GAE": step_level_gae(r, v, m, t, lam=lam),
            "V-trace targets": vtrace(policy.detach(), mu, r, v, m)[0],
            "DIS loss": loss,
            "gradient of the DIS loss": policy.grad,
            "value loss": masked_value_loss(v, returns, m),
        }

    reference, found = formulas(torch.float64, torch.device("cpu")), formulas(torch.float32, device)
    for name, expected in reference.items():
        yield Line(
            f"{name}: float32 here against float64 on CPU", relative_error(found[name], expected), "relative", 1e-4
        )


def write_model(folder: Path, size: Size) -> int:
    """A random Qwen3-MoE in bfloat16 as a model folder; returns its number of parameters."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    import learner.model.loading  # noqa: F401  (it turns the library's loading bars off)

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **size.config, norm_topk_prob=True, tie_word_embeddings=True, max_position_embeddings=2 * size.length
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def chunk_lines(folder: Path, size: Size, device: torch.device) -> Iterator[Line]:
    """Log-probs and gradients in chunks against those of a single chunk, float32, and the memory of both."""
    from learner.config import ModelConfig
    from learner.model.forward import PolicyForward
    from learner.model.loading import load_policy_model

    # float32 for a tight bound; a quarter of an episode keeps the single chunk small enough for any GPU.
    length = max(size.length // 4, 32)
    model = load_policy_model(folder, ModelConfig(path=folder, dtype="float32", experts_implementation="eager")).to(
        device
    )
    ids = torch.randint(size.config["vocab_size"], (1, length), generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    found = []
    for chunk in (length, max(length // 8, 4)):
        model.zero_grad(set_to_none=True)
        before = start_peak(device)
        logprobs, _ = PolicyForward(model, chunk=chunk)(ids, mask)
        logprobs.sum().backward()
        gradient = torch.cat([p.grad.flatten()[:100_000].cpu() for p in model.parameters() if p.grad is not None])
        found.append((logprobs.detach(), gradient, peak(device) - before))
    (full, full_gradient, full_bytes), (chunked, gradient, bytes_) = found
    yield Line("log-probs: 8 chunks against one", relative_error(chunked, full), "relative", 1e-5)
    yield Line("their gradients: 8 chunks against one", relative_error(gradient, full_gradient), "relative", 1e-4)
    if device.type == "cuda":
        yield Line("memory of a pass with one chunk", full_bytes / GIB, "GiB")
        yield Line("memory of a pass with 8 chunks", bytes_ / GIB, "GiB")


def start_peak(device: torch.device) -> int:
    """Begin a measurement of peak memory; the bytes that are taken already."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak(device: torch.device) -> int:
    """Most bytes since `start_peak`; 0 where nobody counts."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def step_lines(folder: Path, size: Size, device: torch.device, steps: int) -> Iterator[Line]:
    """Whole steps of a learner, layers kept and layers computed again."""
    for recompute in (False, True):
        yield from _steps(folder, size, device, steps, recompute)


def _steps(folder: Path, size: Size, device: torch.device, steps: int, recompute: bool) -> Iterator[Line]:
    from accelerate import Accelerator

    from learner.config import parse_recipe
    from learner.run.learner import Learner

    torch.manual_seed(0)
    model = {"path": str(folder), "dtype": "bfloat16", "recompute_layers": recompute}
    recipe = parse_recipe(
        {
            "name": "gpu_smoke",
            "model": model,
            "learner": {
                "batch_size": size.episodes,
                "micro_batch_tokens": size.length,
                "logprob_chunk": size.chunk,
                "policy": {"lr": 1e-6, "warmup_steps": 0},
                "critic": {"lr": 5e-6, "warmup_steps": 0},
                "tracker": None,
            },
            "engine": {"max_context": size.length},
            "runtime": {"max_context_tokens": size.length},
        }
    )
    start_peak(device)
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="bf16")
    learner = Learner.build(recipe, accelerator, policy_folder=folder, critic_folder=folder / "none")
    episodes = recorded_episodes(size, learner)
    seconds, result = [], None
    for _ in range(steps + 1):  # the first one also warms up
        begun = time.perf_counter()
        _, result = learner.step(episodes)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    assert result is not None
    what = "layers computed again" if recompute else "layers kept"
    moved = result.policy_moved and result.critic_moved
    finite = all(math.isfinite(result.figures[name]) for name in ("policy/gradient_norm", "critic/gradient_norm"))
    yield Line(f"bf16 SAO step, {what}: parts that did not move", float(not (moved and finite)), "", 0.0)
    # After one step the policy has hardly moved: what is gated now is gated by arithmetic alone.
    yield Line(f"bf16 SAO step, {what}: gated share", result.figures["gate/share"], "of tokens", 0.01)
    tokens = size.length * size.episodes
    yield Line(f"bf16 SAO step, {what}: speed", tokens / min(seconds[1:]), "tokens/s")
    if device.type == "cuda":
        yield Line(f"bf16 SAO step, {what}: peak memory", peak(device) / GIB, "GiB")
    yield Line(f"bf16 SAO step, {what}: planned memory", planned_bytes(recipe) / GIB, "GiB")


def planned_bytes(recipe: Any) -> float:
    """What `learner.plan` counts for the learner's largest phase, without an engine."""
    from learner.plan.phases import make_plan

    apart = recipe.hardware.model_copy(update={"learner_gpus": 1, "engine_gpus": 1, "memory_gib": 1000.0})
    rows = make_plan(recipe.model_copy(update={"hardware": apart})).rows
    return max(row.usage.total for row in rows if row.kind != "engine GPUs")


def recorded_episodes(size: Size, learner: Any) -> list[Any]:
    """Episodes of random tokens, turns of 96 action and 32 observation tokens, with the policy's own log-probs."""
    import msgspec

    from agent.episode import Episode, Segment, StopReason
    from learner.data.batch import build_batch

    rng = random.Random(0)

    def some(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(size.config["vocab_size"]) for _ in range(count))

    episodes = []
    for number in range(size.episodes):
        segments, left = [Segment("prompt", some(size.length // 16))], size.length - size.length // 16
        while left > 0:
            acted = min(left, 96)
            segments.append(Segment("action", some(acted), "", (-1.0,) * acted, (0,) * acted, "stop"))
            left -= acted
            if left > 32:
                segments.append(Segment("observation", some(32)))
                left -= 32
        turns = sum(segment.kind == "action" for segment in segments)
        rewards = (0.0,) * (turns - 1) + (float(number % 2),)
        name = str(number)
        episodes.append(
            Episode(
                id=name,
                env_id="gpu_smoke",
                task_id=name,
                segments=tuple(segments),
                turn_rewards=rewards,
                stop_reason=StopReason.TERMINATED,
            )
        )
    batch, recorded = build_batch(episodes), []
    with torch.no_grad():
        for row, episode in enumerate(episodes):
            device = learner.policy.accelerator.device
            scored = learner.policy.module(
                batch.input_ids[row : row + 1].to(device), batch.action_mask[row : row + 1].to(device)
            )[0][0].tolist()
            segments, at = [], 0
            for segment in episode.segments:
                end = at + len(segment.token_ids)
                if segment.kind == "action":
                    segment = msgspec.structs.replace(segment, logprobs=tuple(scored[at:end]))
                segments.append(segment)
                at = end
            recorded.append(msgspec.structs.replace(episode, segments=tuple(segments)))
    return recorded


_READER = """
import hashlib, json, sys, torch
from agent.engines.weight_stream import opened_buffer
seen = opened_buffer(json.load(sys.stdin), torch.device(sys.argv[1]))
print(hashlib.sha256(seen.cpu().numpy().tobytes()).hexdigest())
"""


def transfer_lines(device: torch.device, size: int) -> Iterator[Line]:
    """Both ways of streaming weights to an engine, as far as one device can show them."""
    from agent.engines.weight_stream import broadcast, join, shared_buffer

    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    with shared_buffer(size, device) as (buffer, handle):
        buffer.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
        done = subprocess.run(
            [sys.executable, "-c", _READER, str(device)], input=json.dumps(handle), capture_output=True, text=True
        )
        same = done.stdout.strip() == hashlib.sha256(buffer.cpu().numpy().tobytes()).hexdigest()
    if not same:
        print(done.stderr, file=sys.stderr)
    yield Line("ipc: another process read other bytes", float(not same), "times", 0.0)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    # One rank is no transfer, but the group is made, used and ended; NCCL wants a GPU for each further one.
    group = join("127.0.0.1", port, 0, 1, device, limit_s=60, listener=listener.detach())
    began = time.perf_counter()
    broadcast(group, torch.zeros(size, dtype=torch.uint8, device=device))
    yield Line("broadcast in a group of one", time.perf_counter() - began, "s", 60.0)
    group.abort()


def report(lines: list[Line], size: Size, parameters: int, device: torch.device, seconds: float) -> None:
    """Print the table."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    show(
        f"{where}, PyTorch {torch.__version__}",
        ["check", "figure", "unit", "bound", ""],
        [line.cells() for line in lines],
        [
            f"Model: random Qwen3-MoE, {parameters / 1e6:,.2f} million parameters; {size.episodes} episodes of "
            f"{size.length} tokens a step. All of it took {seconds:.0f} s.",
            "A step: two critic updates, values read again, advantages, policy update; bfloat16 weights and moments.",
        ],
    )


def main() -> int:
    """Parse the command line and run; exit code 1 where a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a micro model on 128 tokens: the path, not the figures")
    parser.add_argument("--steps", type=int, default=3, help="measured steps after the first (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.steps < 1:
        parser.error("--steps must be at least 1")
    if given.device == "cuda" and not torch.cuda.is_available():
        print("gpu_smoke: no CUDA GPU is visible to PyTorch here, so nothing was measured; see --device cpu --tiny")
        return 0
    size, device = TINY if given.tiny else LARGE, torch.device(given.device)
    begun = time.perf_counter()
    lines: list[Line] = []

    def collect(name: str, found: Callable[[], Iterator[Line]]) -> None:
        print(f"{name} ...", file=sys.stderr, flush=True)
        lines.extend(found())

    with tempfile.TemporaryDirectory(prefix="gpu-smoke-") as scratch:
        folder = Path(scratch) / "model"
        parameters = write_model(folder, size)
        collect("maths", lambda: maths_lines(device, 8, size.length))
        collect("chunked log-probs", lambda: chunk_lines(folder, size, device))
        collect("weight streams", lambda: transfer_lines(device, 2**20 if given.tiny else 2**28))
        collect("steps", lambda: step_lines(folder, size, device, given.steps))
    seconds = time.perf_counter() - begun
    report(lines, size, parameters, device, seconds)
    figures = [{"name": x.name, "figure": x.figure, "unit": x.unit, "bound": x.bound, "holds": x.holds} for x in lines]
    save_json(given.json, {"device": str(device), "parameters": parameters, "seconds": seconds, "lines": figures})
    return 0 if all(line.holds for line in lines) else 1


if __name__ == "__main__":
    raise SystemExit(main())
