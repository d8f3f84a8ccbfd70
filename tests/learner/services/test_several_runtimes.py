"""Several runtimes of one run: each does its share under its own name, and they end together."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest
from learner_tools import micro_recipe, write_micro_model
from scripted_engine import scripted_engine

from agent.episode import decode
from agent.store.client import StoreClient
from learner.config import RecipeError
from learner.faults import LearnerFault
from learner.services.store_and_runtime import RUNTIME, STOP_LIMIT_S, Children

PROBLEMS = [{"problem": f"What is 1 + {i}?", "answer": str(1 + i)} for i in range(8)]
ENV = {"id": "sao/PythonTIR-v0", "kwargs": {"system_prompt": "", "spares": 0, "problems": PROBLEMS}}
KEY = "the-key-of-this-run"
SECTION: dict[str, Any] = {"max_context_tokens": 400, "max_tokens_per_turn": 64}


def runtimes() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "agent.runtime" in " ".join(p.cmdline())]


async def test_two_runtimes_share_the_episodes_and_the_end(tmp_path: Path) -> None:
    model = write_micro_model(tmp_path / "model")
    async with scripted_engine(model, lambda prompt: r"\boxed{2}") as url:
        recipe = micro_recipe(
            tmp_path,
            env=ENV,
            engine={"urls": [url], "max_context": 512},
            runtime={**SECTION, "count": 2, "concurrency": 3},
        )
        store = {"tasks": len(PROBLEMS), "batch": 4, "max_ready": 8}
        workers: set[str] = set()
        children = Children(tmp_path / "run", KEY)
        async with asyncio.timeout(120):
            try:
                address = await children.start_store(store)
                await children.start_runtimes(recipe, model, store=address, engines=(url,))
                async with StoreClient(address, key=KEY) as client:
                    while len(workers) < 2:
                        claim = await client.claim(4, version=0, wait_s=5.0)
                        if claim is not None:
                            workers |= {decode(data).worker for data in claim.episodes}
                            await client.commit(claim.id, 0)
                children.check()
                found = runtimes()
                assert len(found) == 2
                killed = children._processes["runtime-2"][0]
                killed.kill()
                await killed.wait()
                with pytest.raises(LearnerFault, match="the runtime-2 ended with code"):
                    children.check()
            finally:
                await children.stop_all(RUNTIME, STOP_LIMIT_S)
                await children.stop("store", STOP_LIMIT_S)
    assert set(workers) == {"micro-0", "micro-runtime-2"}
    assert not [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


async def test_what_a_runtime_that_is_gone_had_to_keep_is_never_delivered(tmp_path: Path, monkeypatch: Any) -> None:
    """A session with three runtimes, and then one with two: the third's spool is the first one's now."""
    for name, episode in (("undelivered", "a"), ("undelivered-runtime-2", "b"), ("undelivered-runtime-3", "c")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{episode}.episode").write_text(episode)
    started = []

    async def start_runtime(self: Children, *_: Any, name: str, concurrency: int, **__: Any) -> None:
        started.append((name, concurrency))

    monkeypatch.setattr(Children, "start_runtime", start_runtime)
    recipe = micro_recipe(tmp_path, runtime={**SECTION, "count": 2, "concurrency": 3})
    await Children(tmp_path, KEY).start_runtimes(recipe, tmp_path, store="http://s", engines=("http://e",))
    assert started == [("runtime", 2), ("runtime-2", 1)]
    kept = {
        folder: sorted(p.stem for p in (tmp_path / folder).glob("*.episode"))
        for folder in ("undelivered", "undelivered-runtime-2")
    }
    assert kept == {"undelivered": ["a", "c"], "undelivered-runtime-2": ["b"]}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"runtime": {"count": 0}}, "count"),
        ({"runtime": {"count": 9, "concurrency": 8}}, "count 9 is more than concurrency 8"),
        ({"runtime": {"count": 2, "launch": False}}, "launch=false"),
        ({"runtime": {"count": 2}, "learner": {"online": True}}, "runtime.count: learner.online"),
    ],
    ids=["none", "too many", "elsewhere", "online"],
)
def test_a_number_of_runtimes_that_makes_no_sense_is_taken(tmp_path: Path, sections: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        micro_recipe(tmp_path, **sections)
