"""Weights that are not finite are neither saved nor published: where that is looked for, and what is said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from learner.faults import LearnerFault


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor that holds a NaN or an infinity, None where all are finite; ints always are.

    Of a tensor that lies on several ranks only the part of this one is read, so nobody waits for another.
    """
    names, worst = list[str](), list[Tensor]()
    for name, tensor in tensors:
        part = tensor.detach()
        part = part.to_local() if hasattr(part, "to_local") else part
        if part.is_floating_point() and part.numel():
            names.append(name)
            # The sum of a NaN and of opposed infinities is NaN; the largest magnitude finds them without overflow.
            worst.append(torch.linalg.vector_norm(part, float("inf"), dtype=torch.float32))
    if not worst:
        return None
    wrong = ~torch.stack([value.to(worst[0].device) for value in worst]).isfinite()
    return names[int(wrong.nonzero()[0])] if bool(wrong.any()) else None


def require_finite(modules: Mapping[str, nn.Module], purpose: str) -> None:
    """Raise `LearnerFault` where a weight of one of `modules` (by name) is not finite; `purpose`: what it was for."""
    for owner, module in modules.items():
        if name := first_not_finite(module.named_parameters()):
            raise LearnerFault(
                f"{purpose}: the {owner}'s weights are not finite ({name}). Nothing of them is saved or published. Run "
                "the same command to go on from the last checkpoint; if it happens again, lower the "
                f"{owner}'s lr, or look at its eps and clip_norm"
            )
