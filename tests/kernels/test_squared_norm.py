"""squared_norm against one long vector."""

import pytest
import torch

from xscale_kernels.squared_norm import squared_norm


@pytest.mark.parametrize("implementation", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equals_one_vector(implementation: str, dtype: torch.dtype) -> None:
    tensors = [torch.randn(shape).to(dtype) for shape in ((3, 5), (0,), (700,), (), (2, 3, 4))]
    expected = torch.cat([each.double().flatten() for each in tensors]).square().sum()
    found = squared_norm(tensors, implementation=implementation)
    assert found.shape == ()
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def test_large_half_precision_does_not_overflow_and_nan_is_kept() -> None:
    assert squared_norm([torch.full((10,), 6e4, dtype=torch.float16)]).isfinite()
    assert squared_norm([torch.tensor([1.0]), torch.tensor([torch.nan])]).isnan()


def test_nothing_is_zero_and_mixed_dtypes_take_the_reference() -> None:
    assert squared_norm([]) == 0
    assert squared_norm([torch.ones(2), torch.ones(2, dtype=torch.bfloat16)]) == 4
