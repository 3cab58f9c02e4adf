"""Axes of the mesh as pure arithmetic: degrees, rank order, and expert parallelism folded over the same ranks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Literal

from xscale.core.choices import Choice
from xscale.core.config import Config, PositiveInt
from xscale.core.errors import Problem, counted
from xscale.core.requirements import divisors, take

Axis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp"]
DENSE_AXES: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Default rank order, outermost first: tp ranks are adjacent."""

EXPERT_AXES = ("pp", "dp_replicate", "expert_shard", "ep", "tp")
"""The axes of the same ranks in expert layers."""


class MeshConfig(Config):
    pp: PositiveInt = 1
    """Pipeline stages."""
    dp_replicate: PositiveInt = 1
    """Replicas of the sharded data-parallel group (hybrid sharding, HSDP)."""
    dp_shard: int = -1
    """Data-parallel ranks over which ZeRO (FSDP) shards; -1: all ranks that the other axes leave."""
    cp: PositiveInt = 1
    """Context parallelism: ranks over which one sequence is sharded."""
    tp: PositiveInt = 1
    """Tensor parallelism: ranks over which a layer's heads, hidden units and vocabulary are sharded."""
    ep: PositiveInt = 1
    """Expert parallelism: ranks over which a layer's experts are sharded; folded over dp_shard x cp, and x tp unless
    `tp_in_experts`."""
    tp_in_experts: bool = True
    """Whether tp shards each expert too; otherwise tp ranks have full experts and split the rows to compute."""
    order: tuple[Axis, ...] = DENSE_AXES
    """Rank order: ranks along the last axis are adjacent, those along the first farthest apart. Put the axis with the
    most communication last, so that it stays within a node."""


@dataclass(frozen=True)
class Degrees:
    """The size of every axis, without -1."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    tp_in_experts: bool = True
    order: tuple[Axis, ...] = DENSE_AXES

    @property
    def world(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def expert_shard(self) -> int:
        """Ranks over which the parameters of the same experts are sharded, within one dp_replicate group."""
        return self.folded // self.ep

    @property
    def folded(self) -> int:
        """Ranks over which ep is folded."""
        return self.dp_shard * self.cp * (1 if self.tp_in_experts else self.tp)

    @property
    def expert_tp(self) -> int:
        """Ranks over which one expert is sharded."""
        return self.tp if self.tp_in_experts else 1

    @property
    def has_expert_layout(self) -> bool:
        """Whether expert layers are sharded differently from the other layers."""
        return self.ep > 1 or self.expert_tp != self.tp

    def coordinate(self, rank: int, axis: Axis) -> int:
        """Return the coordinate of the rank on an axis."""
        below = 1
        for name in reversed(self.order):
            size = int(getattr(self, name))
            if name == axis:
                return rank // below % size
            below *= size
        raise AssertionError(axis)

    def data_rank(self, rank: int) -> int:
        """Return the index of the rank among those that read different samples."""
        return self.coordinate(rank, "dp_replicate") * self.dp_shard + self.coordinate(
            rank, "dp_shard"
        )

    def rank(self, **coordinates: int) -> int:
        """Return the rank at these coordinates, one for each axis."""
        rank = 0
        for name in self.order:
            rank = rank * int(getattr(self, name)) + coordinates[name]
        return rank

    def groups_along(self, *axes: Axis) -> list[list[int]]:
        """Return the groups of ranks that differ only on these axes, each in ascending order; one group for each
        coordinate on the other axes, in the order of DENSE_AXES."""
        fixed_axes = [axis for axis in DENSE_AXES if axis not in axes]
        return [
            sorted(self.rank(**dict(other), **dict(along)) for along in self._coordinates(axes))
            for other in self._coordinates(fixed_axes)
        ]

    def _coordinates(self, axes: Iterable[Axis]) -> list[list[tuple[str, int]]]:
        """List every coordinate on some axes, as pairs of axis and number."""
        ranges = [[(axis, number) for number in range(getattr(self, axis))] for axis in axes]
        return [list(coordinate) for coordinate in product(*ranges)]


def resolve(mesh: MeshConfig, world: int) -> Degrees:
    """Return the degrees for `world` ranks, with -1 resolved. Call `check` first: this asserts."""
    unsharded = mesh.pp * mesh.dp_replicate * mesh.cp * mesh.tp
    shard = world // unsharded if mesh.dp_shard == -1 else mesh.dp_shard
    degrees = Degrees(
        mesh.pp, mesh.dp_replicate, shard, mesh.cp, mesh.tp, mesh.ep, mesh.tp_in_experts, mesh.order
    )
    assert degrees.world == world, f"{degrees} does not make {world} ranks"
    return degrees


def min_world_size(mesh: MeshConfig) -> int:
    """Return the smallest world size of the mesh: -1 becomes the least that `ep` needs."""
    shard = mesh.dp_shard
    if shard == -1:
        shard = mesh.ep // math.gcd(mesh.ep, mesh.cp * (1 if mesh.tp_in_experts else mesh.tp))
    return max(1, mesh.pp * mesh.dp_replicate * shard * mesh.cp * mesh.tp)


def checkable_world(mesh: MeshConfig, world: int) -> int | None:
    """Return a world size at which everything else can be checked: `world` where the mesh fits it, else the smallest.

    What is wrong with the smallest is wrong with every larger one. None where the mesh fits no world size.
    """
    return next((size for size in (world, min_world_size(mesh)) if not check(mesh, size)), None)


def check(mesh: MeshConfig, world: int, path: str = "parallel.mesh") -> list[Problem]:
    """List the problems of the mesh with `world` ranks, each with what would work."""
    problems = []
    if sorted(mesh.order) != sorted(DENSE_AXES):
        what = f"must name each axis once, got {', '.join(mesh.order) or 'none'}"
        problems.append(Problem(f"{path}.order", what, choices=take(list(DENSE_AXES))))
    if mesh.dp_shard < 1 and mesh.dp_shard != -1:
        what = f"must be -1 or at least 1, got {mesh.dp_shard}"
        problems.append(Problem(f"{path}.dp_shard", what, choices=take(-1, 1)))
    if problems:
        return problems
    unsharded = mesh.pp * mesh.dp_replicate * mesh.cp * mesh.tp
    words = (
        " x ".join(
            f"{axis} {getattr(mesh, axis)}"
            for axis in DENSE_AXES
            if getattr(mesh, axis) not in (1, -1)
        )
        or "1"
    )
    if mesh.dp_shard == -1 and world % unsharded:
        what = f"{words} = {unsharded} does not divide the {counted(world, 'rank')}"
        fix = f"Start a multiple of {unsharded} processes, or lower a degree."
        problems.append(Problem(path, what, fix, choices=_lower_degrees(mesh, world, path)))
    elif mesh.dp_shard != -1 and unsharded * mesh.dp_shard != world:
        what = f"{words} gives {counted(unsharded * mesh.dp_shard, 'rank')}, but the world size is {world}"
        fix = f"Or start {counted(unsharded * mesh.dp_shard, 'process')}."
        problems.append(Problem(path, what, fix, choices=take(-1, key=f"{path}.dp_shard")))
    else:
        degrees = resolve(with_dp_shard(mesh, world // unsharded), world)
        folded = degrees.folded
        if folded % mesh.ep:
            over = "dp_shard x cp" if mesh.tp_in_experts else "dp_shard x cp x tp"
            what = f"ep={mesh.ep} does not divide {over} = {folded}, over which it is folded"
            problems.append(Problem(f"{path}.ep", what, choices=divisors(folded)))
    return problems


def _lower_degrees(mesh: MeshConfig, world: int, path: str) -> tuple[Choice, ...]:
    """Return the choices of one lower degree with which those that do not shard parameters divide the ranks."""
    degrees = {axis: getattr(mesh, axis) for axis in ("pp", "dp_replicate", "cp", "tp")}
    unsharded = math.prod(degrees.values())
    return tuple(
        choice
        for axis, degree in degrees.items()
        for lower in range(degree - 1, 0, -1)
        if world % (unsharded // degree * lower) == 0
        for choice in take(lower, key=f"{path}.{axis}")
    )


def with_dp_shard(mesh: MeshConfig, shard: int) -> MeshConfig:
    """Return the mesh with another dp_shard."""
    return mesh.model_copy(update={"dp_shard": shard})


__all__ = [
    "DENSE_AXES",
    "EXPERT_AXES",
    "Axis",
    "Degrees",
    "MeshConfig",
    "check",
    "checkable_world",
    "min_world_size",
    "resolve",
    "with_dp_shard",
]
