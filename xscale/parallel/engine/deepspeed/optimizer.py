"""The optimizer that DeepSpeed steps: one of ours for each flat partition, with the clipping of any other engine."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class PartitionOptimizer(Protocol):
    """An optimizer of one flat tensor."""

    def scaled_step(self, gradients: list[Tensor], lr: float, scale: float) -> None: ...

    def states(self) -> Mapping[str, Sequence[Tensor | None]]: ...

    def counters(self) -> dict[str, int]: ...

    def set_counters(self, counters: dict[str, int]) -> None: ...


def flat_states(optimizer: PartitionOptimizer) -> dict[str, Tensor]:
    """Return each state of the optimizer's one flat tensor."""
    return {
        name: value
        for name, values in optimizer.states().items()
        for value in values
        if value is not None
    }


Build = Callable[[Tensor, bool], PartitionOptimizer]
"""Makes the optimizer of a flat tensor; the flag says whether its elements have weight decay."""


class FlatOptimizer(torch.optim.Optimizer):
    """Updates each flat tensor that DeepSpeed puts into `param_groups`, which DeepSpeed replaces during a step."""

    def __init__(
        self, groups: list[dict[str, Any]], build: Build, clip_grad_norm: float | None, scale: float
    ) -> None:
        """Each group has a flag `decays`. DeepSpeed divides gradients, and so their norm, by `scale`."""
        super().__init__(groups, {"lr": 0.0})
        self.build, self.clip_grad_norm, self.scale = build, clip_grad_norm, scale
        self.optimizers: dict[int, PartitionOptimizer] = {}
        self.pending_counters: dict[str, int] = {}
        self.grad_norm: float | None = 0.0
        """Norm of the step's summed gradients; None where the step is discarded."""

    def optimizer_of(self, flat: Tensor, decays: bool) -> PartitionOptimizer:
        """The optimizer of a flat tensor, made on the first call; DeepSpeed finds its states in `self.state`."""
        if id(flat) not in self.optimizers:
            optimizer = self.optimizers[id(flat)] = self.build(flat, decays)
            self.state[flat] = flat_states(optimizer)
            if self.pending_counters:
                optimizer.set_counters(self.pending_counters)
        return self.optimizers[id(flat)]

    def prepare(self, lr: float, grad_norm: float) -> None:
        """Set what the coming calls of `step` use."""
        self.grad_norm = grad_norm
        for group in self.param_groups:
            group["lr"] = lr

    def prepare_discard(self) -> None:
        """Make the coming calls of `step` leave the parameters as they are."""
        self.grad_norm = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm, limit = self.grad_norm, self.clip_grad_norm
        if norm is None:
            return
        factor = self.scale * (limit / norm if limit is not None and norm > limit else 1.0)
        for group in self.param_groups:
            for flat in group["params"]:
                gradient = flat.grad
                self.optimizer_of(flat, group["decays"]).scaled_step(
                    [gradient], group["lr"], factor
                )
                # DeepSpeed keeps the buffer when it has offloaded it.
                flat.grad = gradient

    def counters(self) -> dict[str, int]:
        return (
            next(iter(self.optimizers.values())).counters()
            if self.optimizers
            else self.pending_counters
        )

    def set_counters(self, counters: dict[str, int]) -> None:
        self.pending_counters = counters
        for optimizer in self.optimizers.values():
            optimizer.set_counters(counters)
