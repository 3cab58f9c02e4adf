"""linear_attention's Triton kernel against the chunks in torch, forward and gradients."""

from collections.abc import Callable

import pytest
import torch

from xscale_kernels.linear_attention import linear_attention, reference
from xscale_kernels.triton_runtime import interpreting

PRECISIONS = [(torch.float32, 1e-5)] + ([(torch.float64, 1e-6)] if interpreting() else [(torch.bfloat16, 3e-2)])


@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("stated", [True, False])
def test_forward_and_gradients(
    agree: Callable[..., None], device: str, dtype: torch.dtype, bound: float, gated: bool, packed: bool, stated: bool
) -> None:
    T = 37
    documents = torch.randint(0, 3, (2, T), device=device).sort(1).values if packed else None
    drawn = [torch.randn(2, T, 2, width, device=device) for width in (9, 9, 20)]
    drawn += [-torch.rand(2, 2, T, device=device)] if gated else []
    drawn += [torch.randn(2, 2, 9, 20, device=device)] if stated else []

    def both(function: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., torch.Tensor]:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            out, last = function(q, k, v, rest[0] if gated else None, documents, rest[-1] if stated else None)
            return torch.cat((out.flatten(), last.flatten().to(out.dtype)))

        return run

    agree(
        both(
            lambda q, k, v, g, d, s: linear_attention(
                q, k, v, log_decay=g, documents=d, state=s, chunk=16, implementation="triton"
            )
        ),
        both(reference.linear_attention),
        drawn,
        dtype,
        bound,
    )
