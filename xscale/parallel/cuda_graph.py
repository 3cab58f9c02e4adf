"""A call whose kernels are captured once and replayed as a CUDA graph: one launch in place of one for each kernel.

By `torch.cuda.graph` and not by the mode reduce-overhead of torch.compile. Its graph trees leave out a graph whose
inputs are written to, as a KV cache and gradients are, copy inputs that do not stay where they are, and take over the
memory of earlier outputs; and they are of compiled code alone. Here the caller says what stays in place, an eager call
is captured too, and a call that cannot be captured raises an error where torch.compile would go on without a graph.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from xscale.core.errors import ConfigError, Problem
from xscale.core.requirements import take
from xscale.nn.axes import Axis
from xscale.nn.module import Module, seams_of, substitute
from xscale.nn.random import RandomNumbers
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens
from xscale.parallel.config import ParallelConfig

KEY = "parallel.cuda_graphs"

WARMUPS = 3
"""Calls before the capture, in which libraries make their handles and everything is compiled."""


class CudaGraph:
    """The replay of a call: it reads and writes the same memory each time, and its result is always the same object."""

    def __init__(self, call: Callable[[], object], warmups: int = WARMUPS) -> None:
        """Capture `call`, which runs `warmups` times before; its effects must be the same after several runs."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warmups):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = call()

    def replay(self) -> object:
        """Run the captured kernels; return the result of the captured call, which they have written anew."""
        self.graph.replay()
        return self.result


class NoDraws(RandomNumbers):
    """Random numbers of a module whose forward is captured: none, because the host seeds them for each micro-batch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def _refuse(self) -> ConfigError:
        what = (
            f"{self.path} draws random numbers, which are seeded by the host for each micro-batch"
        )
        return ConfigError(KEY, what, "Leave it out, or set dropout and noise to 0.")

    def draw(self, *arguments: Any, **named: Any) -> Tensor:
        raise self._refuse()

    def integer(self, high: int, device: torch.device | str = "cpu") -> Tensor:
        raise self._refuse()

    def dropout(
        self, x: Tensor, p: float, dims: tuple[Axis, ...], tokens: Tokens | None = None
    ) -> Tensor:
        if p:
            raise self._refuse()
        return x

    def dropout_add(
        self, x: Tensor, residual: Tensor, p: float, *arguments: Any, **named: Any
    ) -> Tensor:
        if p:
            raise self._refuse()
        return super().dropout_add(x, residual, p, *arguments, **named)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, p: float, **masks: Any) -> Tensor:
        if p:
            raise self._refuse()
        return super().attention(q, k, v, p, **masks)


def check(parallel: ParallelConfig, path: str, ranks: int = 1) -> list[Problem]:
    """List what of the layout cannot be captured in a graph of a micro-batch."""
    if not parallel.cuda_graphs:
        return []
    refused: list[tuple[bool, str, Any, str]] = [
        (
            parallel.zero.engine != "torch",
            "zero.engine",
            "torch",
            "DeepSpeed moves gradients between micro-batches",
        ),
        (
            parallel.recompute.every != 0,
            "recompute.every",
            0,
            "recomputation sets the state of random generators from the host",
        ),
        (
            parallel.recompute.offload,
            "recompute.offload",
            False,
            "offload waits for copies on the host",
        ),
    ]
    problems = [
        Problem(f"{path}.cuda_graphs", what, choices=take(False) + take(value, key=f"{path}.{key}"))
        for is_set, key, value, what in refused
        if is_set
    ]
    if ranks > 1:
        what = f"the collectives of {ranks} ranks are not captured"
        fix = "Or train on one process."
        problems.append(Problem(f"{path}.cuda_graphs", what, fix, choices=take(False)))
    return problems


def check_model(model: nn.Module, parallel: ParallelConfig, path: str) -> list[Problem]:
    """List the parts of the model of which no graph can be captured."""
    if not parallel.cuda_graphs:
        return []
    reasons = dict.fromkeys(why for module in model.modules() for why in _why_not(module))
    return [Problem(f"{path}.cuda_graphs", why, choices=take(False)) for why in reasons]


def _why_not(module: nn.Module) -> Iterator[str]:
    """Yield why a forward and backward of the module cannot be captured."""
    if Role.DISPATCH in seams_of(module).values():
        yield "the dispatch of tokens to experts has statistics of each micro-batch, which the host collects"
    if isinstance(module, Module) and module.reads_progress:
        yield f"{type(module).__name__} reads the fraction of the steps that are done, which a graph has for a constant"
    if isinstance(module, Module) and bool(getattr(module, "dropout", False)):
        yield "dropout draws random numbers that the host seeds for each micro-batch"


def apply(model: nn.Module) -> None:
    """Make the parts of the model refuse to draw random numbers, in place."""
    for module in model.modules():
        if isinstance(module, Module):
            substitute(module, "random", NoDraws(module.path or type(module).__name__))


def require_cuda(device: torch.device) -> None:
    """Refuse graphs on another device: ConfigError."""
    if device.type != "cuda":
        what = f"CUDA graphs need a CUDA device, and this run is on {device.type}"
        raise ConfigError(KEY, what, "Leave it out, or take parallel.compile=true alone.")
