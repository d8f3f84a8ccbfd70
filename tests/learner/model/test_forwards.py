"""The learner's two forwards: log-probs at the rollout's temperature in chunks, values one number a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_tools import build_learner, micro_recipe, random_episodes
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GPT2Config

from learner.config import ModelConfig
from learner.data.batch import build_batch
from learner.model.critic import new_critic
from learner.model.forward import CriticForward, PolicyForward, _SelectedLogprobs, selected_logprobs
from learner.model.loading import load_body, load_policy_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return micro_recipe(tmp_path_factory.mktemp("recipe")).model


class Fixed(nn.Module):
    """A model whose every position has logits [2, 0]."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 2, bias=False)
        self.head.weight.data = torch.tensor([[2.0], [0.0]])

    @property
    def base_model(self) -> Any:
        return lambda input_ids, use_cache: type("Out", (), {"last_hidden_state": torch.ones(*input_ids.shape, 1)})

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_logprobs_are_those_of_the_rollouts_temperature() -> None:
    """Case A19: logits [2,0] at T=.5; an untempered learner has ratios .896929 and 6.627462, a tempered one 1."""
    ids, mask = torch.tensor([[0, 0, 1]]), torch.tensor([[False, True, True]])
    sampled = torch.log_softmax(torch.tensor([2.0, 0.0]) / 0.5, dim=-1)
    tempered = PolicyForward(Fixed(), temperature=0.5)(ids, mask)[0][0, 1:]
    assert (tempered - sampled).exp().tolist() == pytest.approx([1.0, 1.0], abs=1e-6)
    untempered = PolicyForward(Fixed())(ids, mask)[0][0, 1:]
    assert (untempered - sampled).exp().tolist() == pytest.approx([0.896929, 6.627462], abs=1e-5)


def test_the_learner_takes_its_temperature_from_the_recipe(micro_model: Path, tmp_path: Path) -> None:
    """Case A19."""
    learner = build_learner(micro_model, tmp_path, runtime={"sampling": {"temperature": 0.7}})
    assert learner.policy.unwrapped.temperature == 0.7


def test_logprobs_are_the_models_own_and_zero_off_the_mask(micro_model: Path, config: ModelConfig) -> None:
    model = load_policy_model(micro_model, config)
    batch = build_batch(random_episodes(5))
    found, entropy = PolicyForward(model)(batch.input_ids, batch.action_mask)
    table = torch.log_softmax(model(batch.input_ids).logits.float(), -1)
    wanted = torch.zeros_like(found)
    wanted[:, 1:] = table[:, :-1].gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(found, torch.where(batch.action_mask, wanted, 0.0), atol=1e-5, rtol=0)
    spread = -(table.exp() * table).sum(-1)
    torch.testing.assert_close(entropy[:, 1:][batch.action_mask[:, 1:]], spread[:, :-1][batch.action_mask[:, 1:]])
    assert not entropy.requires_grad


@pytest.mark.parametrize("chunk", [1, 3, 10_000])
def test_chunks_change_neither_logprobs_nor_gradients(micro_model: Path, config: ModelConfig, chunk: int) -> None:
    batch = build_batch(random_episodes(6, seed=3))
    weights = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(0))

    def run(size: int) -> tuple[Tensor, dict[str, Tensor]]:
        forward = PolicyForward(load_policy_model(micro_model, config), chunk=size)
        logprobs, _ = forward(batch.input_ids, batch.action_mask)
        (logprobs * weights).sum().backward()
        return logprobs.detach(), {n: p.grad for n, p in forward.named_parameters() if p.grad is not None}

    whole, gradients = run(100_000)
    parts, found = run(chunk)
    torch.testing.assert_close(parts, whole)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@given(
    rows=st.integers(1, 6),
    vocabulary=st.sampled_from([2, 7, 300, 600_000]),
    temperature=st.sampled_from([1.0, 0.7, 2.0]),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=40)
def test_one_copy_of_the_logits_gives_what_autograd_makes_of_the_formula(
    rows: int, vocabulary: int, temperature: float, seed: int
) -> None:
    """Case P7. 600,000 words are more than are worked on at once."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 2, generator=generator).requires_grad_()
    head = nn.Linear(2, vocabulary)
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    weights = torch.randn(rows, generator=generator)

    def gradients(logprobs: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad((logprobs * weights).sum(), [hidden, head.weight, head.bias]))

    found, entropy = selected_logprobs(hidden, head, targets, temperature)
    table = torch.log_softmax(head(hidden) / temperature, dim=-1)
    wanted = table.gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(entropy, -(table.exp() * table).sum(-1).detach(), atol=1e-4, rtol=1e-4)
    for mine, own in zip(gradients(found), gradients(wanted), strict=True):
        torch.testing.assert_close(mine, own, atol=1e-6, rtol=1e-5)


def test_one_tensor_of_logits_is_kept_and_no_second_one_is_made() -> None:
    """Case P7: it was about five copies."""
    logits = torch.randn(64, 100_000, requires_grad=True)
    targets = torch.arange(64)
    tracked: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and not any(
                out.data_ptr() == a.data_ptr() for a in args if isinstance(a, Tensor)
            ):
                tracked.append(out.numel())
            return out

    with Sizes():
        logprobs, _ = _SelectedLogprobs.apply(logits * 1.0, targets, 0.5, True)
        logprobs.sum().backward()
    assert sorted(tracked)[-1] == logits.numel()
    # The product above, and the gradient that goes back through it; slices stay below the workspace.
    assert [n for n in tracked if n > 2**19].count(logits.numel()) <= 2


def test_a_second_backward_pass_is_refused_and_never_wrong() -> None:
    head, hidden = nn.Linear(3, 5), torch.randn(4, 3, requires_grad=True)
    logprobs, _ = selected_logprobs(hidden, head, torch.zeros(4, dtype=torch.int64))
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_entropy_is_left_out_where_nobody_reads_it(micro_model: Path, config: ModelConfig) -> None:
    forward, batch = PolicyForward(load_policy_model(micro_model, config)), build_batch(random_episodes(3))
    logprobs, entropy = forward(batch.input_ids, batch.action_mask)
    without, nothing = forward(batch.input_ids, batch.action_mask, entropy=False)
    assert torch.equal(logprobs, without)
    assert entropy.any()
    assert not nothing.any()


class Wide(nn.Module):
    """Hidden states [1,T,4] under a head of 2,000 words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 2000, bias=False)

    @property
    def base_model(self) -> Any:
        return lambda input_ids, use_cache: type("Out", (), {"last_hidden_state": self.words(input_ids)})

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_what_the_backward_pass_keeps_is_bounded_by_the_chunk_not_by_the_length() -> None:
    """The logits of 1,024 tokens are 8 MB; in chunks of 64 none of them may be kept between the two passes."""
    vocabulary = 2000

    def kept(length: int, chunk: int) -> tuple[int, int]:
        largest = total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal largest, total
            largest, total = max(largest, tensor.numel()), total + tensor.numel()
            return tensor

        ids = torch.zeros(1, length, dtype=torch.int64)
        mask = torch.ones_like(ids, dtype=torch.bool)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward = PolicyForward(Wide(), chunk=chunk)
            logprobs, _ = forward(ids, mask)
        assert logprobs.requires_grad
        return largest, total

    short, long = kept(512, 64), kept(1024, 64)
    assert long[0] < 64 * vocabulary
    # What grows with length are hidden states (4 a token) and indices, never logits (2,000 a token).
    assert (long[1] - short[1]) / 512 < 100
    assert kept(1024, 4096)[0] >= 1024 * vocabulary - vocabulary  # the bound above can be missed


def test_the_critics_head_gives_one_float32_number_a_token(micro_model: Path, config: ModelConfig) -> None:
    """Case H3: never a vocabulary, and float32 even on a bfloat16 body."""
    narrow = config.model_copy(update={"dtype": "bfloat16"})
    critic = new_critic(load_body(micro_model, narrow))
    assert critic.head.weight.dtype == torch.float32
    assert critic.head.weight.shape == (1, 16)
    assert next(critic.body.parameters()).dtype == torch.bfloat16
    batch = build_batch(random_episodes(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values, after = critic(batch.input_ids)
    assert values.dtype == after.dtype == torch.float32
    assert values.shape == after.shape == batch.input_ids.shape


def test_a_value_is_of_the_state_before_its_token_and_starts_at_zero(micro_model: Path, config: ModelConfig) -> None:
    critic = new_critic(load_body(micro_model, config))
    batch = build_batch(random_episodes(3))
    assert not critic(batch.input_ids)[0].any()
    nn.init.normal_(critic.head.weight)
    values, after = critic(batch.input_ids)
    torch.testing.assert_close(values[:, 1:], after[:, :-1])
    assert not values[:, 0].any()
    changed = batch.input_ids.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 200
    moved = critic(changed)[0]
    torch.testing.assert_close(moved[:, :5], values[:, :5])  # a value has not seen the token it is of
    assert not torch.allclose(moved[:, 5], values[:, 5])


def test_dropout_is_off_in_every_forward_whatever_the_models_config_says(tmp_path: Path) -> None:
    """Case H4: a model that is configured with dropout gives the same log-probs and values every time."""
    shape = GPT2Config(
        vocab_size=300, n_embd=16, n_layer=2, n_head=2, n_positions=128, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "dropout")
    settings = {"critic_trainable": "all"}
    learner = build_learner(tmp_path / "dropout", tmp_path, model={"path": str(tmp_path / "dropout")}, learner=settings)
    assert learner.critic is not None
    for load in (load_policy_model, load_body):  # before any trainee has it: the parity gate reads such a model
        assert not load(tmp_path / "dropout", learner.recipe.model).training
    assert any(isinstance(m, nn.Dropout) and m.p == 0.5 for m in learner.policy.unwrapped.modules())
    batch = build_batch(random_episodes(4))
    nn.init.normal_(learner.critic.unwrapped.head.weight)
    with torch.no_grad():
        first, second = (learner.policy.module(batch.input_ids, batch.action_mask)[0] for _ in range(2))
        one, two = (learner.critic.module(batch.input_ids)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(one, two)
    learner.step(random_episodes(8))  # and a step must not switch it on
    assert not learner.policy.module.training
    assert not learner.critic.module.training


@pytest.mark.parametrize("tied", [True, False])
def test_an_empty_mask_stays_in_the_graph_with_gradient_zero(
    micro_model: Path, config: ModelConfig, tied: bool
) -> None:
    """Cases A4, N2: so that no rank skips a collective; a head of its own takes part too."""
    model = load_policy_model(micro_model, config)
    if not tied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    forward = PolicyForward(model)
    batch = build_batch(random_episodes(3))
    logprobs, _ = forward(batch.input_ids, torch.zeros_like(batch.action_mask))
    logprobs.sum().backward()
    gradients = [p.grad for p in forward.parameters()]
    assert len(gradients) > 10
    assert all(g is not None for g in gradients)
    assert all(not g.any() and g.isfinite().all() for g in gradients)


def test_the_critic_stands_on_the_policys_architecture(micro_model: Path, config: ModelConfig) -> None:
    policy, body = load_policy_model(micro_model, config), load_body(micro_model, config)
    own = {n.removeprefix("model."): p for n, p in policy.named_parameters()}
    for name, parameter in CriticForward(body, 16).body.named_parameters():
        assert torch.equal(parameter, own[name]), name
