"""Base class of modules: declares parameters with named axes and an initialiser; `use` localises and casts them.

Seams are the points at which an engine may put something else in place of what a module does. Parallelism shards
parameters, guards regions with collectives, and substitutes at seams. A class lists its seams in `seams`, with the role
of each (`xscale.nn.roles`); each is a method, a submodule or an attribute of that name. Nothing else is replaced, and
`substitute` is the only way to do it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from xscale.core import config as schema
from xscale.core.errors import Problem
from xscale.core.requirements import KeyNeed
from xscale.nn.axes import AXES, Axis
from xscale.nn.init import Init
from xscale.nn.post_step import WeightWriter
from xscale.nn.random import RandomNumbers
from xscale.nn.roles import Role, Seams
from xscale.nn.segment_state import CarriedTensor


def seams_of(module: object) -> dict[str, Role]:
    """The seams that the class of `module` and its base classes declare, with their roles; those of a subclass win."""
    declared: dict[str, Role | None] = {}
    for owner in reversed(type(module).__mro__):
        seams = vars(owner).get("seams", {})
        assert isinstance(seams, Mapping), (
            f"{owner.__qualname__} gives its seams no roles (xscale.nn.roles): {seams}"
        )
        declared |= seams
    return {seam: role for seam, role in declared.items() if role is not None}


def substitute(module: object, seam: str, wrapper: Any) -> None:
    """Replace the attribute, method or submodule `seam` of `module` by `wrapper`, of the same protocol.

    A wrapper that calls what it replaces is given that first, and so composes with earlier substitutes:
    `substitute(moe, "dispatch", SplitRowsOverTp(moe.dispatch, group))`.
    """
    declared = seams_of(module)
    assert seam in declared, (
        f"{type(module).__qualname__} declares no seam '{seam}'; its seams: {', '.join(sorted(declared)) or 'none'}"
    )
    assert hasattr(module, seam), f"{type(module).__qualname__} has nothing at its seam '{seam}'"
    setattr(module, seam, wrapper)


CHOOSABLE_KERNELS = (
    "adamw", "bias_dropout_residual", "delta_rule", "gated_activation", "grouped_gemm", "layernorm", "linear_attention",
    "linear_cross_entropy", "packed_attention", "permute", "rmsnorm", "rope", "router", "squared_norm",
    "vocab_cross_entropy",
)  # fmt: skip
"""Operators whose implementation a recipe may choose."""


class Module(nn.Module):
    """A `torch.nn.Module` that names the axes of its parameters and the seams at which an engine may substitute."""

    seams: ClassVar[Seams] = {"param_hook": Role.PARAMETERS, "random": Role.DRAWS}
    """Attributes and methods that `xscale.nn.module.substitute` may replace, besides those of the base classes, each
    with what it is."""
    keeps_precision = False
    """Whether its parameters are used in master precision, whatever the compute precision is."""
    averages_tokens = False
    """Whether all tokens of a micro-batch compete or are averaged in it (expert capacity, auxiliary losses, running
    statistics), so that padding would count."""
    averages_text = False
    """Whether it leaves padding out where `Tokens.padding` tells it, if it `averages_tokens`."""
    averages_packed_text = False
    """Whether it also leaves out the padding behind packed documents, since it asks `Tokens.real`."""
    reads_token_counts = False
    """Whether its state follows from the counts of the token ids in the training data, which a run gives to
    `set_token_counts` before its first step."""
    reads_progress = False
    """Whether its forward reads `Forward.progress`, the fraction of the run's steps that are done."""
    beside_stages = False
    """Whether it stands beside embeddings, stacks and head of a model, on the pipeline stages that use it."""
    read_by_rows = False
    """Whether generation reads single rows of its matrices, which are then to be contiguous."""
    path: str
    """Full name in the model, such as `stack.blocks.3.ffn`: the same on every layout. Set by `name_modules`."""

    def __init__(self) -> None:
        super().__init__()
        self.path = ""
        self.axes: dict[str, tuple[Axis, ...]] = {}
        self.init: dict[str, Init] = {}
        self.decays: dict[str, bool] = {}
        self.linear_maps: set[str] = set()
        """Names of the parameters that are matrices of linear maps."""
        self.width_ratios: dict[str, float] = {}
        """Name of a parameter -> width over base width, by which muP scales its learning rate; empty without muP."""
        self.param_hook: Callable[[Tensor], Tensor] | None = None
        """From a stored parameter, which may be a DTensor in master dtype, to the local tensor in compute dtype; None:
        the identity."""
        self.random = RandomNumbers()
        """Draws the forward's random numbers; where its tensors are sharded, a substitute draws those of all ranks."""
        self.kernel_choices: Mapping[str, str] = {}
        """Operator -> the implementation that the recipe chooses; set by `choose_kernels`."""

    def declare(
        self,
        name: str,
        shape: tuple[int, ...],
        axes: tuple[Axis, ...],
        init: Init,
        *,
        decays: bool = True,
        linear_map: bool = False,
    ) -> None:
        """Register the parameter `name` without a value; `nn.init.materialize` or the engine initialises it by name.

        `decays`: whether weight decay applies. It does to matrices and tables, and not to gains, biases, temperatures
        and scales, whatever their shape. `linear_map`: the parameter is the matrix [outputs, inputs] of a linear map
        between hidden states, or a stack of them [experts, outputs, inputs]: what an optimizer of matrices updates.
        Embeddings, the head and routers are none.
        """
        assert len(shape) == len(axes), f"{name}: {len(shape)} dims, {len(axes)} axes"
        assert set(axes) <= set(AXES), f"{name}: unknown axis in {axes}"
        self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.axes[name] = axes
        self.init[name] = init
        self.decays[name] = decays
        if linear_map:
            self.linear_maps.add(name)

    def set_token_counts(self, counts: Sequence[float], weights: WeightWriter) -> None:
        """Set the state of a module that `reads_token_counts`, from the count of each id in the training data [V].

        `weights` writes the parameters that hold it.
        """
        raise NotImplementedError

    @property
    def gathered_channels(self) -> int:
        """Channels of a token, of all ranks, that are normalised at its seam with the role NORM_OVER_HEADS."""
        return 0

    @property
    def summed_channels(self) -> int:
        """Channels of a token, of all ranks, that are summed up at its seam with the role SUM_OVER_HEADS."""
        return 0

    @property
    def summed_parts(self) -> "list[Module]":
        """Submodules of a tensor-parallel region whose outputs are terms of its sum, so that each must be sharded."""
        return []

    def tp_problems(self, tp: int, path: str) -> list[Problem]:
        """List why tensor parallelism over `tp` ranks cannot shard it; `path` is that of the degree."""
        return []

    def sp_problems(self, path: str) -> list[Problem]:
        """List why it cannot work between regions on a shard of the sequence; `path` is that of `tensor.sequence`."""
        return []

    def needs(self) -> list[KeyNeed]:
        """List what the module needs of the layout and of the engine of a run, each with the reason."""
        return []

    def carries(self) -> Mapping[str, CarriedTensor]:
        """Return the tensors of each row that the module keeps from one segment of a stream to the next, by name
        (`xscale.nn.segment_state`); none: its output depends on the segment alone."""
        return {}

    def why_not_static(self) -> str | None:
        """Return why a step of generation with it has no static form, a clause about it; None: it has one.

        A static step has the same shapes, and reads and writes the same memory, whatever the number of tokens so far,
        and waits for no number on the host: it can be compiled once, and captured as a CUDA graph.
        """
        return None

    def use(self, parameter: Tensor) -> Tensor:
        """Local shard of `parameter` in compute dtype: what forward computes with."""
        return parameter if self.param_hook is None else self.param_hook(parameter)


class Part(Module):
    """A module that a config chooses; `check` refuses what it cannot do before anything is built."""

    class Config(schema.Config):
        pass

    @classmethod
    def example(cls) -> Any:
        """A config for the conformance suite, at whose sizes a few hundred tokens show what the part does."""
        return cls.Config()

    @classmethod
    def check(cls, config: Any, dims: Any, path: str) -> list[Problem]:
        """List the problems of `config` within a model of `dims`; `path` is the config's dotted path."""
        return []


def unmet_needs(model: nn.Module, settings: Any) -> Iterator[Problem]:
    """Yield the problems of the needs of the model's modules (`Module.needs`) with `settings`; each reason once.

    Needs of sections that `settings` do not have are left out.
    """
    reasons: set[tuple[str, str]] = set()
    for path, module in model.named_modules():
        for need in module.needs() if isinstance(module, Module) else ():
            if (need.key, need.why) not in reasons and hasattr(
                settings, need.key.partition(".")[0]
            ):
                reasons.add((need.key, need.why))
                yield from need.problems(settings, f"model.{path}")


def name_modules(model: nn.Module) -> None:
    """Set the `path` of every Module."""
    for path, module in model.named_modules():
        if isinstance(module, Module):
            module.path = path


def choose_kernels(model: nn.Module, kernels: Mapping[str, str]) -> None:
    """Set the `kernel_choices` of every Module: operator -> implementation."""
    for module in model.modules():
        if isinstance(module, Module):
            module.kernel_choices = kernels


def _modules(model: nn.Module) -> Iterator[tuple[str, Module]]:
    """Yield every Module with what stands before the names of its parameters."""
    for path, module in model.named_modules():
        if isinstance(module, Module):
            yield f"{path}." if path else "", module


def parameter_axes(model: nn.Module) -> dict[str, tuple[Axis, ...]]:
    """Full parameter name -> the names of its axes; a tied parameter once."""
    axes = {
        prefix + name: axes
        for prefix, module in _modules(model)
        for name, axes in module.axes.items()
    }
    return {name: axes[name] for name, _ in model.named_parameters()}


def parameter_decays(model: nn.Module) -> dict[str, bool]:
    """Full parameter name -> whether weight decay applies; a tied parameter once."""
    decays = {
        prefix + name: decays
        for prefix, module in _modules(model)
        for name, decays in module.decays.items()
    }
    return {name: decays[name] for name, _ in model.named_parameters()}


def parameter_width_ratios(model: nn.Module) -> dict[str, float]:
    """Full parameter name -> width over base width by which muP scales its learning rate; empty without muP."""
    return {
        prefix + name: ratio
        for prefix, module in _modules(model)
        for name, ratio in module.width_ratios.items()
    }


def carried_tensors(model: nn.Module) -> dict[str, CarriedTensor]:
    """Full name -> what the model's modules keep of each row between segments; empty: it has no such memory."""
    return {
        f"{module.path}.{name}": about
        for module in model.modules()
        if isinstance(module, Module)
        for name, about in module.carries().items()
    }


def linear_map_names(model: nn.Module) -> set[str]:
    """Full names of the parameters that are matrices of linear maps."""
    return {prefix + name for prefix, module in _modules(model) for name in module.linear_maps}


def parameter_inits(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Init]]:
    """Full name, parameter and initialiser; a tied parameter once."""
    inits = {
        f"{path}.{name}" if path else name: module.init[name]
        for path, module in model.named_modules()
        if isinstance(module, Module)
        for name in module.init
    }
    for name, parameter in model.named_parameters():
        yield name, parameter, inits[name]


def draws_dropout(model: nn.Module) -> bool:
    """Return whether a module of the model has a dropout above 0."""
    return any(bool(getattr(module, "dropout", False)) for module in model.modules())
