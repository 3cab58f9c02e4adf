"""Experts over ep 1, 2 and 4 give the same outputs and gradients for every router, with and without a capacity."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed import Pool, RankError
from tests.nn.moe.mixture import mixture, sample
from xscale.nn.ffn.moe.moe import Moe
from xscale.nn.ffn.moe.router.router import ROUTERS
from xscale.nn.materialize import replace_parameters
from xscale.parallel import expert
from xscale.parallel.expert import AllToAll, reorder

EXPERTS = 8


def built(kind: str, capacity: float | None) -> Moe:
    moe = mixture(experts=EXPERTS, router=kind, capacity_factor=capacity, shared={"kind": "dense", "hidden": 3})
    for parameter in moe.router.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    return moe


def passed(moe: Moe, rank: int, length: int) -> dict[str, torch.Tensor]:
    """Output and gradients of this rank's micro-batch, of another length than the other ranks' ones."""
    x, tokens = sample(rows=2, length=length, seed=10 + rank, rng_seed=1)
    x.requires_grad_()
    torch.manual_seed(rank)
    y = moe(x, tokens.with_forward(aux_loss_weight=0.5))
    y.square().sum().backward()
    assert x.grad is not None
    gradients = {name: one.grad for name, one in moe.named_parameters() if one.grad is not None}
    return {"y": y.detach(), "x": x.grad, **gradients}


def every_router(ranks: int, kinds: list[str], wrong: bool = False) -> None:
    """On each rank: its experts alone, rows from all ranks, against the whole layer on its own rows."""
    rank = dist.get_rank()
    share = EXPERTS // ranks
    for kind in kinds:
        for capacity in (None, 1.0):
            whole, cut = built(kind, capacity), built(kind, capacity)
            first = (share * rank + (1 if wrong else 0)) % (EXPERTS - share + 1)
            replace_parameters(
                cut.experts, lambda _, old, at=first: torch.nn.Parameter(old.detach()[at : at + share].clone())
            )
            cut.dispatch = AllToAll(dist.group.WORLD)
            length = 9 + 2 * rank
            wanted, got = passed(whole, rank, length), passed(cut, rank, length)
            for name, value in got.items():
                expected = wanted[name]
                if name.startswith("experts."):
                    # An expert has learnt from the rows of all ranks.
                    dist.all_reduce(expected)
                    expected = expected[share * rank : share * (rank + 1)]
                torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12, msg=f"{kind} {capacity} {name}")
            assert wanted.keys() == got.keys()


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_router(pool: Pool, ranks: int) -> None:
    pool.run(every_router, ranks, ranks, list(ROUTERS.names()))


def test_another_ranks_experts_are_seen(pool: Pool) -> None:
    """Negative control."""
    with pytest.raises(RankError):
        pool.run(every_router, 2, 2, ["topk"], wrong=True)


@pytest.mark.parametrize("kind", ROUTERS.names())
def test_what_ep_cannot_do_is_refused(kind: str) -> None:
    moe = built(kind, None)
    assert not expert.check(moe, 4, "parallel.mesh")
    (problem,) = expert.check(moe, 3, "parallel.mesh")
    assert str(problem) == "parallel.mesh.ep: ep=3 does not divide experts=8. Take 1, 2, 4 or 8."
    assert [choice.edits for choice in problem.choices] == [(("", degree),) for degree in (1, 2, 4, 8)]


def test_a_model_without_experts_is_refused() -> None:
    (problem,) = expert.check(built("topk", None).shared, 2, "parallel.mesh")
    assert "the model has no experts" in str(problem)


def test_rows_are_reordered_by_gathers_in_both_directions() -> None:
    """The backward of an index sorts and scatters; that of a permutation gathers by the inverse."""
    rows = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    order = torch.randperm(9)
    gradient = torch.randn(9, 4, dtype=torch.float64)
    reordered = reorder(rows, order, order.argsort())
    (got,) = torch.autograd.grad(reordered, rows, gradient)
    (expected,) = torch.autograd.grad(rows[order], rows, gradient)
    assert torch.equal(reordered, rows[order])
    assert torch.equal(got, expected)
    assert "Reorder" in type(reordered.grad_fn).__name__
