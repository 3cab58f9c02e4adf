"""Mappings between the tensors of xscale and of another library: names as data, and the transforms between layouts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Tensors = list[Tensor]


@dataclass(frozen=True)
class Transform:
    """A pair of inverse functions on lists of tensors: `forward` exports xscale's tensors, `inverse` imports."""

    forward: Callable[[Tensors], Tensors]
    inverse: Callable[[Tensors], Tensors]


IDENTITY = Transform(lambda tensors: tensors, lambda tensors: tensors)
DUPLICATED = Transform(lambda tensors: tensors * 2, lambda tensors: tensors[:1])
"""A weight that the other library stores twice; the first copy is imported."""
TRANSPOSED = Transform(lambda tensors: [tensors[0].t()], lambda tensors: [tensors[0].t()])
"""A weight stored as [inputs, outputs] in the other library."""
TRANSPOSED_EXPERTS = Transform(lambda tensors: [tensors[0].mT], lambda tensors: [tensors[0].mT])
"""Weights of experts stored as [E, inputs, outputs] in the other library."""
CONCATENATED = Transform(
    lambda tensors: [torch.cat(tensors)], lambda tensors: list(tensors[0].chunk(3))
)
"""Three vectors of equal length, concatenated."""
CONCATENATED_TRANSPOSED = Transform(
    lambda tensors: [torch.cat(tensors).t()], lambda tensors: list(tensors[0].t().chunk(3))
)
"""Three weights of equal shape, concatenated to [inputs, 3 * outputs]."""
UNSTACKED = Transform(
    lambda tensors: list(tensors[0].unbind()), lambda tensors: [torch.stack(tensors)]
)
"""Experts: one tensor [E, ...] in xscale, E tensors in the other library."""
GATE_UP = Transform(lambda tensors: [torch.cat(tensors)], lambda tensors: list(tensors[0].chunk(2)))
"""Gate and up projection of a gated unit, concatenated."""


def _split_experts(tensors: Tensors) -> Tensors:
    return [
        torch.stack(half) for half in zip(*(expert.chunk(2) for expert in tensors), strict=True)
    ]


GATE_UP_EXPERTS = Transform(
    lambda tensors: [torch.cat(pair) for pair in zip(tensors[0], tensors[1], strict=True)],
    _split_experts,
)
"""Experts: gate and up projection, two tensors [E, F, D] in xscale, E tensors [2 * F, D] in the other library."""


def interleaved_qkv(kv_heads: int, queries_per_kv_head: int) -> Transform:
    """Transform q, k and v to one tensor interleaved by kv head: its query heads, its key head, its value head."""

    def forward(tensors: Tensors) -> Tensors:
        return [
            torch.cat([part.reshape(kv_heads, -1, *part.shape[1:]) for part in tensors], 1).flatten(
                0, 1
            )
        ]

    def inverse(tensors: Tensors) -> Tensors:
        by_head = tensors[0].reshape(kv_heads, -1, *tensors[0].shape[1:])
        head = by_head.shape[1] // (queries_per_kv_head + 2)
        return [
            part.flatten(0, 1)
            for part in torch.split(by_head, [queries_per_kv_head * head, head, head], 1)
        ]

    return Transform(forward, inverse)


def concatenated(*rows: int) -> Transform:
    """Transform weights with these numbers of rows to one, concatenated along the rows."""
    return Transform(
        lambda tensors: [torch.cat(tensors)],
        lambda tensors: list(torch.split(tensors[0], list(rows))),
    )


def shifted(offset: float) -> Transform:
    """Transform a gain by adding `offset` to it on import: the other library multiplies by offset + weight."""
    return Transform(lambda tensors: [tensors[0] - offset], lambda tensors: [tensors[0] + offset])


def scaled(factor: float) -> Transform:
    """Transform a weight by multiplying it by `factor` on export."""
    return Transform(lambda tensors: [tensors[0] * factor], lambda tensors: [tensors[0] / factor])


def zeros(*shape: int) -> Transform:
    """Export a weight without a counterpart in xscale as zeros; the import checks that it is zero."""
    return Transform(lambda tensors: [torch.zeros(shape)], lambda tensors: [])


def rows_before(rows: int) -> Transform:
    """Transform a table that has this many unused rows before the first of xscale's."""
    return Transform(
        lambda tensors: [torch.cat((tensors[0].new_zeros(rows, tensors[0].shape[1]), tensors[0]))],
        lambda tensors: [tensors[0][rows:]],
    )


def positions_and_types(rows: int, types: int) -> Transform:
    """Transform a table of positions to one of positions and one of token types, whose first row is folded in."""

    def forward(tensors: Tensors) -> Tensors:
        return [
            *rows_before(rows).forward(tensors),
            tensors[0].new_zeros(types, tensors[0].shape[1]),
        ]

    def inverse(tensors: Tensors) -> Tensors:
        return [tensors[0][rows:] + tensors[1][0]]

    return Transform(forward, inverse)


@dataclass(frozen=True)
class WeightMapping:
    """Tensor names in xscale and in the other library, and the transform between them."""

    xscale_names: tuple[str, ...]
    external_names: tuple[str, ...]
    transform: Transform = IDENTITY


def weight(
    xscale_names: str, external_names: str, transform: Transform = IDENTITY
) -> WeightMapping:
    """Build a mapping; each side has one or more names separated by spaces."""
    return WeightMapping(tuple(xscale_names.split()), tuple(external_names.split()), transform)


def per_block(count: int, mappings: list[WeightMapping], first: int = 0) -> Iterator[WeightMapping]:
    """Yield the mappings once per block: `{i}` in a name is the block's number."""
    for block in range(first, first + count):
        for mapping in mappings:
            yield replace(
                mapping,
                xscale_names=_with_index(mapping.xscale_names, block),
                external_names=_with_index(mapping.external_names, block),
            )


def _with_index(names: tuple[str, ...], block: int) -> tuple[str, ...]:
    return tuple(name.replace("{i}", str(block)) for name in names)


def with_biases(mappings: list[WeightMapping], has_bias: bool) -> list[WeightMapping]:
    """Return the mappings and, if `has_bias`, those of their biases: the same names with `.bias` for `.weight`."""
    if not has_bias:
        return mappings
    biases = [
        replace(
            mapping,
            xscale_names=_bias(mapping.xscale_names),
            external_names=_bias(mapping.external_names),
        )
        for mapping in mappings
    ]
    return [*mappings, *biases]


def _bias(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{name.removesuffix('.weight')}.bias" for name in names)
