"""Whose verdict it is, for the share of a batch: a name that says nothing, and that nobody can choose."""

from __future__ import annotations

from pathlib import Path

import pytest
from serve_tools import ServerProcess, client

from agent.serve.config import load_recipe
from agent.serve.conversations.judges import Judges, judge_of
from agent.store.reading import EpisodeFilter, EpisodeReader


def test_without_keys_one_client_is_one_user_whatever_it_calls_itself() -> None:
    judges = Judges("secret", "user")
    names = {judges.name("anonymous", f"user-{i}", "10.0.0.1") for i in range(1920)}
    assert len(names) == 1
    assert names != {judges.name("anonymous", "", "10.0.0.2")}


def test_a_key_answers_for_the_users_that_it_names_unless_people_hold_it() -> None:
    application, people = Judges("secret", "user"), Judges("secret", "key")
    assert application.name("app", "ann", "10.0.0.1") != application.name("app", "bob", "10.0.0.1")
    assert application.name("app", "ann", "10.0.0.1") == application.name("app", "ann", "10.0.0.2")
    assert people.name("ann", "x", "10.0.0.1") == people.name("ann", "y", "10.0.0.2")
    assert people.name("ann", "x", "") != people.name("bob", "x", "")


@pytest.mark.parametrize("name", ["10.0.0.1", "app", "ann"])
def test_a_name_tells_nobody_who_it_is(name: str) -> None:
    made = Judges("secret", "user").name(*(("anonymous", "", name) if name[0] == "1" else ("app", "ann", "")))
    assert name not in made
    assert made != Judges("another run's", "user").name("anonymous", "", name)


def test_an_episode_is_of_whoever_judged_most_of_it() -> None:
    assert judge_of([]) == judge_of([(1.0, "")]) == ""
    assert judge_of([(1.0, "ann"), (2.0, "bob"), (3.0, "ann")]) == "ann"
    assert judge_of([(1.0, "ann"), (2.0, "bob"), (3.0, "")]) == "bob"


def test_a_served_recipe_has_the_cap_and_may_switch_it_off(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("name: x\n")
    assert load_recipe(path).store.max_share_per_user == 0.125
    assert load_recipe(path, ["store.max_share_per_user=null"]).store.max_share_per_user is None


async def test_the_store_knows_whose_verdict_an_episode_is(server: ServerProcess) -> None:
    async with client(server.url) as api:
        names = []
        for user in ("ann", "bob"):
            answer = await api.chat(user=user)
            status, given = await api.feedback(answer["id"], reward=1)
            assert status == 200, given
            assert given["in_store"]
            names.append(given["conversation"])
    with EpisodeReader(server.run_dir / "episodes.sqlite") as reader:
        judges = {row.id: row.judge for row in reader.list(EpisodeFilter(limit=10_000)) if row.id in names}
    assert len(judges) == 2
    assert len(set(judges.values())) == 1, "one address"
    assert all(len(judge or "") == 16 for judge in judges.values())
