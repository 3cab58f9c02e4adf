"""Grouped queries over packed documents never make torch compute all scores: what torch's attention is called with.

No fused kernel of torch takes a mask and groups of queries at once; its math path would keep scores [B, H, T, T]. The
tensors are on a CPU and say that they are on a GPU, so that layers decide as there.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conformance.made import HEADS, WIDTH, dims, drawn, numbered, ready
from xscale.core.config import decode
from xscale.nn.mixer.attention import Attention
from xscale.nn.tokens import Tokens

DOCUMENTS = numbered(20, 31, 13)
LAYERS: dict[str, dict[str, Any]] = {
    "two groups": {},
    "one group": {"kv_heads": 1},
    "bias": {"position": {"kind": "alibi"}, "core": {"kind": "softmax", "implementation": "dense"}},
    "adaptive span": {"core": {"kind": "adaptive_span", "max_span": 16}},
    "local": {"core": {"kind": "local_transformer"}},
    "persistent memory": {"core": {"kind": "persistent_memory", "persistent": 8}},
}


def attended(
    config: dict[str, Any], documents: Tensor | None, *, on_gpu: bool
) -> tuple[Tensor, list[tuple[bool, bool]]]:
    """Output of a layer, and whether each call of torch's attention has a mask, and grouped queries."""
    calls: list[tuple[bool, bool]] = []
    attention = F.scaled_dot_product_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        grouped = q.shape[1] != k.shape[1] or options.get("enable_gqa", False)
        calls.append((options.get("attn_mask") is not None, grouped))
        return attention(q, k, v, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", attend)
        if on_gpu:
            patch.setattr(Tensor, "is_cuda", True)
        layer = ready(Attention(decode(Attention.Config, {"heads": HEADS, "kv_heads": 2, **config}), dims()))
        x = drawn(len(DOCUMENTS), DOCUMENTS.shape[1], WIDTH)
        return layer(x, Tokens.from_ids(torch.zeros_like(DOCUMENTS), documents)), calls


@pytest.mark.parametrize("name", LAYERS)
def test_a_mask_comes_with_as_many_keys_as_queries_on_a_gpu(name: str) -> None:
    output, calls = attended(LAYERS[name], DOCUMENTS, on_gpu=True)
    assert calls
    assert all((masked, grouped) == (True, False) for masked, grouped in calls)
    expected, _ = attended(LAYERS[name], DOCUMENTS, on_gpu=False)
    assert torch.allclose(output, expected, rtol=1e-9, atol=1e-11)


def test_a_cpu_shares_keys_among_queries() -> None:
    """Negative control: without a GPU the mask and the groups are given together, and the record says so."""
    _, calls = attended({}, DOCUMENTS, on_gpu=False)
    assert calls == [(True, True)]


def test_without_documents_groups_stay_groups() -> None:
    """Flash knows groups and needs no mask: nothing is repeated."""
    _, calls = attended({}, None, on_gpu=True)
    assert calls == [(False, True)]
