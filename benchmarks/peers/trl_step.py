"""One optimiser step of TRL's GRPOTrainer on a batch that `learner.py` prepared; runs in TRL's own Python.

`training_step` is TRL's, on inputs as its own preparation makes them, without generation and rewards; then clipping and
AdamW as in the trainer's loop. loss_type "dapo" is the mean over all trained tokens of the batch, the project's.

  stock  micro-batches of at most 16,384 tokens, padded to the longest prompt and the longest completion of the batch
  tuned  what a user can do from outside: rows sorted by length, a quarter of them at a time, each cut to the longest in
         it, and the vocabulary asked about completions only (which TRL does on GPUs)
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl.trainer.utils
from cost import answer, cost_of
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

MICRO_BATCH = 16_384


class WithoutRollouts(GRPOTrainer):
    """Takes prepared inputs as they are."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return generation_batch


def inputs_of(data: dict[str, np.ndarray], rows: Any, left: int, right: int, trained: int) -> dict[str, torch.Tensor]:
    """Prompts padded on the left to `left`, completions on the right to `right`, as the trainer wants them."""
    made: dict[str, np.ndarray] = {
        "prompt_ids": np.zeros((len(rows), left), np.int64),
        "completion_ids": np.zeros((len(rows), right), np.int64),
        "tool_mask": np.ones((len(rows), right), np.int64),
        "old_per_token_logps": np.zeros((len(rows), right), np.float32),
    }
    made["prompt_mask"], made["completion_mask"] = (np.zeros_like(made[k]) for k in ("prompt_ids", "completion_ids"))
    for at, row in enumerate(rows):
        prompt, end = int(data["prompt"][row]), int(data["length"][row])
        made["prompt_ids"][at, left - prompt :] = data["ids"][row, :prompt]
        made["prompt_mask"][at, left - prompt :] = 1
        for name, source in (("completion_ids", "ids"), ("tool_mask", "action"), ("old_per_token_logps", "logprobs")):
            made[name][at, : end - prompt] = data[source][row, prompt:end]
        made["completion_mask"][at, : end - prompt] = 1
    tensors = {name: torch.from_numpy(array) for name, array in made.items()}
    tensors["advantages"] = torch.from_numpy(data["advantage"][rows])
    return tensors | {"num_items_in_batch": torch.tensor(float(trained))}


def main(folder: Path, batch: str, variant: str, gradients: Path) -> None:
    """Answer with the cost of the second of two steps; the gradients of the first go to `gradients`."""
    torch.set_num_threads(1)
    data = dict(np.load(folder / f"{batch}.npz"))
    count, longest = data["ids"].shape
    size = max(1, min(count, MICRO_BATCH // longest)) // (4 if variant == "tuned" else 1)
    options: dict[str, Any] = {"dtype": "float32", "attn_implementation": "sdpa"}
    if folder.name == "moe":
        options["experts_implementation"] = "grouped_mm"
    with tempfile.TemporaryDirectory() as scratch:
        settings = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            beta=0.0,
            loss_type="dapo",
            epsilon=0.7,  # as wide as the project's interval: neither clips anything
            epsilon_high=4.0,
            num_generations=8,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=count // size,
            max_completion_length=longest,
            learning_rate=1e-6,
            weight_decay=0.0,
            max_grad_norm=1.0,
            report_to="none",
            disable_tqdm=True,
            model_init_kwargs=options,
        )
        trainer = WithoutRollouts(
            model=str(folder),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": ["a"] * count}),
        )
    trainer.aux_loss_enabled = False  # the project trains without the router's balancing loss
    if variant == "tuned":
        trl.trainer.utils._use_triton = lambda device: True  # decides only whether positions are picked out
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.create_optimizer())
    model.train()
    trainer.current_gradient_accumulation_steps = settings.gradient_accumulation_steps

    order = np.argsort(-data["length"], kind="stable") if variant == "tuned" else np.arange(count)
    parts, area = [], 0
    for start in range(0, count, size):
        rows = order[start : start + size]
        fitted = rows if variant == "tuned" else order
        left, right = (int(x[fitted].max()) for x in (data["prompt"], data["length"] - data["prompt"]))
        parts.append(inputs_of(data, rows, left, right, int(data["action"].sum())))
        area += (left + right) * len(rows)

    def backward() -> None:
        for part in parts:
            trainer.training_step(model, part, None)

    def finish() -> None:
        trainer.accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    backward()
    named = trainer.accelerator.unwrap_model(model).named_parameters()
    np.savez(gradients, **{n: p.grad.numpy() for n, p in named if p.grad is not None})
    finish()
    cost = cost_of(lambda: (backward(), finish()))
    answer(cost | {"micro_batches": len(parts), "padding": 1 - int(data["length"].sum()) / area})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
