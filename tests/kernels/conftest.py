"""Every kernel test runs with poisoned memory: what torch.empty returns is NaN until something writes it."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    # torch.utils.deterministic.fill_uninitialized_memory (on by default) fills new memory with NaN in this mode.
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def _agree(
    ours: Callable[..., torch.Tensor],
    exact: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    dtype: torch.dtype,
    bound: float,
) -> None:
    """Runs `ours` on inputs of `dtype` and `exact` on the same numbers in float64; compares results and gradients.

    bound: largest norm of a difference, as a fraction of the exact tensor's norm (of 1 where that is smaller).
    """
    near = [each.to(dtype).detach().requires_grad_() for each in inputs]
    far = [each.detach().double().requires_grad_() for each in near]
    got, wanted = ours(*near), exact(*far)
    seed = torch.randn_like(wanted).to(got.dtype)
    found = (got, *torch.autograd.grad(got, near, seed, allow_unused=True, materialize_grads=True))
    expected = (wanted, *torch.autograd.grad(wanted, far, seed.double(), allow_unused=True, materialize_grads=True))
    for at, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert mine.shape == theirs.shape
        difference, size = (mine.double() - theirs).norm().item(), theirs.norm().item()
        assert difference <= bound * max(1.0, size), (
            f"{'output' if at == 0 else f'gradient {at - 1}'}: {difference} of {size}"
        )


@pytest.fixture
def agree() -> Callable[..., None]:
    """One comparison for every operator: agree(ours, exact, inputs, dtype, bound)."""
    return _agree
