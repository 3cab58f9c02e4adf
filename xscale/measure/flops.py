"""Parameters and FLOPs of a model, counted from its modules: what MFU divides by."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from xscale.nn.attention.hamilton import COMPONENTS
from xscale.nn.blocks.block import Block
from xscale.nn.blocks.stack import Stack
from xscale.nn.depth.exits import Exit
from xscale.nn.depth.quaternion import QuaternionLinear
from xscale.nn.depth.sequence_pooling import SequencePooling
from xscale.nn.depth.sharing import SharedSublayers
from xscale.nn.ffn.ffn import active_fractions
from xscale.nn.head.head import Head
from xscale.nn.linear import Embedding
from xscale.nn.mixer.mixer import Mixer
from xscale.nn.model.embed import global_tokens_of
from xscale.nn.model.multi_token import MtpModule
from xscale.nn.module import parameter_axes


@dataclass(frozen=True)
class Size:
    """Counts of one model."""

    parameters: int
    active: int
    """Parameters that one token activates: experts and memory values count by the fraction that a token uses."""
    multiplied: int
    """Active parameters in matmuls: embedding tables that are only looked up, gains and biases do not count, and
    sublayers that blocks share count once for each of them."""


def size(model: nn.Module) -> Size:
    """Count the parameters of a model (global shapes), on any device, sharded or not."""
    counts = list(_counts(model))
    return Size(
        parameters=sum(count.total for count in counts),
        active=round(sum(count.active for count in counts)),
        multiplied=round(sum(count.active * count.uses for count in counts if count.multiplied)),
    )


def training_flops(model: nn.Module, targets: int, source: int = 0) -> float:
    """FLOPs of one sample's forward and backward: 6 for each multiplied parameter and token, 6 for each multiply-add
    of mixing tokens (2 forward, 4 backward). `targets` and `source` are the lengths of the two sequences.

    Recomputation is not counted: these are model FLOPs, as in MFU.
    """
    global_tokens = global_tokens_of(model)
    total = sum(
        6.0
        * count.active
        * count.uses
        * ((source if count.on_source else targets) + (global_tokens if count.in_block else 0))
        for count in _counts(model)
        if count.multiplied
    )
    shared, pooled = _repeated_sublayers(model), _pooled_blocks(model)
    for path, module in model.named_modules():
        if isinstance(module, Mixer):
            length = global_tokens + (source if _on_source(path) else targets)
            queries, keys = (round(length * fraction) for fraction in _fractions_of(path, pooled))
            if path.endswith("cross.part"):
                keys = round(source * pooled.get("memory", (1.0, 1.0))[0])
            total += 6.0 * _uses(path, shared) * module.multiply_adds(queries, keys)
    return total


@dataclass(frozen=True)
class _Count:
    total: int
    active: float
    multiplied: bool
    on_source: bool
    in_block: bool
    """Whether it is in a block, which global tokens pass too."""
    uses: float
    """How often a token is multiplied by it: by each block that shares it, by exits and modules of multi-token
    prediction that share the head; less where the sequence is shortened."""


def _counts(model: nn.Module) -> Iterator[_Count]:
    fractions = active_fractions(model)
    heads = {id(module.weight) for module in model.modules() if isinstance(module, Head)}
    tables = {
        id(module.weight) for module in model.modules() if isinstance(module, Embedding)
    } - heads
    axes = parameter_axes(model)
    shared = _repeated_sublayers(model)
    pooled = _pooled_blocks(model)
    quaternions = {
        id(module.weight) for module in model.modules() if isinstance(module, QuaternionLinear)
    }
    shared_exits = sum(
        isinstance(module, Exit) and module.head is None for module in model.modules()
    )
    shared_exits += sum(isinstance(module, MtpModule) for module in model.modules())
    for name, parameter in model.named_parameters():
        multiplied = id(parameter) not in tables and _is_matrix(name, axes[name])
        # A tied table counts as the head's weight, on the target sequence.
        yield _Count(
            parameter.numel(),
            parameter.numel() * fractions.get(name, 1.0),
            multiplied,
            _on_source(name) and id(parameter) not in heads,
            ".blocks." in name or name.startswith(tuple(shared)),
            # Each component of a quaternion weight enters four products.
            _uses(name, shared)
            * _fractions_of(name, pooled)[name.endswith(_OF_KEYS)]
            * (COMPONENTS if id(parameter) in quaternions else 1)
            + (shared_exits if id(parameter) in heads or name.startswith("head.") else 0),
        )


def _is_matrix(name: str, axes: tuple[str, ...]) -> bool:
    """Whether a token is multiplied by the parameter as a matrix; gains, biases and vectors act on each channel alone.

    What has an axis of tokens mixes them, and is counted with its mixer.
    """
    last = name.rpartition(".")[2]
    return (
        "tokens" not in axes and "bias" not in last and sum(axis != "experts" for axis in axes) > 1
    )


_OF_KEYS = tuple(f".mixer.part.{name}.{kind}" for name in "kv" for kind in ("weight", "bias"))
"""Ends of the names of parameters that multiply keys' tokens."""


def _pooled_blocks(model: nn.Module) -> dict[str, tuple[float, float]]:
    """Return the prefix of the paths in each block of a stack that shortens its sequence, or reads further tokens
    -> fractions of the tokens that are its queries and its keys; `memory`: of a source whose encoder shortens it."""
    fractions: dict[str, tuple[float, float]] = {}
    for path, stack in model.named_modules():
        if not isinstance(stack, Stack):
            continue
        of_blocks = stack.token_fractions()
        if set(of_blocks) != {(1.0, 1.0)}:
            fractions |= {f"{path}.blocks.{layer}.": pair for layer, pair in enumerate(of_blocks)}
        pooling = stack.find(SequencePooling)
        if pooling is not None:
            for layer in pooling.distilling:
                fractions[f"{path}.pooling.distilling.{layer}."] = of_blocks[int(layer) - 1]
            queries, keys = (
                sum(values) / len(of_blocks) for values in zip(*of_blocks, strict=True)
            )
            fractions[f"{path}.shared."] = queries, keys
            if not pooling.repeats:
                fractions["memory"] = of_blocks[-1]
    return fractions


def _fractions_of(path: str, pooled: dict[str, tuple[float, float]]) -> tuple[float, float]:
    return next((pair for prefix, pair in pooled.items() if path.startswith(prefix)), (1.0, 1.0))


def _repeated_sublayers(model: nn.Module) -> dict[str, int]:
    """Return the prefix of the paths of sublayers that a token passes several times -> how often: of those that all
    blocks of a stack share, and of the block of a mask decoder."""
    stacks = {path: module for path, module in model.named_modules() if isinstance(module, Stack)}
    uses = {
        f"{path}.shared.": len(stack.blocks)
        for path, stack in stacks.items()
        if stack.find(SharedSublayers)
    }
    for path, stack in stacks.items():
        for layer, block in stack.blocks.items():
            if isinstance(block, Block) and block.rounds > 1:
                uses[f"{path}.blocks.{layer}."] = block.rounds
    return uses


def _uses(path: str, shared: dict[str, int]) -> int:
    """Return how often a token passes the module or parameter at `path`."""
    return next((blocks for prefix, blocks in shared.items() if path.startswith(prefix)), 1)


def _on_source(path: str) -> bool:
    """Whether the module at `path` processes the source sequence."""
    return path.split(".")[0] in ("encoder", "source")
