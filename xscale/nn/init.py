"""Initial weights as a function of (seed, parameter name): the same on every rank, in any order and layout."""

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Init:
    """How a parameter is initialised."""

    kind: Literal[
        "normal", "zeros", "ones", "constant", "uniform", "values", "log_of_uniform", "step_bias"
    ] = "normal"
    std: float = 0.02
    """Standard deviation of the normal; it is truncated at three of them."""
    value: float = 0.0
    """The value of every element of a constant."""
    bounds: tuple[float, float] = (0.0, 1.0)
    """The lowest and the highest value of the uniform; of `log_of_uniform`, the logarithm of one; of `step_bias`, the x
    with a softplus(x) whose logarithm is uniform."""
    values: tuple[float, ...] = ()
    """The values along the last axis, the same for all other indices."""
    slices: bool = False
    """Draw each index of the first axis from its own random stream, so that a rank draws only its own experts."""
    copy_of: tuple[str, str] | None = None
    """(a part of the parameter's name, another): the values of the parameter whose name has the other part instead."""


DRAWN_TOGETHER = 16
"""Numbers that torch draws at once for a normal on a CPU."""
SKIPPED_TOGETHER = 1 << 20
ONE_STREAM = 1 << 22
"""Numbers of the largest parameter that one random stream gives."""
STREAM = 1 << 20
"""Numbers, rounded up to rows, that each random stream gives to a larger parameter."""
ZEROS = Init("zeros")
ONES = Init("ones")


def seed_of(seed: int, *names: str | int) -> int:
    """Hash all arguments to a 63-bit seed, the same in every process and version."""
    text = "\x1f".join(str(name) for name in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def draw(
    init: Init, shape: tuple[int, ...], seed: int, name: str, rows: range | None = None
) -> Tensor:
    """Initial value of the parameter `name` of global `shape`, float32 on the CPU; only `rows` of the first axis."""
    rows = range(shape[0]) if rows is None else rows
    if init.copy_of is not None:
        name = ".".join(
            init.copy_of[1] if part == init.copy_of[0] else part for part in name.split(".")
        )
    if init.kind == "zeros":
        return torch.zeros(len(rows), *shape[1:])
    if init.kind == "ones":
        return torch.ones(len(rows), *shape[1:])
    if init.kind == "constant":
        return torch.full((len(rows), *shape[1:]), init.value)
    if init.kind == "values":
        values = torch.tensor(init.values, device="cpu")
        # A vector has its rows along the last axis.
        return (
            values[rows.start : rows.stop]
            if len(shape) == 1
            else values.expand(len(rows), *shape[1:])
        ).clone()
    if init.kind in ("uniform", "log_of_uniform", "step_bias"):
        return _uniform(init, shape, seed_of(seed, name))[rows.start : rows.stop].clone()
    if init.slices and not rows:
        # There are more ranks than experts.
        return torch.empty(0, *shape[1:])
    if init.slices:
        return torch.stack([_normal(init.std, shape[1:], seed_of(seed, name, row)) for row in rows])
    if math.prod(shape) <= ONE_STREAM or not rows:
        return _normal_rows(init.std, shape, seed_of(seed, name), rows)
    return _normal_in_streams(init.std, shape, (seed, name), rows)


def _uniform(init: Init, shape: tuple[int, ...], seed: int) -> Tensor:
    low, high = init.bounds
    if init.kind == "step_bias":
        low, high = math.log(low), math.log(high)
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.empty(shape, device="cpu", dtype=torch.float32).uniform_(
        low, high, generator=generator
    )
    if init.kind == "log_of_uniform":
        return uniform.log()
    if init.kind == "step_bias":
        steps = uniform.exp()
        return steps + (-(-steps).expm1()).log()
    return uniform


def _normal_in_streams(
    std: float, shape: tuple[int, ...], seed: tuple[int, str], rows: range
) -> Tensor:
    """Rows of a large parameter: a rank skips numbers of two streams at most, whichever of many shards it draws."""
    size = -(-STREAM // math.prod(shape[1:]))
    value = torch.empty(len(rows), *shape[1:], device="cpu", dtype=torch.float32)
    for first in range(rows.start // size * size, rows.stop, size):
        stream_shape = (min(size, shape[0] - first), *shape[1:])
        start, stop = max(rows.start, first), min(rows.stop, first + size)
        drawn = _normal_rows(
            std, stream_shape, seed_of(*seed, first), range(start - first, stop - first)
        )
        value[start - rows.start : stop - rows.start] = drawn
    return value


def _normal(std: float, shape: tuple[int, ...], seed: int) -> Tensor:
    return _truncated(
        torch.empty(shape, device="cpu", dtype=torch.float32),
        std,
        torch.Generator().manual_seed(seed),
    )


def _normal_rows(std: float, shape: tuple[int, ...], seed: int, rows: range) -> Tensor:
    """`_normal(std, shape, seed)[rows]`, bit for bit, without drawing the rows behind and making those before normal.

    Torch makes 16 normal numbers of 16 draws, so that a draw may begin at any multiple of 16 numbers.
    """
    row, total = math.prod(shape[1:]), math.prod(shape)
    if total % DRAWN_TOGETHER or len(rows) in (0, shape[0]):
        return _normal(std, shape, seed)[rows.start : rows.stop]
    start, stop = rows.start * row, rows.stop * row
    first, end = (
        start // DRAWN_TOGETHER * DRAWN_TOGETHER,
        -(-stop // DRAWN_TOGETHER) * DRAWN_TOGETHER,
    )
    generator = torch.Generator().manual_seed(seed)
    for skipped in range(0, first, SKIPPED_TOGETHER):
        skipped_numbers = torch.empty(
            min(SKIPPED_TOGETHER, first - skipped), device="cpu", dtype=torch.float32
        )
        skipped_numbers.uniform_(generator=generator)
    value = _truncated(torch.empty(end - first, device="cpu", dtype=torch.float32), std, generator)
    return value[start - first : stop - first].view(len(rows), *shape[1:])


def _truncated(value: Tensor, std: float, generator: torch.Generator) -> Tensor:
    return value.normal_(0.0, std, generator=generator).clamp_(-3 * std, 3 * std)
