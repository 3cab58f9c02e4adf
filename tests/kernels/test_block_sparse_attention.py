"""block_sparse_attention's definition against torch's attention, and its layouts."""

import pytest
import torch
import torch.nn.functional as F

from xscale_kernels.block_sparse_attention import block_sparse_attention, layout_from_mask


def test_a_layout_keeps_its_mask() -> None:
    mask = torch.rand(3, 5, 7) < 0.4
    mask[1, 2] = False
    layout = layout_from_mask(mask, 16)
    assert torch.equal(layout.mask(), mask)
    assert layout.density == int(mask.sum()) / mask.numel()
    assert layout.query_blocks.numel() == layout.key_blocks.numel()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "S"), [(37, 37), (20, 37)])
def test_a_full_layout_is_dense_attention(causal: bool, T: int, S: int) -> None:
    q, k, v = (torch.randn(2, heads, length, 5, dtype=torch.float64) for heads, length in ((4, T), (2, S), (2, S)))
    layout = layout_from_mask(torch.ones(1, -(-T // 8), -(-S // 8), dtype=torch.bool), 8)
    mask = torch.ones(T, S, dtype=torch.bool).tril(S - T) if causal else None
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(block_sparse_attention(q, k, v, layout, causal=causal), expected)


def test_a_query_without_keys_gives_zeros_and_no_gradient() -> None:
    q, k, v = (torch.randn(1, 1, 16, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    layout = layout_from_mask(torch.tensor([[[True, False], [False, False]]]), 8)
    out = block_sparse_attention(q, k, v, layout)
    assert not out[:, :, 8:].any()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.isfinite().all()


def test_alibi_and_documents() -> None:
    q, k, v = (torch.randn(1, 2, 8, 4, dtype=torch.float64) for _ in range(3))
    layout = layout_from_mask(torch.ones(1, 1, 1, dtype=torch.bool), 8)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64)
    out = block_sparse_attention(
        q, k, v, layout, causal=True, slopes=slopes, query_documents=documents, key_documents=documents
    )
    alone = layout_from_mask(torch.ones(1, 1, 1, dtype=torch.bool), 8)
    second = block_sparse_attention(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], alone, causal=True, slopes=slopes)
    torch.testing.assert_close(out[:, :, 3:], second)
    distance = torch.arange(5)[:, None] - torch.arange(5)[None, :]
    bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)
    expected = F.scaled_dot_product_attention(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], attn_mask=bias[None])
    torch.testing.assert_close(second, expected)


def test_faults_are_named() -> None:
    q = torch.zeros(1, 2, 20, 4)
    layout = layout_from_mask(torch.ones(1, 2, 2, dtype=torch.bool), 8)
    with pytest.raises(ValueError, match=r"layout of \[1 or 2, 3, 3\] blocks, this one is \[1, 2, 2\]"):
        block_sparse_attention(q, q, q, layout)
