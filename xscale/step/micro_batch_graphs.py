"""Forward and backward of a micro-batch as one CUDA graph: a replay launches all of their kernels at once.

The graph is captured at the first micro-batch of its shape, after warm-ups, and reads each further one from the same
memory, into which it is copied. Gradients are added to tensors that stay where they are.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from xscale.core.errors import ConfigError
from xscale.nn.forward import Stats
from xscale.nn.tokens import SharedValues, Tokens
from xscale.objective.objective import Batch
from xscale.parallel.cuda_graph import KEY, CudaGraph

MOST_GRAPHS = 4
"""Kinds of micro-batches that have a graph: with more of them, something changes at every step."""
PER_MICRO_BATCH = frozenset(("rng_seed", "progress", "stats"))
"""Fields of a forward that change with each micro-batch: nothing that is captured may read them."""


@dataclass
class CapturedMicroBatch:
    """A graph, the batch that it reads, and the gradients that it adds to."""

    graph: CudaGraph
    batch: Batch
    gradients: list[tuple[nn.Parameter, Tensor]]


class MicroBatchGraphs:
    """The graphs of a model's micro-batches, one of each shape."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Batch], Tensor],
        backward: Callable[[Tensor], None],
    ) -> None:
        """`loss` is that of the objective, `backward` that of the engine."""
        self.model, self.loss, self.backward = model, loss, backward
        self.captured: dict[tuple[object, ...], CapturedMicroBatch] = {}

    def compute(self, batch: Batch, divisor: float) -> Tensor:
        """Add the gradients of the loss of `batch`, divided by `divisor`; return the loss, valid until the next one."""
        key = (divisor, *_constants(batch))
        if key not in self.captured:
            self.captured[key] = self._capture(batch, divisor)
        captured = self.captured[key]
        for kept, new in zip(_tensors(captured.batch), _tensors(batch), strict=True):
            kept.copy_(new, non_blocking=True)
        fresh = [
            (parameter, kept)
            for parameter, kept in captured.gradients
            if parameter.grad is not kept
        ]
        for parameter, kept in fresh:
            # The optimizer has dropped the gradient, or another graph of the same step has added to its own.
            if parameter.grad is None:
                kept.zero_()
            else:
                kept.copy_(parameter.grad)
            parameter.grad = kept
        loss = captured.graph.replay()
        assert isinstance(loss, Tensor)
        return loss

    def _capture(self, batch: Batch, divisor: float) -> CapturedMicroBatch:
        if len(self.captured) == MOST_GRAPHS:
            what = (
                f"a micro-batch has another shape, number of targets or loss scale than {MOST_GRAPHS} before it, and "
                "each would be captured anew"
            )
            raise ConfigError(KEY, what, "Leave it out, or use samples without padding.")
        if batch.tokens.forward.states is not None:
            what = "a teacher's states of each micro-batch are compared on the way"
            raise ConfigError(KEY, what, "Leave it out, or train without distillation.")
        static = _on_its_own(batch)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        before = [parameter.grad for parameter in trained]
        for parameter in trained:
            parameter.grad = None
        stats = Stats()
        self._warm_up(static, batch, divisor, stats)
        if stats.means():
            names = ", ".join(sorted(stats.means())[:2])
            what = f"parts of the model collect statistics of each micro-batch ({names}), which a graph cannot"
            raise ConfigError(KEY, what, "Leave it out.")
        gradients = [
            (parameter, parameter.grad) for parameter in trained if parameter.grad is not None
        ]
        without = static.tokens.with_forward(rng_seed=None, progress=None, stats=None)
        captured = replace(static, tokens=without)
        graph = CudaGraph(lambda: self._run(captured, divisor))
        for parameter, gradient in zip(trained, before, strict=True):
            parameter.grad = gradient
        return CapturedMicroBatch(graph, captured, gradients)

    def _warm_up(self, static: Batch, batch: Batch, divisor: float, stats: Stats) -> None:
        """Compute it as without a graph: a part that draws random numbers refuses (`NoDraws`), since it gets a seed."""
        seed = batch.tokens.forward.rng_seed
        tokens = static.tokens.with_forward(rng_seed=0 if seed is None else seed, stats=stats)
        self._run(replace(static, tokens=tokens), divisor)

    def _run(self, batch: Batch, divisor: float) -> Tensor:
        # Values that blocks share are computed in the graph.
        tokens = replace(batch.tokens, shared_values=SharedValues())
        loss = self.loss(self.model, replace(batch, tokens=tokens))
        self.backward(loss / divisor)
        return loss.detach()


def _tensors(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch that its forward reads."""
    tensors = [batch.targets]

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    for tokens in (batch.tokens, batch.source):
        if tokens is not None:
            tokens.map_tensors(collect)
    return tensors


def _on_its_own(batch: Batch) -> Batch:
    """Return a copy of a batch whose tensors nobody else has."""

    def copy(tokens: Tokens) -> Tokens:
        return tokens.map_tensors(torch.clone, shared_values=SharedValues())

    source = None if batch.source is None else copy(batch.source)
    return replace(batch, tokens=copy(batch.tokens), targets=batch.targets.clone(), source=source)


def _constants(batch: Batch) -> Iterator[object]:
    """Yield what a graph of the batch has for constants: the shapes, and the numbers of its forward."""
    for tensor in _tensors(batch):
        yield tensor.shape, tensor.dtype
    forward = batch.tokens.forward
    for attribute in fields(forward):
        if attribute.name not in PER_MICRO_BATCH and attribute.name != "signals":
            yield attribute.name, getattr(forward, attribute.name)
