"""A push to a hub must bring the whole model, keep its token to itself, and never be in the way of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hub_server import FakeHub, fake_hub
from learner_tools import micro_recipe

from learner.config import Recipe, RecipeError
from learner.run.folder import append_metrics
from learner.run.hub import Hub
from learner.run.model_card import model_card, shareable

TOKEN = "hf_local_secret"
REPO = "somebody/micro"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def recipe_for(folder: Path, **settings: object) -> Recipe:
    recipe = micro_recipe(folder, hub={"repo": REPO, **settings})
    recipe.run_dir.mkdir(parents=True)
    append_metrics(recipe.run_dir, 1, {"rollout/reward": 0.5, "evaluation/success": 0.75})
    return recipe


def test_the_whole_model_arrives_with_its_page_and_the_token_stays_out(
    hub: FakeHub, micro_model: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    recipe = recipe_for(tmp_path)
    own = Hub.of(recipe, said.append)
    assert own is not None
    own.finish(micro_model, 8)
    assert any(f"the model of step 8 is at {hub.url}/{REPO}/commit" in line for line in said), said
    files = hub.files[REPO]
    for path in micro_model.iterdir():
        assert files[path.name] == path.read_bytes()
    assert files["curves.png"][:4] == b"\x89PNG"
    assert "# micro" in files["README.md"].decode()
    assert hub.private == {REPO: True}
    assert hub.seen == {f"Bearer {TOKEN}"}
    left = [path for path in recipe.run_dir.rglob("*") if path.is_file()]
    assert left
    assert not any(TOKEN.encode() in content for content in [*files.values(), *(path.read_bytes() for path in left)])
    assert not (recipe.run_dir / ".hub").exists()


def test_training_goes_on_meanwhile_and_a_second_push_is_left_out(
    hub: FakeHub, micro_model: Path, tmp_path: Path
) -> None:
    """The snapshot may go while it is pushed, as those of older versions do."""
    said: list[str] = []
    own = Hub.of(recipe_for(tmp_path, every=2, private=False), said.append)
    assert own is not None
    assert [own.is_due(step) for step in (1, 2, 3, 4)] == [False, True, False, True]
    snapshot = tmp_path / "v2"
    snapshot.mkdir()
    (snapshot / "model.safetensors").write_bytes(b"weights of 2")
    hub.gate.clear()
    assert own.offer(snapshot, 2)
    (snapshot / "model.safetensors").unlink()
    assert hub.arrived.wait(60)
    assert own.is_busy
    assert not own.offer(micro_model, 4)
    assert "step 4 is left out" in said[-1]
    hub.gate.set()
    own.wait()
    assert hub.files[REPO]["model.safetensors"] == b"weights of 2"
    assert hub.commits == ["micro, step 2"]
    assert hub.private == {REPO: False}


@pytest.mark.parametrize("trouble", ["refused", "gone", "no folder"])
def test_a_failure_is_a_warning_without_the_token(
    hub: FakeHub, micro_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    said: list[str] = []
    if trouble == "gone":  # a port where nobody listens
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    hub.refusal = 403 if trouble == "refused" else None
    own = Hub.of(recipe_for(tmp_path), said.append)
    assert own is not None
    own.finish(tmp_path / "none" if trouble == "no folder" else micro_model, 8)
    assert said[-1].startswith(f"warning: hub: the model of step 8 could not be pushed to {REPO}: ")
    assert TOKEN not in "".join(said)


def test_without_a_token_the_run_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(RecipeError, match=r"hub.repo: somebody/micro wants a token .* HF_TOKEN"):
        Hub.of(recipe_for(tmp_path), print)
    assert Hub.of(micro_recipe(tmp_path), print) is None


@pytest.mark.parametrize("word", ["micro", "a/b/c", "a b/c", ""])
def test_a_repository_has_an_owner_and_a_name(word: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"hub.repo.*is no owner/name"):
        micro_recipe(tmp_path, hub={"repo": word})


def test_the_page_has_the_recipe_without_addresses_and_places(tmp_path: Path) -> None:
    recipe = micro_recipe(
        tmp_path,
        model={"path": "/data/secret-place/model-4b"},
        engine={"urls": ["http://10.0.0.7:8000"], "max_context": 512},
        hub={"repo": REPO},
        env={"id": "sao/StyleShift-v0", "kwargs": {"judge": {"api_key": "sk-1", "model": "m"}, "hosts": ["tcp://h"]}},
    )
    page = model_card(recipe, 5, [{"step": 0, "evaluation/success": 0.5}, {"step": 5, "rollout/reward": 0.25}])
    for private in ("secret-place", "10.0.0.7", "sk-1", "tcp://", str(tmp_path)):
        assert private not in page
    assert yaml.safe_load(page.split("```yaml")[1].split("```")[0]) == shareable(recipe)
    assert shareable(recipe)["model"]["path"] == "model-4b"
    assert shareable(recipe)["runtime"]["max_tokens_per_turn"] == 16
    assert "| held-out success | 0.5 | 0.5 |" in page
    assert "| reward of the batch | 0.25 |" in page
    assert yaml.safe_load(page.split("---")[1])["library_name"] == "transformers"
