"""Experts that an engine chose, replayed by the trainer: the wire, the choice, its gradients and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from learner_tools import build_learner, carrying, micro_recipe, random_episodes, snapshot
from torch import Tensor

from agent.episode import Episode, EpisodeError, Experts, decode, encode
from learner.config import ModelConfig, RecipeError
from learner.data.batch import Batch, build_batch
from learner.faults import LearnerFault
from learner.model.critic import freeze_router
from learner.model.forward import PolicyForward
from learner.model.loading import load_policy_model
from learner.model.routing import Routing

LAYERS, TOP_K, EXPERTS = 2, 2, 4  # of the micro model


def policy_of(model: Path, *, replay: bool = True, recompute: bool = False) -> PolicyForward:
    policy = PolicyForward(load_policy_model(model, ModelConfig(path=model, recompute_layers=recompute)))
    policy.routing = Routing(policy.model, replay=replay)
    return policy


def own_choice(policy: PolicyForward, ids: Tensor) -> Tensor:
    """What the routers of the model choose by themselves, [B,T,layers,k]."""
    found: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda *call: found.append(call[-1][2].view(*ids.shape, TOP_K)))
        for name, module in policy.model.named_modules()
        if name.endswith(".gate")
    ]
    with torch.no_grad():
        policy(ids, torch.zeros_like(ids, dtype=torch.bool))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=2)


def scored(policy: PolicyForward, batch: Batch, experts: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    policy.zero_grad()
    logprobs, _ = policy(batch.input_ids, batch.action_mask, experts)
    logprobs.sum().backward()
    return logprobs.detach(), {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
def test_replay_of_the_models_own_routing_is_bit_for_bit_the_same(micro_model: Path, recompute: bool) -> None:
    batch = build_batch(random_episodes(5))
    policy = policy_of(micro_model, recompute=recompute)
    own = own_choice(policy, batch.input_ids)
    plain, gradients = scored(policy, batch, None)
    replayed, again = scored(policy, batch, own)
    assert torch.equal(plain, replayed)
    assert gradients.keys() == again.keys()
    assert all(torch.equal(gradients[name], again[name]) for name in gradients)


@pytest.mark.parametrize("recompute", [False, True])
def test_replay_of_another_routing_changes_the_outputs_and_trains_the_router_and_the_experts_chosen(
    micro_model: Path, recompute: bool
) -> None:
    batch = build_batch(random_episodes(5))
    policy = policy_of(micro_model, recompute=recompute)
    plain, _ = scored(policy, batch, None)
    other = torch.tensor([0, 3]).expand(*batch.input_ids.shape, LAYERS, TOP_K)
    replayed, gradients = scored(policy, batch, other)
    assert not torch.allclose(plain, replayed, atol=1e-4)
    for layer in range(LAYERS):
        experts = gradients[f"model.model.layers.{layer}.mlp.experts.down_proj"].abs().amax((1, 2))
        assert (experts > 0).tolist() == [True, False, False, True]
        router = gradients[f"model.model.layers.{layer}.mlp.gate.weight"].abs().amax(1)
        assert (router[[0, 3]] > 0).all()


def test_a_token_of_which_nothing_is_known_goes_where_the_trainer_sends_it(micro_model: Path) -> None:
    batch = build_batch(random_episodes(5))
    policy = policy_of(micro_model)
    nothing = torch.full((*batch.input_ids.shape, LAYERS, TOP_K), -1)
    assert torch.equal(scored(policy, batch, None)[0], scored(policy, batch, nothing)[0])


def test_watching_changes_nothing(micro_model: Path) -> None:
    batch = build_batch(random_episodes(5))
    other = torch.zeros(*batch.input_ids.shape, LAYERS, TOP_K, dtype=torch.int64)
    watched = scored(policy_of(micro_model, replay=False), batch, other)[0]
    plain = PolicyForward(load_policy_model(micro_model, ModelConfig(path=micro_model)))
    assert torch.equal(watched, scored(plain, batch, None)[0])


@pytest.mark.parametrize("recompute", [False, True])
def test_agreement_counts_the_choices_in_common_and_once(micro_model: Path, recompute: bool) -> None:
    """One expert of two is another at exactly three action tokens, in the last layer."""
    batch = build_batch(random_episodes(5))
    policy = policy_of(micro_model, replay=False, recompute=recompute)
    recorded = own_choice(policy, batch.input_ids).clone()
    rows, columns = (index[:3] for index in torch.nonzero(batch.action_mask, as_tuple=True))
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        chosen = recorded[row, column, 1].tolist()
        recorded[row, column, 1, 0] = next(e for e in range(EXPERTS) if e not in chosen)
    recorded = recorded.flip(-1)  # their order is of no account
    unknown = torch.nonzero(batch.action_mask, as_tuple=True)
    recorded[unknown[0][-1], unknown[1][-1]] = -1
    assert policy.routing is not None
    scored(policy, batch, recorded)
    figures = policy.routing.counted(lambda counts: counts)
    tokens = batch.action_tokens
    assert figures["router/agreement"] == pytest.approx(1 - 3 / ((tokens - 1) * LAYERS * TOP_K), abs=1e-12)
    assert figures["router/recorded"] == pytest.approx((tokens - 1) / tokens, abs=1e-12)
    assert np.isnan(policy.routing.counted(lambda counts: counts)["router/agreement"])  # counted anew


def test_the_load_of_the_busiest_expert_is_1_where_all_are_even_and_their_number_over_k_at_most(
    micro_model: Path,
) -> None:
    batch = build_batch(random_episodes(5))
    policy = policy_of(micro_model)
    assert policy.routing is not None
    position = torch.zeros(batch.input_ids.shape, dtype=torch.int64)
    position[batch.action_mask] = torch.arange(batch.action_tokens) % 2 * 2
    even = (position[..., None, None] + torch.tensor([0, 1])).expand(-1, -1, LAYERS, -1)
    scored(policy, batch, even)
    half = batch.action_tokens / 2
    wanted = np.ceil(half) * EXPERTS / (2 * batch.action_tokens)
    assert policy.routing.counted(lambda counts: counts)["router/busiest"] == pytest.approx(wanted)
    scored(policy, batch, torch.zeros_like(even) + torch.tensor([0, 1]))
    assert policy.routing.counted(lambda counts: counts)["router/busiest"] == EXPERTS / TOP_K


def test_experts_cross_the_wire_and_older_records_are_read(micro_model: Path) -> None:
    plain = random_episodes(2)
    ids = torch.randint(0, EXPERTS, (2, 60, LAYERS, TOP_K))
    sent = carrying(plain, ids)
    batch = build_batch([decode(encode(e)) for e in sent], routing=True)
    assert batch.experts is not None
    for row, episode in enumerate(sent):
        start = 0
        for segment in episode.segments:
            stop = start + len(segment.token_ids)
            known = stop - (segment.kind == "action")
            assert torch.equal(batch.experts[row, start:known].long(), ids[row, start:known])
            assert (batch.experts[row, known:stop] == -1).all()
            start = stop
    assert b"experts" not in encode(plain[0])  # nothing carried, nothing more on the wire
    assert build_batch(sent).experts is None
    assert build_batch(plain, routing=True).experts is None


@pytest.mark.parametrize(("largest", "bits"), [(255, 8), (256, 16), (40_000, 16)])
def test_ids_are_packed_in_one_byte_where_that_is_enough(largest: int, bits: int) -> None:
    packed = Experts.pack(np.array([[[0, largest]]]))
    assert (packed.bits, len(packed.data)) == (bits, 2 * bits // 8)
    assert packed.array().tolist() == [[[0, largest]]]


@pytest.mark.parametrize(
    "experts",
    [
        Experts(2, 2, b"\0" * 400),
        Experts(2, 2, b"\0" * 5),
        Experts(0, 2, b""),
        Experts(2, -2, b"\0" * 8),
        Experts(1, 1, b"\0", 16),
    ],
)
def test_experts_that_do_not_fit_their_segment_are_no_episode(experts: Experts) -> None:
    episode = random_episodes(1)[0]
    first = msgspec.structs.replace(episode.segments[0], experts=experts)
    with pytest.raises(EpisodeError, match="segment 0: experts of"):
        decode(encode(msgspec.structs.replace(episode, segments=(first, *episode.segments[1:]))))


def step(model: Path, folder: Path, episodes: Sequence[Episode], **learner: Any) -> tuple[Any, dict[str, float]]:
    settings = {"batch_size": 8, "micro_batch_tokens": 40, **learner}
    own = build_learner(model, folder, learner=settings, engine={"launch": "vllm"})
    return own, own.step(episodes)[1].figures


def test_a_step_replays_what_its_episodes_carry(micro_model: Path, tmp_path: Path) -> None:
    plain = random_episodes(8)
    width = build_batch(plain).width
    own, _ = step(micro_model, tmp_path, plain)
    same = carrying(plain, own_choice(policy_of(micro_model), build_batch(plain).input_ids))
    other = carrying(plain, torch.tensor([0, 3]).expand(8, width, LAYERS, TOP_K))
    replayed, figures = step(micro_model, tmp_path, same, routing="replayed")
    for name, weight in snapshot(own.policy).items():
        torch.testing.assert_close(snapshot(replayed.policy)[name], weight, atol=1e-6, rtol=1e-6)
    assert figures["router/agreement"] == 1.0
    assert 0.5 < figures["router/recorded"] < 1.0
    changed, figures = step(micro_model, tmp_path, other, routing="replayed")
    assert figures["router/agreement"] < 1.0
    assert any(not torch.equal(w, snapshot(own.policy)[n]) for n, w in snapshot(changed.policy).items())
    _, figures = step(micro_model, tmp_path, plain, routing="watched")
    assert np.isnan(figures["router/agreement"])
    assert figures["router/busiest"] >= 1.0


@pytest.mark.parametrize(
    ("shape", "expert", "said"),
    [((2, 3), 1, "3 experts a token"), ((1, 2), 1, "in 1 layers"), ((2, 2), 4, "expert 4, the model has 4")],
)
def test_episodes_of_another_model_end_the_run_with_a_word(
    micro_model: Path, tmp_path: Path, shape: tuple[int, int], expert: int, said: str
) -> None:
    plain = random_episodes(8)
    foreign = carrying(plain, torch.full((8, build_batch(plain).width, *shape), expert))
    with pytest.raises(LearnerFault, match=f"learner.routing: episodes hold .*{said}"):
        step(micro_model, tmp_path, foreign, routing="replayed")


def test_replay_without_anything_to_replay_ends_the_run_with_a_word(micro_model: Path, tmp_path: Path) -> None:
    with pytest.raises(LearnerFault, match="no episode of this batch carries the experts"):
        step(micro_model, tmp_path, random_episodes(8), routing="replayed")


@pytest.mark.parametrize("sections", [{}, {"engine": {"launch": "vllm"}, "learner": {"online": True}}])
def test_replay_from_an_engine_that_returns_no_experts_is_refused_by_its_key(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    learner = {**sections.get("learner", {}), "routing": "replayed"}
    with pytest.raises(RecipeError, match=r"learner\.routing 'replayed' needs"):
        micro_recipe(tmp_path, **{**sections, "learner": learner})


def test_a_frozen_router_stays_as_it_is_and_all_else_moves(micro_model: Path, tmp_path: Path) -> None:
    own = build_learner(micro_model, tmp_path, learner={"batch_size": 8, "freeze_router": True})
    before = snapshot(own.policy)
    own.step(random_episodes(8))
    still = {name for name, weight in snapshot(own.policy).items() if torch.equal(weight, before[name])}
    assert still == {f"model.model.layers.{layer}.mlp.gate.weight" for layer in range(LAYERS)}


def test_a_dense_model_has_no_router_to_freeze_or_watch(dense_model: Path) -> None:
    model = load_policy_model(dense_model, ModelConfig(path=dense_model))
    with pytest.raises(RecipeError, match=r"learner\.freeze_router: .*no router"):
        freeze_router(model)
    with pytest.raises(RecipeError, match=r"learner\.routing: .*no router"):
        Routing(model, replay=True)
