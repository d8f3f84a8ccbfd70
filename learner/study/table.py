"""The named studies: which table or figure of the paper each is, and what is run for it."""

from __future__ import annotations

from learner.study.arms import Arm, Study, preset

_LAG = ("store.forced_lag=4", "store.max_lag=6")
_MORE_LAG = ("store.forced_lag=16", "store.max_lag=18")
# As their sources define them: group advantages are scaled by their group or not at all, and so is the batch's mean.
_UNSCALED = "learner.advantage_scale=none"
_OPEN = ("learner.eps_low=1", "learner.eps_high=1e9")
_ALL_PROMPTS = ("learner.running_mean.window=128", "learner.running_mean.per_prompt=false")

_GRPO_DIS = preset("grpo_dis", _UNSCALED, label="GRPO + DIS, 16 x 8")
_GRPO = preset("grpo", _UNSCALED, label="GRPO, 16 x 8")
_SAO = preset("sao", label="SAO")
_VAPO = preset("vapo", label="VAPO without DIS")
_DYNAMICS = ("reward", "explained_variance", "critic_norm", "gated", "entropy", "ratio_kl")
_CRITIC = ("reward", "held_out", "explained_variance", "critic_norm")
_GROUPS = ("critic_attention", "critic_experts", "critic_mlp")


def _at_lag(lag: int) -> tuple[str, str]:
    return f"store.forced_lag={lag}", f"store.max_lag={lag + 2}"


STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        Study(
            "main",
            "tables 1 and 4, figure 3",
            (
                "AIME2025 / BeyondAIME: SAO 97.3 / 74.8, DIS only 94.2 / 71.5, GRPO with DIS 93.5 / 70.8, VAPO without "
                "DIS 91.3 / 69.0 (collapses near step 90), GRPO 84.2 / 54.8 (collapses near step 160), running mean "
                "79.8 / 55.3; the start has 80.4 / 53.3.",
                "SAO and GRPO with DIS go level until about step 400; then GRPO flattens.",
            ),
            "The order SAO > DIS only > GRPO with DIS > the others, and collapses of those without DIS.",
            (
                _SAO,
                preset("sao_dis_only", label="SAO, DIS only"),
                _GRPO_DIS,
                _GRPO,
                _VAPO,
                preset("sao_running_mean", *_ALL_PROMPTS, label="running mean of the last 128"),
                preset("rloo", _UNSCALED, label="RLOO, 16 x 8"),
                preset("flash_reinforce", _UNSCALED, label="FlashREINFORCE"),
            ),
            words=_LAG,
        ),
        Study(
            "long",
            "figure 3",
            ("1,000 steps of SAO without a collapse; GRPO collapses near step 160, VAPO without DIS near step 90.",),
            "SAO's reward does not fall over 1,000 updates; at the same forced lag methods without DIS fall.",
            (_SAO, _VAPO, _GRPO),
            updates=1000,
            plots=_DYNAMICS,
            words=_MORE_LAG,
        ),
        Study(
            "updates",
            "table 3, figure 4a",
            (
                "K = 2: 97.3 / 74.8, K = 1: 95.0 / 69.75; explained variance alike until step 350, then above .6 "
                "against .5.",
            ),
            "More critic updates give a higher explained variance late in a run, and a higher reward.",
            tuple(preset("sao", f"learner.critic_updates={k}", called=f"k{k}", label=f"K = {k}") for k in (1, 2, 4)),
            plots=_CRITIC,
            words=_LAG,
        ),
        Study(
            "attention",
            "table 3, figure 4b",
            (
                "Frozen attention 97.3 / 74.8, all parameters 90.62 on AIME2025; the critic's gradient norm is 1.5-2.5 "
                "against above 6 and jagged from step 200.",
            ),
            "A critic with frozen attention has the smaller and calmer gradient, and the policy the higher reward.",
            (
                preset("sao", "learner.critic_trainable=experts", called="frozen", label="attention frozen"),
                preset("sao", "learner.critic_trainable=all", called="full", label="all parameters"),
                preset("sao", "learner.critic_trainable=lora", called="lora", label="LoRA"),
            ),
            plots=(*_CRITIC, *_GROUPS),
            # A dense model, whose MLP stands where experts would: adapters are for matrices of their own.
            words=(*_LAG, "model.tiny.experts=0"),
        ),
        Study(
            "value_data",
            "value pretraining",
            ("A critic has to be pretrained at scale before RL; no figure is given.",),
            "More episodes of value pretraining give a higher explained variance and reward early in a run.",
            (
                Arm("none", ("learner.algorithm=sao", "value_pretraining=null"), "no value pretraining"),
                *(
                    preset("sao", f"value_pretraining.episodes={n}", called=f"episodes{n}", label=f"{n:,} episodes")
                    for n in (256, 1024, 4096)
                ),
            ),
            updates=100,
            words=_LAG,
        ),
        Study(
            "granularity",
            "table 5, figure 6",
            (
                "At step 400: token 89.8 / 66.8, step with the last value 87.3 / 62.8, step with the mean value 85.8 / "
                "60.5; token is ahead from step 150.",
            ),
            "Token > step, last value > step, mean value.",
            (
                preset("sao", label="token"),
                preset("sao_step_last", label="step, last value"),
                preset("sao_step_average", label="step, mean value"),
            ),
            words=_LAG,
        ),
        Study(
            "lag",
            "figure 4c and the reason for DIS",
            ("Without DIS asynchronous training collapses; at most .6 % of the tokens are gated.",),
            "With the gate reward hardly depends on the lag; without it it falls from some lag on.",
            tuple(
                preset("sao", *_at_lag(lag), *words, called=f"{kind}-lag{lag}", label=f"{text}, lag {lag}")
                for lag in (0, 4, 16, 64)
                for kind, text, words in (("dis", "DIS", ()), ("open", "no gate", _OPEN))
            ),
            plots=("reward", "gated", "lag", "ratio_kl"),
        ),
        Study(
            "gate",
            "section 2.2",
            (
                "The gate is .3 / 5 for mathematics and .8 / 3 for software; the listing divides by trusted tokens, "
                "the equation by all.",
            ),
            "Some width is best, and an open gate is worst; the denominator makes no difference at these shares.",
            (
                preset("sao", label=".3 / 5"),
                preset("sao", "learner.eps_low=0.1", "learner.eps_high=0.1", called="narrow", label=".1 / .1"),
                preset("sao", "learner.eps_low=0.8", "learner.eps_high=3", called="software", label=".8 / 3"),
                preset("sao", *_OPEN, called="open", label="no gate"),
                preset("sao", "learner.denominator=trusted", called="trusted", label=".3 / 5, over trusted tokens"),
            ),
            plots=("reward", "held_out", "gated", "ratio_kl"),
            words=_MORE_LAG,
        ),
        Study(
            "alpha",
            "section 4.3",
            ("lambda = 1 - 1 / (alpha l) with alpha 1.5; no other value is reported.",),
            "What the bias of a shorter lambda costs or saves with this critic.",
            tuple(
                preset("sao", f"learner.alpha={alpha}", called=f"alpha{alpha}", label=f"alpha {alpha}")
                for alpha in (0.05, 0.5, 1.5, 5, 1000)
            ),
            words=_LAG,
        ),
        Study(
            "order",
            "section 6.2: bias of completion order",
            ("Quick episodes are trained first; no figure is given.",),
            "Training in the order of the deal, or by latency classes, changes the reward of long chains, or nothing.",
            tuple(
                preset("sao", f"store.order={order}", called=order, label=f"order {order}")
                for order in ("completion", "window", "quota")
            ),
            plots=("reward", "held_out", "turns", "lag"),
            words=("store.max_lag=4",),
        ),
        Study(
            "online",
            "figure 5",
            ("After a change of the preferred style SAO recovers in fewer steps than a mean of the last 128 rewards.",),
            "Prediction, written before the runs: on short replies alpha 1000 equals the running mean, and alpha 1.5 "
            "is behind both, because it trusts a critic that still values the old style.",
            (
                *(
                    preset("sao", f"learner.alpha={alpha}", called=f"alpha{alpha}", label=f"SAO, alpha {alpha}")
                    for alpha in (1.5, 5, 1000)
                ),
                preset("sao_running_mean", label="running mean of the last 128"),
            ),
            updates=120,
            plots=("reward",),
            recipe="style_shift_tiny.yaml",
            runner="simulate",
        ),
        Study(
            "dynamics",
            "figure 4",
            (
                "Explained variance above .6 for K = 2 and .5 for K = 1 late; critic gradient norm 1.5-2.5 frozen, "
                "above 6 full; at most .6 % of tokens gated.",
            ),
            "The same three orders, by update.",
            (
                _SAO,
                preset("sao_k1", label="K = 1"),
                preset("sao_full_critic", label="full critic"),
                _VAPO,
            ),
            plots=(*_DYNAMICS, *_GROUPS),
            words=_LAG,
        ),
    )
}
"""Every study by its name."""


def get_study(name: str) -> Study:
    """The study of that name; `ValueError` with those there are."""
    if name not in STUDIES:
        raise ValueError(f"there is no study {name!r}; there are {', '.join(STUDIES)}")
    return STUDIES[name]
