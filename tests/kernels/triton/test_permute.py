"""unpermute's Triton kernel by rows that are given, against rows that are sorted for."""

import pytest
import torch

from xscale_kernels.permute import triton as kernels


def test_given_rows_are_those_that_it_would_sort_for(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    N, k, D = 13, 3, 21
    tokens = torch.arange(N).repeat(k)[torch.randperm(N * k)].to(device)
    y, weights = torch.randn(N * k, D, device=device), torch.rand(N * k, device=device)
    rows = tokens.argsort(stable=True).view(N, k)
    sorted_for = kernels.unpermute(y, tokens, weights, N)
    monkeypatch.setattr(torch.Tensor, "sort", lambda *_, **__: pytest.fail("a sort"))
    assert torch.equal(kernels.unpermute(y, tokens, weights, N, rows), sorted_for)
    other = kernels.unpermute(y, tokens, weights, N, rows.flip(1))
    torch.testing.assert_close(other, sorted_for)
