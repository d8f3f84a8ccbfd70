"""Learners whose weights are cut over ranks: `RANK= WORLD_SIZE= MASTER_*= python cut_worker.py FOLDER LAYOUT...`.

Each layout reads what the one before it wrote, makes a step, and writes; the main rank drives the others as a run does.
"""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from learner_tools import MICRO, TEXTS, micro_recipe
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModel, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from learner.config import OptimizerConfig, TinyModelConfig
from learner.model.critic import save_critic
from learner.model.forward import CriticForward, PolicyForward
from learner.model.layers import whole
from learner.model.tiny import build_config, train_tokenizer
from learner.model.trainee import Trainee
from learner.parallel.collectives import total
from learner.parallel.ranks import Ranks
from learner.run.checkpoint import CheckpointError, Progress
from learner.run.learner import Learner
from learner.run.state import state_of

LAYOUTS: dict[str, dict[str, int]] = {
    "whole": {},
    "fsdp": {"fsdp_size": 2},
    "fsdp x experts": {"fsdp_size": 2, "ep_size": 2},
    "tensor": {"tp_size": 2},
    "fsdp x tensor": {"fsdp_size": 2, "tp_size": 2},
    "fsdp 4 x experts": {"fsdp_size": 4, "ep_size": 2},
    "replicate x fsdp": {"dp_replicate_size": 2, "fsdp_size": 2},
}
KINDS: dict[str, dict[str, Any]] = {
    "moe tied": {"kv_heads": 2},
    "moe untied": {"kv_heads": 2},
    "dense tied": {"kv_heads": 2, "experts": 0},
}
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1)


def write_model(folder: Path, kind: str) -> None:
    """A random model of `kind`."""
    sizes = TinyModelConfig(**{**MICRO, **KINDS[kind]})
    tokenizer = train_tokenizer(TEXTS, sizes.vocab_size)
    config = build_config(sizes, sizes.vocab_size, tokenizer.eos_token_id)
    config.tie_word_embeddings = not kind.endswith("untied")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def layouts_of(kind: str, layouts: Sequence[str]) -> list[str]:
    """Those that a model of `kind` can have."""
    return [layout for layout in layouts if kind.startswith("moe") or "experts" not in layout]


class CutLearner(Learner):
    """A learner whose step needs no batch, and is the same in every layout."""

    def nudge(self) -> None:
        """One optimiser step on gradients that each number of a weight has for itself."""
        for _, trainee in self._trainees():
            for parameter in trainee.parameters:
                parameter.grad = (parameter.detach() * 0.5 + 0.01).clone()
            trainee.optimizer.step()
            trainee.optimizer.zero_grad()
            trainee.updates += 1
        self.progress.step += 1

    def full(self) -> dict[str, Tensor]:
        """Weights and moments, whole."""
        return {name: whole(tensor).clone() for name, tensor in state_of(dict(self._trainees())).items()}

    def sums(self, times: int) -> float:
        """Collectives of the main threads, while others write."""
        return sum(total(self.policy.accelerator, 1.0) for _ in range(times))

    def spoil(self, value: float, rank: int) -> None:
        """Set one number of `rank`'s part of a policy's weight."""
        if self.policy.accelerator.process_index == rank:
            weight = self.policy.parameters[-1].detach()
            (weight.to_local() if isinstance(weight, DTensor) else weight).view(-1)[0] = value

    def limit_files(self, size: int, rank: int) -> None:
        """`rank`'s disk is full behind `size` bytes of a file; -1: it is not any more."""
        if self.policy.accelerator.process_index == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def export_critic(self, folder: Path) -> None:
        """As value pretraining leaves it."""
        assert self.critic is not None
        save_critic(self.critic.unwrapped, folder, main=self.policy.accelerator.is_main_process)


def cut_learner(model: Path, folder: Path, layout: str) -> CutLearner:
    """Policy and critic of the folder `model` in `layout`, with optimisers that have not stepped."""
    accelerator = Accelerator(cpu=True)
    cut: dict[str, Any] = {"distributed_config": DistributedConfig(**LAYOUTS[layout])} if LAYOUTS[layout] else {}
    body = AutoModel.from_pretrained(model, **cut)
    torch.manual_seed(1)
    critic = CriticForward(body, body.config.hidden_size)
    with torch.no_grad():
        critic.head.weight.normal_()
    if "fsdp_size" in LAYOUTS[layout]:
        fully_shard(critic.head)  # one row over several ranks: all but the first have an empty part
    policy = PolicyForward(AutoModelForCausalLM.from_pretrained(model, **cut))

    def trainee(module: torch.nn.Module) -> Trainee:
        trained = list(module.parameters())
        optimizer = torch.optim.AdamW(trained, lr=OPTIMIZER.lr, weight_decay=OPTIMIZER.weight_decay, foreach=False)
        return Trainee(module, optimizer, OPTIMIZER, accelerator, parameters=trained)

    recipe = micro_recipe(folder, engine={"max_context": 512, "dtype": "bfloat16"})
    algorithm = recipe.learner.resolve()
    return CutLearner(recipe, algorithm, trainee(policy), trainee(critic), None, Progress(), model)


def drive(ranks: Ranks, own: CutLearner, before: Path, place: Path, *, bad: bool) -> Path:
    """What the main rank has all do; findings go to `place`. Gives the checkpoint."""
    ranks.call("resume", before)
    found: dict[str, Any] = {"read": ranks.call("full")}
    ranks.call("nudge")
    ranks.call("begin_save", place)
    found["written"] = ranks.call("full")
    found["sums"] = ranks.call("sums", 50)
    ranks.call("nudge")
    saved = own.finish_save()
    assert saved is not None
    found["saved"] = str(saved)
    found["cut"] = sorted(name for name, t in state_of(dict(own._trainees())).items() if isinstance(t, DTensor))
    found["exported"] = ranks.call("full")
    # Two engines read at once, and one of them goes away in the middle.
    first, second = ranks.weights(), ranks.weights()
    pairs = list(islice(zip(first, second, strict=True), 5))
    found["streamed"] = [pair[1] for pair in pairs] + list(second)
    own.export(place / "export", ranks.weights())
    own.export(place / "trained", ranks.weights(as_trained=True), as_trained=True)
    ranks.call("export_critic", place / "critic")
    if bad:
        ranks._give_up = lambda error: None  # type: ignore[method-assign]  # the group is to go on here
        last = ranks.accelerator.num_processes - 1
        for name, method, arguments in (("disk", "limit_files", (2000, last)), ("nan", "spoil", (math.nan, last))):
            ranks.call(method, *arguments)
            try:
                ranks.call("begin_save", place)
                own.finish_save()
            except CheckpointError as error:
                found[name] = str(error)
            ranks.call("limit_files", -1, last)
        try:
            own.export(place / "spoiled", ranks.weights())
        except Exception as error:
            found["nan export"] = str(error)
        found["left"] = sorted(path.name for path in place.iterdir())
    torch.save(found, place / "found.pt")
    return saved


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, layouts = Path(sys.argv[1]), sys.argv[2:]
    for kind in KINDS:
        before = folder / kind / "one" / "step_00001"
        for number, layout in enumerate(layouts_of(kind, layouts)):
            own = cut_learner(folder / kind / "model", folder, layout)
            ranks = Ranks(own)
            place = folder / kind / layout
            if ranks.accelerator.is_main_process:
                before = drive(ranks, own, before, place, bad=number == 0)
                ranks.dismiss()
            else:
                ranks.follow()
            own.release()
    assert os.environ["WORLD_SIZE"] == str(ranks.accelerator.num_processes)
    ranks.leave()
