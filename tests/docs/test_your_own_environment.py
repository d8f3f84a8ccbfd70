"""What "Your own environment" shows is run as it stands there; its training is, with the wheel, in a file beside."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from byte_model import write_byte_model
from page_blocks import blocks, write_blocks
from scripted_engine import scripted_engine

from agent.chat.renderer import ChatRenderer
from envs import make_core
from envs.attack.play import play
from envs.attack.report import attackers_earned
from envs.core import AsyncEnv, Message
from envs.tool_calls import ToolCall, write_calls
from learner.config import load_recipe
from learner.config.reading import parse_recipe
from learner.probes.parity_probe import task_prompts

ROOT = Path(__file__).parents[2]
MODULES = ("hidden", "guess", "twice", "attack_hidden", "shop", "traces")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the page's files, in which this process works as a run of the reader's would."""
    write_blocks(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


def outside(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command in `folder`, which sees this checkout as if it were installed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=100, check=False
    )


def probe(number: int) -> str:
    return write_calls([ToolCall("probe", {"number": number})])


def test_it_is_forty_lines() -> None:
    assert len(blocks()["hidden.py"].rstrip().splitlines()) <= 40
    assert set(MODULES) <= {Path(name).stem for name in blocks()}


async def test_the_environment_plays_as_the_page_says(folder: Path) -> None:
    core = make_core("hidden:Hidden", start=7, count=2, probes=4)
    assert list(core.task_ids) == ["hidden-7", "hidden-8"]
    _, info = await core.areset(seed=0, options={"task_id": "hidden-7"})
    number = core.number  # type: ignore[attr-defined]
    assert info["tools"][0]["function"]["name"] == "probe"
    assert (await core.astep(probe(0)))[0] == "higher"
    assert (await core.astep(probe(32)))[0] == "lower"
    assert (await core.astep(probe(number)))[0] == "equal"
    assert "number" in (await core.astep("<tool_call>{}</tool_call>"))[0]
    assert (await core.astep(probe(number)))[3:][0] is True
    await core.areset(seed=0, options={"task_id": "hidden-7"})
    assert (await core.astep(f"<think>hm</think> {number}"))[1:3] == (1.0, True)
    await core.aclose()


async def test_its_attackers_earn_nothing_and_honest_play_is_paid(folder: Path) -> None:
    arena = importlib.import_module("attack_hidden").ARENA
    rows = await play(arena, [0, 1], episodes=12)
    assert attackers_earned(rows) == 0
    assert [(row.policy, row.share) for row in rows if row.honest] == [("halving", 1.0)]


async def test_the_synchronous_one_plays(folder: Path) -> None:
    core = make_core("guess:Guess")
    await core.areset(seed=3)
    for i in range(10):
        step = await core.astep(str(i))
        if step[2] or step[3]:
            break
    assert i <= 2
    await core.aclose()


async def test_code_is_graded_in_a_sandbox(folder: Path) -> None:
    core = make_core("twice:Twice")
    for code, reward in (
        ("def twice(x): return x + x", 1.0),
        ("def twice(x): return 7\nprint('[14, 14]')", 0.0),
        ("print('[2]'); raise SystemExit", 0.0),
    ):
        await core.areset(seed=0)
        assert (await core.astep(code))[1:3] == (reward, True), code
    await core.aclose()


class Customer:
    """What a model would say."""

    async def chat(self, messages: Sequence[Message], **options: Any) -> str:
        item = messages[0]["content"].partition("want ")[2].partition(".")[0]
        return item if "what" in messages[-1]["content"] else "Hello."


async def test_the_shop_sells_what_its_customer_names(folder: Path) -> None:
    core = make_core("shop:Shop", model=Customer())
    text, _ = await core.areset(options={"task_id": "green tea"})
    assert text == "Hello."
    assert (await core.astep("Good morning, what do you want?"))[0] == "green tea"
    _, reward, terminated, _, info = await core.astep("SELL: Green tea")
    assert (reward, terminated) == (1.0, True)
    assert (info["metrics"]["turns"], info["metrics"]["asked"]) == (2, 2)
    await core.aclose()


async def test_the_notebook_stands_beside_the_environments_own_tool(folder: Path) -> None:
    tools = yaml.safe_load(blocks()["tools.yaml"])["env"]["tools"]
    tools["mcp"] = [{"command": [sys.executable, *tools["mcp"][0]["command"][1:]]}]  # the url leads nowhere here
    core: AsyncEnv = make_core("hidden:Hidden", tools=tools)
    _, info = await core.areset(seed=0)
    assert [tool["function"]["name"] for tool in info["tools"]] == ["probe", "note"]
    for text, all_of_it in (("over 15", "over 15"), ("under 23", "over 15\nunder 23")):
        assert (await core.astep(write_calls([ToolCall("note", {"text": text})])))[0] == all_of_it
    assert (await core.astep(probe(0)))[0] == "higher"
    await core.aclose()


async def test_the_parity_gate_needs_neither_tools_nor_a_model_to_ask(folder: Path) -> None:
    renderer = ChatRenderer.from_pretrained(write_byte_model(folder / "model"))
    whole = yaml.safe_load(blocks()["hidden_tiny.yaml"]) | {"evaluation": {"tasks": 1}}
    for name, text in (
        ("shop:Shop", "about rain"),
        ("twice:Twice", "Answer with code only"),
        ("guess:Guess", "0 to 9"),
    ):
        prompts = await task_prompts(parse_recipe({**whole, "env": {"id": name}}), renderer)
        assert text in "".join(map(renderer.decode, prompts)), name


def test_every_recipe_of_the_page_can_be_read(folder: Path) -> None:
    for name in ("hidden.yaml", "hidden_tiny.yaml"):
        assert load_recipe(folder / name).env.id == "hidden:Hidden"
    whole = yaml.safe_load(blocks()["hidden_tiny.yaml"])
    for name in ("evaluation.yaml", "shop.yaml", "tools.yaml"):
        recipe = parse_recipe({**whole, **yaml.safe_load(blocks()[name])})
    assert recipe.env.tools is not None
    assert recipe.env.tools.mcp[1].prefix == "web_"
    mixed = {key: value for key, value in whole.items() if key != "env"}
    mixed["environments"] = [{"name": "shop", **yaml.safe_load(blocks()["shop.yaml"])["env"]}, {"id": "guess:Guess"}]
    recipe = parse_recipe(mixed)
    assert (recipe.env.id, recipe.env.model) == ("shop:Shop", recipe.environments[0].model)
    assert parse_recipe(recipe.model_dump(mode="json")) == recipe, "as it is saved with the run"


async def test_a_process_finds_a_class_in_the_folder_where_it_starts(folder: Path) -> None:
    """Without the folder on this process's own path: `python -m` is what looks there."""
    model = write_byte_model(folder / "model")

    def script(prompt: str) -> str:
        turn = prompt.count("<|im_start|>assistant")
        return probe(0) if turn == 1 else "17"

    async with scripted_engine(model, script) as url:
        words = ["-m", "agent.solve", "--env", "hidden:Hidden", "--engine", url, "--model", str(model)]
        done = await asyncio.to_thread(outside, *words, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "higher" in done.stdout


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("env.id", "hiden:Hidden", "env: cannot make hiden:Hidden.*working folder"),
        ("env.kwargs", "{count: 9, probs: 3}", "env: cannot make hidden:Hidden.*probs"),
        ("evaluation.env.id", "hidden:Hiden", "evaluation.env: cannot make hidden:Hiden"),
        ("env.model", '{url: "http://x/v1", name: x}', "env: cannot make.*Hidden asks none"),
        ("sft", "{clean_traces: 8}", "sft: nobody has written a player of hidden:Hidden.*sft.traces"),
    ],
)
def test_a_wrong_name_or_argument_is_refused_before_the_cold_start(
    folder: Path, capfd: pytest.CaptureFixture[str], key: str, value: str, says: str
) -> None:
    from learner import train

    assert train.main(["hidden_tiny.yaml", f"{key}={value}"]) == 1
    error = " ".join(capfd.readouterr().err.split())
    assert "Traceback" not in error
    assert re.search(says, error), error
    assert not list(folder.glob("runs/hidden_tiny/**/*.safetensors")), "no model was made yet"


def test_the_example_package_keeps_its_promises_once_it_is_installed(tmp_path: Path) -> None:
    place, copy = tmp_path / "place", tmp_path / "codeword"
    shutil.copytree(ROOT / "examples" / "codeword", copy)
    install = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(place),
        str(copy),
    ]
    done = outside(*install, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (copy / "codeword.py").rename(tmp_path / "played.py")  # what is tested is what was installed
    env = {**os.environ, "PYTHONPATH": f"{place}{os.pathsep}{ROOT}"}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_codeword.py"]
    done = subprocess.run(words, cwd=copy, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    lines = outside("played.py", "20", folder=tmp_path).stdout.splitlines()
    assert len(lines) == 20
    (copy / "traces.jsonl").write_text("\n".join(lines))
    assert load_recipe(copy / "codeword.yaml").env.id == "codeword"
