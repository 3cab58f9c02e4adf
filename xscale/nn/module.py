"""The base of every module: parameters with named axes and a start, and the door through which they are used."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from xscale.core import config as schema
from xscale.core.errors import Problem
from xscale.nn.init import Init

Axis = Literal["vocab", "heads", "kv_heads", "ffn", "experts", "width", "depth", "tokens", "batch", "state"]
"""What a dimension of a parameter means. Closed: a plan maps each of these to an axis of the mesh, or to none."""
AXES: tuple[str, ...] = get_args(Axis)


NAMED = (
    "adamw", "bias_dropout_residual", "gated_activation", "grouped_gemm", "layernorm", "linear_attention",
    "linear_cross_entropy", "permute", "rmsnorm", "rope", "router", "squared_norm", "vocab_cross_entropy",
)  # fmt: skip
"""Operators whose implementation a recipe may name: those that a run calls with what it names."""


class Module(nn.Module):
    """A `torch.nn.Module` that says what its parameters' axes are called, and never what is cut."""

    keeps_precision = False
    """Whether its parameters are used as precise as they rest, whatever the compute precision is."""
    path: str
    """Full name in the model, such as `stack.blocks.3.ffn`: the same on every layout. Set by `name_modules`."""

    def __init__(self) -> None:
        super().__init__()
        self.path = ""
        self.axes: dict[str, tuple[Axis, ...]] = {}
        self.init: dict[str, Init] = {}
        self.door: Callable[[Tensor], Tensor] | None = None
        self.named: Mapping[str, str] = {}
        """Operator -> the implementation that the recipe names; set by `name_kernels`."""

    def declare(self, name: str, shape: tuple[int, ...], axes: tuple[Axis, ...], init: Init) -> None:
        """Register the parameter `name`, unfilled: `nn.init.materialize` or the engine fills it by its name."""
        assert len(shape) == len(axes), f"{name}: {len(shape)} dims, {len(axes)} axes"
        assert set(axes) <= set(AXES), f"{name}: unknown axis in {axes}"
        self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.axes[name] = axes
        self.init[name] = init

    def use(self, parameter: Tensor) -> Tensor:
        """The parameter as computation wants it: local, and in compute precision. At rest it may be neither."""
        return parameter if self.door is None else self.door(parameter)


class Part(Module):
    """A module that is chosen by a config; `check` refuses, before anything is built, what it cannot do."""

    class Config(schema.Config):
        pass

    @classmethod
    def example(cls) -> Any:
        """A config at whose sizes a few hundred tokens show what the part does: what the conformance suite builds."""
        return cls.Config()

    @classmethod
    def check(cls, config: Any, dims: Any, path: str) -> list[Problem]:
        """Every problem of `config` within a model of `dims`; `path` is the config's dotted path."""
        return []


def name_modules(model: nn.Module) -> None:
    """Tell every Module its full name."""
    for path, module in model.named_modules():
        if isinstance(module, Module):
            module.path = path


def name_kernels(model: nn.Module, kernels: Mapping[str, str]) -> None:
    """Tell every Module which implementations of operators the recipe names."""
    for module in model.modules():
        if isinstance(module, Module):
            module.named = kernels


def parameter_axes(model: nn.Module) -> dict[str, tuple[Axis, ...]]:
    """Full parameter name -> the names of its axes, each parameter once."""
    axes = {
        f"{path}.{name}" if path else name: module.axes[name]
        for path, module in model.named_modules()
        if isinstance(module, Module)
        for name in module.axes
    }
    return {name: axes[name] for name, _ in model.named_parameters()}


def parameter_inits(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Init]]:
    """Each parameter once, with its full name and how it starts."""
    inits = {
        f"{path}.{name}" if path else name: module.init[name]
        for path, module in model.named_modules()
        if isinstance(module, Module)
        for name in module.init
    }
    for name, parameter in model.named_parameters():
        yield name, parameter, inits[name]
