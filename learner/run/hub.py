"""A run's model on a Hugging Face hub, pushed by a thread beside the training.

    idle ──offer──▶ staged (links to the files of a snapshot) ──▶ pushing ──▶ said: pushed, or why not

Nothing that goes wrong here ends a run. The token is the environment's and is written nowhere.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi

from learner.config import Recipe, RecipeError
from learner.run.model_card import CURVES, model_card
from learner.run.plots import draw_curves, read_metrics

TOKEN = "HF_TOKEN"
"""The variable that holds the token."""

_STAGE = ".hub"


class Hub:
    """Pushes model folders of one run, one at a time, with a page about them; `say` gets a line about each.

    hub = Hub.of(recipe, display.log)      # None: the recipe names no repository
    hub.offer(folder, step)                # returns at once
    hub.finish(final, step)                # waits
    """

    def __init__(self, recipe: Recipe, token: str, say: Callable[[str], None]) -> None:
        assert recipe.hub is not None
        self._recipe, self._config, self._token, self._say = recipe, recipe.hub, token, say
        self._api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, recipe: Recipe, say: Callable[[str], None]) -> Hub | None:
        """The recipe's, None where it has none. Raises `RecipeError` where the environment has no token."""
        if recipe.hub is None:
            return None
        token = os.environ.get(TOKEN, "").strip()
        if not token:
            raise RecipeError(
                f"hub.repo: {recipe.hub.repo} wants a token that may write there, in the variable {TOKEN} (it is "
                "never read from the recipe); set it, or leave the section hub out"
            )
        return cls(recipe, token, say)

    def is_due(self, step: int) -> bool:
        """Whether the weights after `step` are to be offered."""
        return self._config.every > 0 and step % self._config.every == 0

    @property
    def is_busy(self) -> bool:
        """Whether a push is under way."""
        return self._thread is not None and self._thread.is_alive()

    def offer(self, folder: Path, step: int) -> bool:
        """Begin to push the model in `folder`, which may be removed meanwhile. False where one before is under way:
        then it is left out, and that is said."""
        if self.is_busy:
            self._say(f"hub: the model of step {step} is left out, a push is still under way")
            return False
        try:
            stage = self._stage(folder)
        except OSError as error:
            self._warn(step, error)
            return False
        self._thread = threading.Thread(target=self._push, args=(stage, step), name="hub", daemon=True)
        self._thread.start()
        return True

    def wait(self) -> None:
        """Until no push is under way."""
        if self._thread is not None:
            self._thread.join()

    def finish(self, folder: Path, step: int) -> None:
        """Push the last model, after the one under way, and wait until it is there, or is said not to be."""
        self.wait()
        self._say(f"hub: pushing the trained model to {self._config.repo}")
        if self.offer(folder, step):
            self.wait()

    def _stage(self, folder: Path) -> Path:
        stage = self._recipe.run_dir / _STAGE
        shutil.rmtree(stage, ignore_errors=True)
        shutil.copytree(folder, stage, copy_function=_link)
        return stage

    def _push(self, stage: Path, step: int) -> None:
        try:
            metrics = self._recipe.run_dir / "metrics.jsonl"
            draw_curves(metrics, stage / CURVES, self._recipe.name)
            page = model_card(self._recipe, step, read_metrics(metrics))
            (stage / "README.md").write_text(page, encoding="utf-8")
            self._api.create_repo(self._config.repo, private=self._config.private, exist_ok=True)
            done = self._api.upload_folder(
                repo_id=self._config.repo, folder_path=stage, commit_message=f"{self._recipe.name}, step {step}"
            )
            self._say(f"hub: the model of step {step} is at {done.commit_url}")
        except Exception as error:  # whatever it is: the run goes on
            self._warn(step, error)
        finally:
            shutil.rmtree(stage, ignore_errors=True)

    def _warn(self, step: int, error: Exception) -> None:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].replace(self._token, "***")
        self._say(f"warning: hub: the model of step {step} could not be pushed to {self._config.repo}: {reason}")


def _link(source: str, target: str) -> None:
    """The same file under another name, a copy where the disk knows no second one."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
