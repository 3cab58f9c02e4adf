"""The seam between the training step and the owner of parameters, gradients and optimizer states."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from xscale.mesh.flat_shard import FlatShard
from xscale.parallel.ema import ExponentialMovingAverage


class Engine(Protocol):
    """Owns the sharded parameters, gradients and optimizer states of a run; every method is collective.

    One step: `begin_micro_batch`, forward and `backward` for each micro-batch (gradient accumulation), then
    `reduce_gradients`, then either `apply` or `discard`.
    """

    @property
    def model(self) -> nn.Module:
        """The model to call."""
        ...

    @property
    def ema(self) -> ExponentialMovingAverage | None:
        """The moving average of the weights, which is saved with them; None: there is none."""
        ...

    def begin_micro_batch(self, *, last: bool) -> None:
        """Prepare for a micro-batch; `last`: it is the step's last, so its backward may reduce gradients."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of a loss that is already divided by the targets of the whole step."""
        ...

    def reduce_gradients(
        self, nats: Tensor, loss_scale: float = 1.0, scalars: Sequence[float] = ()
    ) -> tuple[float, float, list[float]]:
        """Reduce the step's loss and gradients over all ranks: (summed loss in nats, gradient norm before clipping,
        sums of the `scalars` over all ranks). The host waits for the device here, and once.

        The gradients are those of the loss times `loss_scale`; the norm, and the update by `apply`, are of the loss.

        `nats`, a scalar of float64, is the part of the loss that this rank found, counted once among the ranks that
        repeat it. The norm is not finite where a gradient is not.
        """
        ...

    def group_norms(self) -> Mapping[str, float]:
        """Return the gradient norm before clipping of each group of parameters that is clipped by itself, of the last
        `reduce_gradients`, by its key in the config; empty where all are clipped together."""
        ...

    def set_progress(self, progress: float) -> None:
        """Tell the optimizer which fraction of the run's steps is done, by which parameter groups may freeze."""
        ...

    def apply(self, lr: float, grad_norm: float) -> None:
        """Clip the gradients, whose norm is `grad_norm`, update the parameters with them, and clear them.

        Groups with limits of their own are clipped by their own norms.
        """
        ...

    def discard(self) -> None:
        """Clear the gradients and leave the parameters as they are."""
        ...

    def state_tensors(self) -> Mapping[str, Tensor | FlatShard]:
        """Parameters and optimizer states by their single-device names, as a checkpoint stores and fills them."""
        ...

    def after_load(self) -> None:
        """Publish what was written into `state_tensors` to the model and the optimizer."""
        ...

    def begin(self) -> None:
        """Begin a run with the weights as they are: averages of them start as copies."""
        ...

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Let the model compute, in the body, with the weights that are evaluated and saved."""
        ...

    def counters(self) -> dict[str, int]:
        """Optimizer state that belongs to no parameter."""
        ...

    def set_counters(self, counters: dict[str, int]) -> None:
        """Restore what `counters` returned."""
        ...
