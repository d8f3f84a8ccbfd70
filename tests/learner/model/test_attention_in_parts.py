"""What can be cut into parts and what is refused; where the parts, the heads and the ranks of a group lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_tools import write_micro_model
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssModel

from learner.config import ModelConfig, RecipeError
from learner.model.attention import _ShareOfHeads, attend_in_parts, implementation_of
from learner.model.loading import load_body
from learner.parallel.context import Parts, following, preceding
from learner.parallel.layout import Layout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_micro_model(tmp_path_factory.mktemp("model") / "dense", experts=0, heads=6, kv_heads=2)


def changed(folder: Path, **changes: Any) -> Any:
    """The model's body with a changed configuration."""
    body = load_body(folder, ModelConfig(path=folder))
    for name, value in changes.items():
        setattr(body.config, name, value)
    return body


def test_heads_that_the_parts_do_not_divide_are_refused_with_what_would_do(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"hardware\.context: 4 parts do not divide .* 6 .* one of 1, 2, 3, 6$"):
        attend_in_parts(changed(folder), Parts(4))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of linear_attention"),
        ({"layer_types": ["conv", "mamba"]}, "layers of conv, mamba"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "positions .dynamic. depend"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "positions .longrope. depend"),
    ],
)
def test_a_model_whose_tokens_depend_on_more_than_attention_is_refused(
    folder: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(RecipeError, match=rf"^hardware\.context: 2 parts.*{said}.*hardware\.context=1"):
        attend_in_parts(changed(folder, **changes), Parts(2))


def test_attention_with_a_number_for_each_head_is_refused() -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = GptOssConfig(**small, head_dim=8, num_local_experts=2, intermediate_size=16, vocab_size=32)
    with pytest.raises(RecipeError, match=r"hardware\.context: .*GptOssModel does more"):
        attend_in_parts(GptOssModel(config), Parts(2))


def test_an_implementation_without_masks_of_its_own_is_refused_by_its_key(folder: Path) -> None:
    body = load_body(folder, ModelConfig(path=folder))
    body.config._attn_implementation = "paged|eager"
    with pytest.raises(RecipeError, match=r"^model\.attention_implementation: 'paged|eager'"):
        attend_in_parts(body, Parts(2))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_model_keeps_its_implementation_and_its_saved_configuration(
    folder: Path, tmp_path: Path, implementation: str
) -> None:
    body = load_body(folder, ModelConfig(path=folder, attention_implementation=implementation))
    ids = torch.arange(7)[None]
    whole = body(input_ids=ids, use_cache=False).last_hidden_state
    parts = Parts(2)
    for _ in range(2):  # a second time changes nothing
        attend_in_parts(body, parts)
        assert implementation_of(body) == implementation
    with parts.together():
        assert torch.equal(body(input_ids=ids, use_cache=False).last_hidden_state, whole)
    body.save_pretrained(tmp_path)
    assert "learner_parts" not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["num_attention_heads"] == 6


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8])
def test_the_parts_of_a_row_are_its_stretches_padded_behind(size: int, tokens: int) -> None:
    whole = torch.arange(1, 2 * tokens + 1).view(2, tokens)
    cuts = [Parts(size, place).inputs(whole) for place in range(size)]
    assert len({cut["input_ids"].shape for cut in cuts}) == 1
    joined = torch.cat([cut["input_ids"] for cut in cuts], 1)
    assert torch.equal(joined[:, :tokens], whole)
    assert not joined[:, tokens:].any()
    if size > 1:
        assert torch.cat([cut["position_ids"] for cut in cuts], 1).tolist() == [list(range(joined.shape[1]))]


def test_what_follows_and_what_precedes() -> None:
    row = torch.tensor([[3, 4, 5]])
    assert following(row).tolist() == [[4, 5, 0]]
    assert preceding(row).tolist() == [[0, 3, 4]]
    assert following(row > 3).tolist() == [[True, True, False]]


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 6))
def test_every_part_has_the_key_value_heads_of_its_query_heads(size: int, key_value_heads: int, groups: int) -> None:
    heads, parts = key_value_heads * groups, Parts(size)
    if heads % size:
        with pytest.raises(ValueError, match=f"{heads} attention heads cannot be cut into {size} parts"):
            parts.heads_repeated(heads, key_value_heads)
        return
    repeats = parts.heads_repeated(heads, key_value_heads)
    held = torch.arange(key_value_heads).repeat_interleave(repeats).chunk(size)
    share = heads // size
    for place, own in enumerate(held):
        seen = own.repeat_interleave(share // len(own))  # as attention does it, for query heads in order
        wanted = torch.arange(place * share, (place + 1) * share) // groups
        assert torch.equal(seen, wanted)


@given(*(st.integers(1, 4) for _ in range(4)))
def test_ranks_of_a_group_hold_the_same_rows_and_every_part_once(
    replicate: int, fsdp: int, tensor: int, context: int
) -> None:
    layout = Layout(replicate=replicate, fsdp=fsdp, tensor=tensor, context=context)
    groups = layout.context_groups
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    for group in groups:
        assert [layout.part(rank) for rank in group] == list(range(context))
        assert len({layout.data_rank(rank) for rank in group}) == 1


def test_a_share_of_heads_is_the_module_in_all_else() -> None:
    class Attention(nn.Module):
        num_key_value_groups, is_causal, config = 4, True, type("Config", (), {"_attn_implementation_internal": "x"})()

    share: Any = _ShareOfHeads(Attention(), "sdpa", 2)
    assert (share.num_key_value_groups, share.is_causal, share.config._attn_implementation_internal) == (
        2,
        True,
        "sdpa",
    )
    assert Attention.config._attn_implementation_internal == "x"
    assert isinstance(share.training, bool)


def test_nothing_is_cut_within_together() -> None:
    parts, row = Parts(2, 1), torch.arange(5)[None]
    with parts.together():
        assert list(parts.inputs(row)) == ["input_ids"]
        kept: Tensor = parts.gather(parts.cut(row), 5)
        assert torch.equal(kept, row)
    assert parts.cut(row).tolist() == [[3, 4, 0]]
