"""LoRA on the policy: which of its matrices get low-rank adapters, and how engines are given them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from learner.config.section import Section


class AdapterConfig(Section):
    """The policy is its base model and a LoRA adapter, and only the adapter is trained (docs/learner.md).

    `rank` and `alpha`: what is added to a matrix W is alpha / rank x B A, where A and B have `rank` rows and columns.
    `targets`: the linear layers that get one: those of attention ("attention"), all of the decoder's ("linear"), or
    the names they end on. `experts`: those of a mixture get one each too. `publish`: engines get the adapter beside the
    base model that they hold, or, "merged", whole weights as without one.
    """

    rank: int = Field(default=16, ge=1, le=512)
    alpha: float = Field(default=32.0, gt=0)
    targets: Literal["attention", "linear"] | tuple[str, ...] = "linear"
    experts: bool = False
    publish: Literal["adapter", "merged"] = "adapter"

    @model_validator(mode="after")
    def _something_is_adapted(self) -> AdapterConfig:
        if not self.targets and not self.experts:
            raise ValueError("targets names no layer and experts is false: nothing would be trained")
        if self.experts and self.publish == "adapter":
            raise ValueError(
                "experts: engines are not given adapters of experts; write publish: merged, or experts: false"
            )
        return self


def check_adapter(recipe: Any) -> None:
    """Raise `ValueError`, naming the key, where a recipe asks for what does not go with its `model.policy_adapter`."""
    adapter, hardware = recipe.model.policy_adapter, recipe.hardware
    if adapter is None:
        return
    cut = {name: getattr(hardware, name) for name in ("fsdp", "ep", "tp", "context") if getattr(hardware, name) > 1}
    if cut:
        name, size = next(iter(cut.items()))
        raise ValueError(
            f"hardware.{name} {size}: the base model of model.policy_adapter is whole on every process; set {name} to "
            "1 (hardware.replicate gives more processes), or leave the adapter out"
        )
    if recipe.learner.freeze_router:
        raise ValueError("learner.freeze_router: with model.policy_adapter no router is trained; write false")
    if adapter.publish == "merged":
        return
    if recipe.engine.transfer != "snapshot":
        raise ValueError(
            f"engine.transfer {recipe.engine.transfer!r} streams whole weights: write model.policy_adapter.publish: "
            "merged, or engine.transfer: snapshot"
        )
