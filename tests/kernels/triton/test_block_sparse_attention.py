"""block_sparse_attention's Triton kernels against the definition, forward and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from xscale_kernels.block_sparse_attention import block_sparse_attention, layout_from_mask
from xscale_kernels.triton_runtime import interpreting

# The interpreter multiplies bfloat16 as integers (test_grouped_gemm.py); the GPU has no float64 kernel.
OTHERS = [(torch.float16, 2e-3), (torch.float64, 1e-7) if interpreting() else (torch.bfloat16, 2e-2)]
SETTINGS: list[dict[str, Any]] = [
    {"causal": False},
    {"causal": True},
    {"causal": True, "softcap": 2.0, "documents": True},
    {"causal": False, "softcap": 2.0, "slopes": True, "documents": True},
]
CASES = [(settings, torch.float32, 2e-6, 37, 37, 4) for settings in SETTINGS]
CASES += [(settings, torch.float32, 2e-6, 20, 50, 1) for settings in SETTINGS[1:]]
CASES += [(SETTINGS[2], dtype, bound, 37, 37, 4) for dtype, bound in OTHERS]


@pytest.mark.parametrize(("settings", "dtype", "bound", "T", "S", "heads"), CASES)
def test_forward_and_gradients(
    agree: Callable[..., None],
    device: str,
    settings: dict[str, Any],
    dtype: torch.dtype,
    bound: float,
    T: int,
    S: int,
    heads: int,
) -> None:
    mask = torch.rand(heads, -(-T // 16), -(-S // 16)) < 0.6
    mask[:, 0] = False
    layout = layout_from_mask(mask.to(device), 16)
    rest = dict(settings)
    if rest.pop("documents", False):
        ids = torch.randint(0, 2, (2, S), device=device).sort(1).values
        rest |= {"query_documents": ids[:, S - T :], "key_documents": ids}
    if rest.pop("slopes", False):
        rest["slopes"] = torch.rand(4, device=device)
    q = torch.randn(2, T, 4, 20, device=device)
    k, v = torch.randn(2, S, 2, 20, device=device), torch.randn(2, S, 2, 9, device=device)

    def run(name: str) -> Callable[..., torch.Tensor]:
        return lambda *qkv: block_sparse_attention(
            *(each.transpose(1, 2) for each in qkv), layout, implementation=name, **rest
        )

    agree(run("triton"), run("reference"), (q, k, v), dtype, bound)


def test_a_wide_block_is_taken_in_steps(agree: Callable[..., None], device: str) -> None:
    layout = layout_from_mask(torch.tensor([[[True, False], [True, True]]], device=device), 128)
    qkv = tuple(torch.randn(1, 2 if at == 0 else 1, 190, 128, device=device) for at in range(3))

    def run(name: str) -> Callable[..., torch.Tensor]:
        return lambda q, k, v: block_sparse_attention(q, k, v, layout, causal=True, implementation=name)

    agree(run("triton"), run("reference"), qkv, torch.float32, 2e-6)


def test_registration(device: str) -> None:
    q, k, v = (torch.randn(1, 2, 20, 16, device=device, requires_grad=True) for _ in range(3))
    layout = layout_from_mask(torch.ones(1, 2, 2, dtype=torch.bool, device=device), 16)
    lists = [layout.key_starts, layout.key_blocks, layout.query_starts, layout.query_blocks]
    arguments = (q, k, v, None, None, None, lists, [16, 1, 2, 2], 0.25, True, 0.0, "triton")
    torch.library.opcheck(torch.ops.xscale.block_sparse_attention.default, arguments)
