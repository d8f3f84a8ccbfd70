"""How the processes of a learner share the work: which hold parts of the same weights, and which the same rows."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate import Accelerator

from learner.config import HardwareConfig, RecipeError


@dataclass(frozen=True)
class Layout:
    """Sizes whose product is the number of processes; `experts` lies across `fsdp` x `tensor` and is no factor.

    `replicate`: whole copies of the weights (DDP, or HSDP with `fsdp`). `fsdp`: parts that a copy is cut into.
    `tensor`: parts of each matrix. `context`: parts of each row's tokens. Ranks that share rows stand next to each
    other, and of them those that share tokens: rank = (data_rank x `context` + part) x `tensor` + place.
    """

    replicate: int = 1
    fsdp: int = 1
    tensor: int = 1
    context: int = 1
    experts: int = 1

    @classmethod
    def of(cls, hardware: HardwareConfig, world: int) -> Layout:
        """What the recipe's `hardware` says of `world` processes; without a word there, each is a whole copy (DDP).

        Raises `RecipeError` where the recipe is for another number of processes.
        """
        own = cls(hardware.replicate, hardware.fsdp, hardware.tp, hardware.context, hardware.ep)
        if own == cls():
            return cls(replicate=world)
        if own.world != world:
            raise RecipeError(
                f"hardware: {hardware.layout} is for {own.world} processes, and this was started in {world}; start it "
                f"with `accelerate launch --num_processes {own.world} -m learner.train RECIPE`, or change the keys"
            )
        return own

    @property
    def world(self) -> int:
        """How many processes there are."""
        return self.replicate * self.fsdp * self.tensor * self.context

    @property
    def data_ranks(self) -> int:
        """How many different shares a batch is dealt to."""
        return self.replicate * self.fsdp

    @property
    def sharers(self) -> int:
        """How many ranks hold the same rows, and so the same figures of them."""
        return self.tensor * self.context

    @property
    def averaged_over(self) -> int:
        """Over how many ranks the gradient of a parameter is a mean; each adds its rows' or its tokens' part."""
        return self.replicate * self.fsdp * self.context

    @property
    def cut(self) -> bool:
        """Whether a rank holds less than whole weights."""
        return self.fsdp > 1 or self.tensor > 1 or self.context > 1 or self.experts > 1

    def data_rank(self, rank: int) -> int:
        """Which of the `data_ranks` shares is that of process `rank`."""
        return rank // self.sharers

    def part(self, rank: int) -> int:
        """Which of the `context` parts of its rows' tokens process `rank` computes."""
        return rank // self.tensor % self.context

    @property
    def context_groups(self) -> list[list[int]]:
        """The ranks that hold the parts of the same rows, in the order of the parts; every rank is in one group."""
        starts = [first + place for first in range(0, self.world, self.sharers) for place in range(self.tensor)]
        return [list(range(start, start + self.sharers, self.tensor)) for start in starts]


class LaidOutAccelerator(Accelerator):
    """Accelerate's own, which also knows the layout of its processes."""

    layout: Layout


def layout_of(accelerator: Accelerator) -> Layout:
    """The layout of an accelerator's processes; of a plain one: each a whole copy."""
    if isinstance(accelerator, LaidOutAccelerator):
        return accelerator.layout
    return Layout(replicate=accelerator.num_processes)
