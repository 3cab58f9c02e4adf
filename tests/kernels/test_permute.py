"""permute and unpermute against their definition, forward and gradients."""

import pytest
import torch

from xscale_kernels.permute import permute, unpermute
from xscale_kernels.permute.op import reference_unpermute


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 5e-3), (torch.float16, 1e-3), (torch.float32, 1e-6)])
def test_precisions(dtype: torch.dtype, bound: float) -> None:
    where = torch.randint(0, 9, (40,))
    y, w = torch.randn(40, 7).to(dtype).requires_grad_(), torch.rand(40, requires_grad=True)
    out = unpermute(y, where, w, 9)
    dy, dw = torch.autograd.grad(out, (y, w), torch.ones_like(out))
    exact = reference_unpermute(y.double(), where, w.double(), 9)
    assert out.dtype == dy.dtype == dtype
    assert dw.dtype == torch.float32
    assert (out.double() - exact).norm() <= bound * exact.norm()


def test_back_and_forth_is_the_identity_and_repeats() -> None:
    x = torch.randn(50, 8)
    where = torch.arange(50).repeat(2)[torch.randperm(100)]
    back = unpermute(permute(x, where), where, torch.full((100,), 0.5), 50)
    torch.testing.assert_close(back, x)
    assert torch.equal(back, unpermute(permute(x, where), where, torch.full((100,), 0.5), 50))


def test_with_the_rows_of_each_token_nothing_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    N, k = 9, 3
    tokens = torch.arange(N).repeat(k)[torch.randperm(N * k)]
    rows = tokens.argsort(stable=True).view(N, k)
    x, w = torch.randn(N, 5, dtype=torch.float64, requires_grad=True), torch.rand(N * k, dtype=torch.float64)
    sorts = []
    sort = torch.Tensor.sort
    monkeypatch.setattr(torch.Tensor, "sort", lambda *args, **options: sorts.append(args) or sort(*args, **options))

    def results(token_rows: torch.Tensor | None) -> list[torch.Tensor]:
        sorts.clear()
        out = unpermute(permute(x, tokens, token_rows=token_rows), tokens, w, N, token_rows=token_rows)
        return [out, *torch.autograd.grad(out, x, torch.ones_like(out))]

    expected = results(None)
    assert len(sorts) == 2
    found = results(rows)
    assert not sorts
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_faults_are_named() -> None:
    with pytest.raises(ValueError, match=r"token_rows are \[N, k\]"):
        permute(torch.zeros(3, 2), torch.zeros(6, dtype=torch.int64), token_rows=torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"unpermute takes y \[M, D\]"):
        unpermute(torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64), None, 4)
