"""A table of tensor names: a module or parameter of xscale -> that of the other library, with a transform if need be.

A row holds for the parameters that the model has. `{i}` in a name is the block's number and `{e}` that of an expert,
for tensors that are stacked in xscale. A row of a module holds for its weight and its bias. A row of several names has
them separated by spaces.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from xscale.convert.hf.architecture import ModelSizes
from xscale.convert.mapping import (
    GATE_UP_EXPERTS,
    IDENTITY,
    UNSTACKED,
    Transform,
    WeightMapping,
    concatenated,
    zeros,
)
from xscale.nn.model.model import MODELS

BLOCK = re.compile(r"\bblocks\.(\d+)\.")
SUFFIXES = ("", ".weight", ".bias")


@dataclass(frozen=True)
class RowContext:
    """The row of a transform: its tensors and their block."""

    shapes: Sequence[torch.Size]
    """Those of xscale's tensors of the row."""
    block: Any
    """Config of the block; None outside of blocks."""
    config: Any
    """Config of the model."""
    sizes: ModelSizes


Transforms = Transform | Callable[[RowContext], Transform]


@dataclass(frozen=True)
class Moved:
    """Names of the other library, separated by spaces, and the transform to these tensors."""

    names: str | Callable[[RowContext], str]
    """A function where the names depend on the model."""
    transform: Transforms = IDENTITY


@dataclass(frozen=True)
class Absent:
    """A tensor without a counterpart in xscale: an export writes zeros, and an import checks for them."""

    shape: Callable[[RowContext], Sequence[int] | None]
    """Its shape in that block; None: the model has the counterpart, or no such part."""


Rows = dict[str, str | Moved]
Tensors = Mapping[str, str | Moved]
"""Names of xscale -> those of the other library."""


def with_rows(tensors: Tensors, changes: Tensors) -> Rows:
    """Return a table with the rows of another, which take the place of those with one of their names."""
    changed = {name for names in changes for name in names.split()}
    kept = {names: row for names, row in tensors.items() if changed.isdisjoint(names.split())}
    return {**kept, **changes}


def rows_concatenated(row: RowContext) -> Transform:
    """Return the transform to one tensor with the rows of all."""
    return concatenated(*(shape[0] for shape in row.shapes))


def blocks(xscale_prefix: str, hf_prefix: str, rows: Tensors) -> Rows:
    """Return the rows of a block with these prefixes before all names."""
    return {
        _prefixed(xscale_prefix, names): Moved(_prefixed(hf_prefix, row.names), row.transform)
        if isinstance(row, Moved)
        else _prefixed(hf_prefix, row)
        for names, row in rows.items()
    }


def _prefixed(prefix: str, names: Any) -> Any:
    if callable(names):
        return lambda row: _prefixed(prefix, names(row))
    return " ".join(f"{prefix}.{name}" for name in names.split())


def weight_mappings(
    tensors: Tensors, absent: Mapping[str, Absent], config: Any, sizes: ModelSizes
) -> list[WeightMapping]:
    """Map every parameter of the model by its row.

    Raises KeyError for a parameter without a row.
    """
    with torch.device("meta"):
        model: nn.Module = MODELS.build(config, sizes.vocabulary, sizes.length)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    by_first = {names.split()[0]: names.split() for names in tensors}
    following = {name for names in by_first.values() for name in names[1:]}
    mappings = []
    for name in shapes:
        number = match[1] if (match := BLOCK.search(name)) else ""
        pattern = BLOCK.sub("blocks.{i}.", name)
        suffix = next(
            (
                suffix
                for suffix in SUFFIXES
                if pattern.endswith(suffix)
                and pattern.removesuffix(suffix) in by_first.keys() | following
            ),
            None,
        )
        if suffix is None:
            raise KeyError(name)
        stem = pattern.removesuffix(suffix)
        if stem not in by_first:
            continue
        names = [f"{member}{suffix}".replace("{i}", number) for member in by_first[stem]]
        block = _block(config, name, number)
        context = RowContext([shapes[member] for member in names], block, config, sizes)
        row = tensors[" ".join(by_first[stem])]
        mappings.append(_mapping(names, row, suffix, number, context))
    return [*mappings, *_absent_mappings(absent, config, sizes)]


def _block(config: Any, name: str, number: str) -> Any:
    """Return the config of the block that a parameter is in; None: it is in none."""
    stack = getattr(config, name.partition(".")[0], None)
    return None if stack is None else stack.block_config(int(number or 0))


def _mapping(
    names: Sequence[str], row: str | Moved, suffix: str, number: str, context: RowContext
) -> WeightMapping:
    row = Moved(row) if isinstance(row, str) else row
    transform = row.transform
    hf_names = row.names if isinstance(row.names, str) else row.names(context)
    external = [f"{name}{suffix}".replace("{i}", number) for name in hf_names.split()]
    if "{e}" in hf_names:
        experts = range(context.shapes[0][0])
        external = [name.replace("{e}", str(expert)) for name in external for expert in experts]
        if transform is IDENTITY:
            transform = UNSTACKED if len(names) == 1 else GATE_UP_EXPERTS
    if not isinstance(transform, Transform):
        transform = transform(context)
    return WeightMapping(tuple(names), tuple(external), transform)


def _absent_mappings(
    absent: Mapping[str, Absent], config: Any, sizes: ModelSizes
) -> list[WeightMapping]:
    mappings = []
    for name, tensor in absent.items():
        depth = config.stack.depth if "{i}" in name else 1
        for layer in range(depth):
            shape = tensor.shape(RowContext((), config.stack.block_config(layer), config, sizes))
            if shape is not None:
                external = (name.replace("{i}", str(layer)),)
                mappings.append(WeightMapping((), external, zeros(*shape)))
    return mappings
