"""Law 3, where it begins: which rank is where is arithmetic, in any order of the axes."""

from itertools import permutations, product

import pytest
import torch

from xscale.mesh.axes import DENSE_AXES, Degrees, MeshConfig, check, resolve
from xscale.mesh.mesh import rank_grids

SIZES = [
    Degrees(*sizes, ep, whole)
    for sizes in product((1, 2), (1, 2), (1, 3), (1, 2), (1, 2))
    for ep, whole in product((1, 2, 6), (True, False))
    if Degrees(*sizes, ep, whole).folded % ep == 0
]
ORDERS = list(permutations(DENSE_AXES))


def of(degrees: Degrees, order: tuple[str, ...]) -> Degrees:
    mesh = MeshConfig.model_validate({**{axis: getattr(degrees, axis) for axis in (*DENSE_AXES, "ep")}, "order": order})
    return resolve(mesh.model_copy(update={"tp_in_experts": degrees.tp_in_experts}), degrees.world)


@pytest.mark.parametrize("order", [DENSE_AXES, *ORDERS[7::29]])
def test_places_and_ranks_are_one_another_s_inverse(order: tuple[str, ...]) -> None:
    for degrees in (of(one, order) for one in SIZES):
        for rank in range(degrees.world):
            places = {axis: degrees.coordinate(rank, axis) for axis in DENSE_AXES}
            assert all(0 <= place < getattr(degrees, axis) for axis, place in places.items())
            assert degrees.rank(**places) == rank


@pytest.mark.parametrize("order", [DENSE_AXES, *ORDERS[7::29]])
def test_every_group_is_a_line_of_ranks_that_differ_on_its_axes_alone(order: tuple[str, ...]) -> None:
    for degrees in (of(one, order) for one in SIZES):
        for axes in (("tp",), ("pp",), ("cp",), ("dp_shard", "cp"), ("dp_replicate", "dp_shard", "cp")):
            lines = degrees.groups_along(*axes)
            assert sorted(rank for line in lines for rank in line) == list(range(degrees.world))
            for line in lines:
                assert line == sorted(line)
                for axis in set(DENSE_AXES) - set(axes):
                    assert len({degrees.coordinate(rank, axis) for rank in line}) == 1
        for grid in rank_grids(degrees):
            assert sorted(grid.flatten().tolist()) == list(range(degrees.world))
            # Within a process group ranks ascend, so they must along every axis of a mesh.
            for dim in range(grid.ndim):
                assert (grid.diff(dim=dim) > 0).all()


def test_usually_tp_is_innermost_then_cp_then_dp_then_pp() -> None:
    for degrees in SIZES:
        ranks = torch.arange(degrees.world)
        dense, experts, replicas, joint = rank_grids(degrees)
        tp, es = degrees.tp, degrees.expert_shard
        assert torch.equal(dense, ranks.view(degrees.pp, degrees.dp_replicate, -1, 1, tp))
        assert torch.equal(replicas, ranks.view(degrees.pp, -1, 1, 1, tp))
        assert torch.equal(experts, ranks.view(degrees.pp, degrees.dp_replicate, es, degrees.ep, degrees.expert_tp))
        assert torch.equal(joint, ranks.view(degrees.pp, -1, 1, degrees.ep, degrees.expert_tp))


def test_the_last_axis_of_an_order_has_neighbours() -> None:
    for axis in DENSE_AXES:
        order = (*(one for one in DENSE_AXES if one != axis), axis)
        degrees = of(Degrees(2, 2, 2, 2, 2), order)
        assert degrees.groups_along(axis)[0] == [0, 1], axis


def test_what_is_no_order_is_refused() -> None:
    for order in (("pp", "tp"), (*DENSE_AXES, "tp")):
        (problem,) = check(MeshConfig(order=order), 4)
        assert "order" in problem.path
        assert ", ".join(DENSE_AXES) in problem.advice
