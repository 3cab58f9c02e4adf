"""permute and unpermute against their definition, forward and gradients."""

import pytest
import torch

from xscale_kernels.permute import permute, reference, unpermute

TOKENS = [[2, 0, 2, 5, 2, 0], [], [1]]


@pytest.mark.parametrize("tokens", TOKENS, ids=str)
@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("weighted", [True, False])
def test_equals_the_reference(tokens: list[int], implementation: str, weighted: bool) -> None:
    where = torch.tensor(tokens, dtype=torch.int64)
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    y = torch.randn(len(tokens), 5, dtype=torch.float64, requires_grad=True)
    w = torch.rand(len(tokens), dtype=torch.float64, requires_grad=True)
    rows, back = (
        permute(x, where, implementation=implementation),
        unpermute(y, where, w if weighted else None, 6, implementation=implementation),
    )
    wanted_rows, wanted = reference.permute(x, where), reference.unpermute(y, where, w if weighted else None, 6)
    inputs = (x, y, w) if weighted else (x, y)
    seeds = (torch.randn_like(wanted_rows), torch.randn_like(wanted))
    got = (rows, back, *torch.autograd.grad((rows, back), inputs, seeds))
    expected = (wanted_rows, wanted, *torch.autograd.grad((wanted_rows, wanted), inputs, seeds))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-14, rtol=1e-14)


def test_gradcheck_and_registration() -> None:
    where = torch.tensor([2, 0, 2, 3])
    x, y, w = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 3), (4, 3), (4,)))
    assert torch.autograd.gradcheck(lambda a: permute(a, where), (x,))
    assert torch.autograd.gradcheck(lambda a, b: unpermute(a, where, b, 4), (y, w))
    torch.library.opcheck(torch.ops.xscale.permute.default, (x, where, ""))
    torch.library.opcheck(torch.ops.xscale.unpermute.default, (y, where, w, 4, ""))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 5e-3), (torch.float16, 1e-3), (torch.float32, 1e-6)])
def test_precisions(dtype: torch.dtype, bound: float) -> None:
    where = torch.randint(0, 9, (40,))
    y, w = torch.randn(40, 7).to(dtype).requires_grad_(), torch.rand(40, requires_grad=True)
    out = unpermute(y, where, w, 9)
    dy, dw = torch.autograd.grad(out, (y, w), torch.ones_like(out))
    exact = reference.unpermute(y.double(), where, w.double(), 9)
    assert out.dtype == dy.dtype == dtype
    assert dw.dtype == torch.float32
    assert (out.double() - exact).norm() <= bound * exact.norm()


def test_back_and_forth_is_the_identity_and_repeats() -> None:
    x = torch.randn(50, 8)
    where = torch.arange(50).repeat(2)[torch.randperm(100)]
    back = unpermute(permute(x, where), where, torch.full((100,), 0.5), 50)
    torch.testing.assert_close(back, x)
    assert torch.equal(back, unpermute(permute(x, where), where, torch.full((100,), 0.5), 50))


def test_faults_are_named() -> None:
    with pytest.raises(ValueError, match=r"unpermute takes y \[M, D\]"):
        unpermute(torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64), None, 4)
