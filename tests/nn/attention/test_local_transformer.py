"""Localness modeling against the paper's equations, one query at a time, and its limits."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import dims
from tests.nn.attention.literal import HEADS, WIDTH, agree, build, inputs, masks
from xscale.nn.attention.core import Core
from xscale.nn.attention.local_transformer import LocalTransformer
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.softmax import Softmax


def local(core: Core, fixed: float | None, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """softmax(q k / sqrt(K) + G) v with G_ij = -(j - p_i)^2 / (2 sigma_i^2), j counted among a document's tokens."""
    assert isinstance(core, LocalTransformer)
    outs = []
    for b in range(len(q)):
        for h in range(HEADS):
            for t in range(q.shape[2]):
                keys = seen[min(b, len(seen) - 1), 0, t].nonzero().flatten()
                hidden = torch.tanh(core.hidden[h] @ q[b, h, t])
                p = len(keys) * torch.sigmoid(core.center[h] @ hidden)
                if core.window_from == "layer":
                    mean = sum(k[b, h, key] for key in keys) / len(keys)
                    hidden = torch.tanh(core.window_hidden[h] @ mean)
                window = fixed or len(keys) * torch.sigmoid(core.window[h] @ hidden)
                sigma = window / 2
                gaussian = -((torch.arange(len(keys)) - p) ** 2) / (2 * sigma**2)
                scores = k[b, h, keys] @ q[b, h, t] / math.sqrt(WIDTH) + gaussian
                outs.append(scores.softmax(0) @ v[b, h, keys])
    return torch.stack(outs).view(q.shape)


@pytest.mark.parametrize("fixed", [None, 10.0])
@pytest.mark.parametrize("causal", [True, False])
def test_it_is_the_papers_attention(causal: bool, fixed: float | None) -> None:
    core = build(LocalTransformer.Config(fixed_window=fixed), causal=causal)
    for mask in masks(20, causal=causal):
        agree(core, mask, lambda *x: local(core, fixed, *x))


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_of_the_layer_is_predicted_from_the_mean_of_its_keys(causal: bool) -> None:
    core = build(LocalTransformer.Config(window_from="layer"), causal=causal)
    for mask in masks(20, causal=causal):
        agree(core, mask, lambda *x: local(core, None, *x))
    assert isinstance(core, LocalTransformer)
    mask, (q, k, _) = AttentionMask(20, 20, False), inputs(20)
    # Every query weighs keys by the same parabola, at a place of its own.
    bends = core.gaussian(q, k, mask).diff(n=2)  # [B, H, T, S - 2]
    torch.testing.assert_close(bends, bends[:, :, :1, :1].expand_as(bends))
    assert bends[:, :, 0, 0].unique().numel() == bends[:, :, 0, 0].numel(), "each head and sample has its own"


def test_a_window_that_is_given_is_not_predicted() -> None:
    config = LocalTransformer.Config(window_from="layer", fixed_window=10.0)
    (problem,) = LocalTransformer.check(config, dims(), "core")
    assert str(problem).startswith("core.window_from: the window is given, fixed_window=10.0, so it is not predicted")
    assert "Take query, or core.fixed_window=null." in str(problem)


def test_cross_attention_looks_around_a_place_of_the_other_sequence() -> None:
    core = build(LocalTransformer.Config(), causal=True, cross=True)
    agree(core, AttentionMask(7, 12, False), lambda *x: local(core, None, *x))


@pytest.mark.parametrize("causal", [True, False])
def test_a_wide_window_is_softmax_attention(causal: bool) -> None:
    core, plain = (
        build(LocalTransformer.Config(fixed_window=1e8), causal=causal),
        build(Softmax.Config(), causal=causal),
    )
    for mask in masks(40, causal=causal):
        q, k, v = inputs(mask.queries, mask.keys)
        torch.testing.assert_close(core(q, k, v, mask), plain(q, k, v, mask), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_narrowest_window_leaves_the_nearest_key(dtype: torch.dtype) -> None:
    core: Any = build(LocalTransformer.Config(), causal=False)
    with torch.no_grad():
        core.hidden.copy_(100 * torch.eye(WIDTH))
        core.center.zero_()
        core.window.fill_(-1000.0)
    core.to(dtype)
    q, k, v = (x.detach().abs().to(dtype).requires_grad_() for x in inputs(40, groups=HEADS))
    out = core(q, k, v, AttentionMask(40, 40, False))
    assert torch.allclose(out, v[:, :, 20:21].expand_as(out), atol=0.05)
    out.float().square().sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v, core.window, core.center, core.hidden))
