"""Runs forwards and backwards of a step's micro-batches in this rank's stages; saves each forward for its backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from xscale.mesh.torch_private import post_backward
from xscale.parallel.pipeline.schedule import Action
from xscale.parallel.pipeline.stage import PipelineStage


@dataclass
class SavedForward:
    """One micro-batch's forward through one stage, saved for its backward."""

    inputs: list[Tensor]
    """Received tensors, as leaves."""
    outputs: list[Tensor]
    """Outputs, or the loss."""
    grad_outputs: list[Tensor | None] | None = None
    """Gradients of the outputs, for a split backward whose W starts at the outputs."""
    groups: list[dict[str, Any]] | None = None
    """State that torch's `stage_backward_input` leaves for `stage_backward_weight`."""


class MicrobatchRunner:
    """Forwards and backwards of one step on one rank."""

    def __init__(
        self,
        stages: dict[int, PipelineStage],
        loss: Callable[[nn.Module, Any], Any],
        weight: float,
        zero: int,
        batches: Sequence[Any],
        actions: list[Action],
    ) -> None:
        """`weight` divides every loss; `zero` is the ZeRO stage."""
        self.stages, self.loss, self.weight, self.zero, self.batches = (
            stages,
            loss,
            weight,
            zero,
            batches,
        )
        self.final = {action.stage: action for action in actions if action.kind in ("B", "W")}
        """Last backward of each stage."""
        self.saved: dict[tuple[int, int], SavedForward] = {}
        self.nats = torch.zeros((), dtype=torch.float64, device=batches[0].targets.device)

    def run(self, action: Action, received: list[Tensor]) -> Any:
        """Run one action; return outputs for the next stage, or gradients for the previous one."""
        stage = self.stages[action.stage]
        if action.kind == "F":
            return self._forward(stage, action.micro, received)
        if action.kind == "W":
            return self._backward_weights(stage, action)
        saved = self.saved[stage.index, action.micro]
        _set_backward_mode(
            stage.model, self.zero, last=action == self.final[stage.index], split=action.kind == "I"
        )
        return self._backward(stage, action, saved, received)

    def _forward(self, stage: PipelineStage, micro: int, received: list[Tensor]) -> Any:
        inputs = [hidden.requires_grad_() for hidden in received]
        stage.feed(inputs)
        output = self.loss(stage.model, self.batches[micro])
        stage.clear()
        if stage.last:
            self.nats += output.detach()
            outputs = [output / self.weight]
        else:
            outputs = list(output) if isinstance(output, tuple) else [output]
        self.saved[stage.index, micro] = SavedForward(inputs, outputs)
        return None if stage.last else output

    def _backward(
        self, stage: PipelineStage, action: Action, saved: SavedForward, received: list[Tensor]
    ) -> list[Tensor]:
        gradients: list[Tensor | None] = list(received) or [None]
        roots, grad_outputs = [], []
        for output, gradient in zip(saved.outputs, gradients, strict=True):
            passed_through = next((leaf for leaf in saved.inputs if leaf is output), None)
            if passed_through is None and output.requires_grad:
                roots.append(output)
                grad_outputs.append(gradient)
            elif passed_through is not None:
                # The gradient of a tensor that the stage only passes through.
                passed_through.grad = gradient
        saved.outputs, saved.grad_outputs = roots, grad_outputs
        if action.kind == "B":
            # The first stage has none if all of its parameters are frozen.
            if roots:
                torch.autograd.backward(roots, grad_outputs)
            del self.saved[stage.index, action.micro]
        elif not stage.first:
            self._backward_inputs(stage, saved)
        # The first stage has no inputs: its whole backward is W.
        input_gradients = []
        for leaf in saved.inputs:
            input_gradients.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            # W may reach the leaf again, and must not add to the tensor that is being sent.
            leaf.grad = None
        return input_gradients

    def _backward_inputs(self, stage: PipelineStage, saved: SavedForward) -> None:
        """Run I, the first part of a split backward."""
        # Torch detaches the outputs in place, which views refuse.
        roots = [root.clone() for root in saved.outputs]
        grad_outputs = saved.grad_outputs or [None] * len(roots)
        gradients = [
            torch.ones_like(root) if gradient is None else gradient
            for root, gradient in zip(roots, grad_outputs, strict=True)
        ]
        # Imported where used: it loads the compiler, which a check of a config can do without.
        from xscale.mesh.torch_private import node_outlives_graph, stage_backward_input

        _, groups = stage_backward_input(roots, gradients, saved.inputs, stage.model.parameters())
        # A weight that is used in several places, such as a tied table, makes torch's groups overlap, which it
        # refuses: W then starts at the outputs, as it does with versions of torch that lose nodes of a released graph.
        if node_outlives_graph() and all(len(group["intermediates"]) == 1 for group in groups):
            saved.groups, saved.outputs = groups, []

    def _backward_weights(self, stage: PipelineStage, action: Action) -> None:
        """Run W, the second part of a split backward."""
        saved = self.saved.pop((stage.index, action.micro))
        last = action == self.final[stage.index]
        if saved.groups is None:
            _set_backward_mode(stage.model, self.zero, last=last, split=True)
            weights = [weight for weight in stage.model.parameters() if weight.requires_grad]
            torch.autograd.backward(saved.outputs, saved.grad_outputs, inputs=weights)
        else:
            from xscale.mesh.torch_private import stage_backward_weight

            stage_backward_weight(stage.model.parameters(), saved.groups)
        if last or self.zero >= 2:
            _reduce_gradients(stage.model, last=last)


def _set_backward_mode(model: nn.Module, zero: int, *, last: bool, split: bool) -> None:
    """Set up FSDP before a backward: parameters stay gathered and gradients unreduced until the last micro-batch.

    A split backward has no gradients of weights in its first part, so FSDP reduces nothing by itself.
    """
    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(last and not split)
    model.set_requires_gradient_sync((last or zero >= 2) and not split)
    model.set_reshard_after_backward((last or zero == 3) and not split)


def _reduce_gradients(model: nn.Module, *, last: bool) -> None:
    """Reduce the gradients that split backwards have accumulated on the parameters."""
    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(last)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(last)
    post_backward(model)
