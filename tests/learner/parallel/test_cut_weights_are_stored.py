"""Weights that are cut over ranks: stored by all of them, read in any other layout, published whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cut_worker import KINDS, cut_learner, layouts_of, write_model
from run_tools import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from learner.config import ModelConfig
from learner.model.critic import load_critic
from learner.model.layers import whole_layers
from learner.run.checkpoint import checkpoints
from learner.run.learner import Learner

TWO = ("fsdp", "fsdp x experts", "tensor", "whole")
FOUR = ("fsdp x tensor", "fsdp 4 x experts", "replicate x fsdp")
WORKER = str(Path(__file__).parents[1] / "cut_worker.py")


def begun(folder: Path) -> None:
    """Of each kind a model, and the checkpoint of one process after one step."""
    for kind in KINDS:
        write_model(folder / kind / "model", kind)
        own = cut_learner(folder / kind / "model", folder, "whole")
        own.nudge()
        torch.save(own.full(), folder / kind / "one.pt")
        own.save(folder / kind / "one")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left: one process -> fsdp -> fsdp x experts -> tensor -> whole, for each kind of model."""
    folder = tmp_path_factory.mktemp("two")
    begun(folder)
    run_ranks(2, [WORKER, str(folder), *TWO], within_s=280)
    return folder


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """The same names, and no difference in any number."""
    assert left.keys() == right.keys()
    assert not [name for name in left if not torch.equal(left[name], right[name])]


def found(folder: Path, kind: str, layout: str) -> dict[str, Any]:
    return dict(torch.load(folder / kind / layout / "found.pt"))


def check_chain(folder: Path, kind: str, layouts: tuple[str, ...]) -> None:
    """Each layout has what the one before wrote, to the last bit, and one process has what each wrote."""
    before = torch.load(folder / kind / "one.pt")
    for step, layout in enumerate(layouts_of(kind, layouts), start=2):
        seen = found(folder, kind, layout)
        equal(seen["read"], before)
        assert any(not torch.equal(seen["read"][name], seen["written"][name]) for name in before)
        own = cut_learner(folder / kind / "model", folder, "whole")
        own.resume(Path(seen["saved"]))
        equal(own.full(), seen["written"])
        assert own.policy.updates == own.progress.step == step
        assert bool(seen["cut"]) == (layout != "whole")
        before = seen["written"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_read_in_any_other_layout_with_no_difference(two: Path, kind: str) -> None:
    """Weights and moments of policy and critic, written while the ranks made sums and a step."""
    check_chain(two, kind, TWO)
    assert all(found(two, kind, layout)["sums"] == 100 for layout in layouts_of(kind, TWO))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_ranks_in_two_dimensions_read_and_write_the_same(tmp_path: Path) -> None:
    begun(tmp_path)
    run_ranks(4, [WORKER, str(tmp_path), *FOUR], within_s=800)
    for kind in KINDS:
        check_chain(tmp_path, kind, FOUR)
        for layout in layouts_of(kind, FOUR):
            check_export(tmp_path, kind, layout)


def check_export(folder: Path, kind: str, layout: str) -> None:
    place, seen = folder / kind / layout, found(folder, kind, layout)
    own = cut_learner(folder / kind / "model", folder, "whole")
    own.resume(Path(seen["saved"]))
    own.nudge()  # the step that was made while the checkpoint was written
    equal(own.full(), seen["exported"])
    wanted = dict(whole_layers(own.policy.unwrapped.model, dtype=torch.bfloat16))
    streamed = dict(seen["streamed"])
    assert len(streamed) == len(seen["streamed"])
    assert {tensor.dtype for tensor in streamed.values()} == {torch.bfloat16}
    equal(streamed, wanted)
    equal(load_file(place / "export" / "model.safetensors"), wanted)
    equal(load_file(place / "trained" / "model.safetensors"), dict(whole_layers(own.policy.unwrapped.model)))
    reads_back(own, place)


def reads_back(own: Learner, place: Path) -> None:
    """`from_pretrained` makes the same models of it."""
    loaded, report = AutoModelForCausalLM.from_pretrained(place / "trained", output_loading_info=True)
    assert not any(report.values())
    equal(dict(loaded.state_dict()), dict(own.policy.unwrapped.model.state_dict()))
    served = AutoModelForCausalLM.from_pretrained(place / "export")
    assert (served.dtype, served.config.architectures) == (torch.bfloat16, loaded.config.architectures)
    assert type(served).__name__ == served.config.architectures[0]
    assert AutoTokenizer.from_pretrained(place / "export").chat_template
    assert own.critic is not None
    critic = load_critic(place / "trained", place / "critic", ModelConfig(path=place))
    equal(dict(critic.state_dict()), dict(own.critic.unwrapped.state_dict()))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "layout"), [(kind, layout) for kind in KINDS for layout in layouts_of(kind, TWO)])
def test_what_is_published_is_what_one_process_would_publish(two: Path, kind: str, layout: str) -> None:
    """Streamed and in files, in the engine's dtype, tied and untied, read by two engines of which one goes away."""
    check_export(two, kind, layout)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_wrong_on_another_rank_is_said_by_the_main_one_and_costs_nothing(two: Path, kind: str) -> None:
    """A full disk and a NaN, both on the last rank alone: nobody waits for ever, and the good checkpoint stays."""
    seen = found(two, kind, "fsdp")
    assert "cannot write the checkpoint" in seen["disk"]
    assert "File too large (rank 1)" in seen["disk"]
    assert "is not finite after step 3" in seen["nan"]
    assert "neither published nor exported" in seen["nan export"]
    assert all("\n" not in seen[name] for name in ("disk", "nan", "nan export"))
    assert [path.name for path in checkpoints(two / kind / "fsdp")] == ["step_00002"]
    assert not [name for name in seen["left"] if name.startswith(".writing") or name == "spoiled"]


def test_a_large_model_is_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as one dict of all weights: a file is closed as soon as it is large enough."""
    write_model(tmp_path / "model", "moe untied")
    own = cut_learner(tmp_path / "model", tmp_path, "whole")
    monkeypatch.setattr("learner.model.layers.FILE_BYTES", 4096)
    own.export(tmp_path / "v1")
    files = sorted((tmp_path / "v1").glob("*.safetensors"))
    assert len(files) > 4
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
        assert len(names) == 1 or file.stat().st_size < 4096 + 4096
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "v1")
    wanted = {name: tensor.bfloat16() for name, tensor in own.policy.unwrapped.model.state_dict().items()}
    equal(dict(loaded.state_dict()), wanted)
