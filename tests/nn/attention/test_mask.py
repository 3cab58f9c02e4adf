"""Masks are made on the device of the queries, and no kernel gets a mask that makes torch compute all scores."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from xscale.nn.attention.ops.in_block_mask import DocumentMask
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.random import RandomNumbers


def test_a_causal_mask_is_made_where_the_queries_are() -> None:
    """The mask is made on the device: with a bias and without documents it was made on the CPU, and copied in every
    layer."""
    meta = torch.device("meta")
    allowed = AttentionMask(4, 4, causal=True, device=meta).allowed
    assert allowed is not None
    assert allowed.device == meta
    biased = AttentionMask(4, 4, causal=True, bias=torch.zeros(1, 2, 4, 4, device=meta)).allowed
    assert biased is not None
    assert biased.device == meta


@pytest.mark.parametrize("masked", [True, False])
def test_grouped_queries_with_a_mask_repeat_keys_on_a_gpu(monkeypatch: pytest.MonkeyPatch, masked: bool) -> None:
    """No fused kernel of torch takes groups and a mask at once."""
    calls: list[tuple[torch.Size, torch.Size, bool]] = []

    def attend(q: Any, k: Any, v: Any, *, enable_gqa: bool, **others: Any) -> Any:
        calls.append((k.shape, v.shape, enable_gqa))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    with FakeTensorMode():
        q, k, v = (torch.empty(2, heads, 6, 8, device="cuda") for heads in (8, 2, 2))
        mask = torch.ones(2, 1, 6, 6, dtype=torch.bool, device="cuda") if masked else None
        RandomNumbers().attention(q, k, v, 0.0, attn_mask=mask)
        on_cpu = [torch.empty(2, heads, 6, 8) for heads in (8, 2, 2)]
        RandomNumbers().attention(*on_cpu, 0.0, attn_mask=torch.ones(6, 6, dtype=torch.bool))  # type: ignore[misc]
    repeated, shared = torch.Size((2, 8, 6, 8)), torch.Size((2, 2, 6, 8))
    assert calls == [(repeated, repeated, False) if masked else (shared, shared, True), (shared, shared, True)]


def test_documents_of_gathered_blocks_are_masked_without_a_read_on_a_gpu() -> None:
    """A fake tensor has no numbers: what the host would wait for raises."""
    with FakeTensorMode():
        documents = torch.zeros(2, 3, 4, dtype=torch.long, device="cuda")
        mask = DocumentMask.of(documents, documents, torch.float32)
    assert mask.codes is None
