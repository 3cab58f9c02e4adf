"""The delta rule by chunks against its recurrence, one token at a time."""

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.nn.attention.literal import agree, build, masks
from xscale.nn.attention.delta import Delta
from xscale_kernels.delta_rule import chunked


@pytest.mark.parametrize("features", [1, 1 << 18])
def test_it_is_the_recurrence(features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one chunk, and one piece, give the same."""
    monkeypatch.setattr(chunked, "SEGMENT_FEATURES", features)
    core = build(Delta.Config(nu=2), causal=True)

    def features(x: Tensor) -> Tensor:
        both = torch.cat((x, -x), -1).clamp(min=0)
        columns = [both[..., i] * both[..., (i - j) % 16] for j in (1, 2) for i in range(16)]
        x = torch.stack(columns, -1)
        return x / (x.sum(-1, keepdim=True) + 1e-6)

    def reference(documents: Tensor | None, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        strength = torch.sigmoid((k * core.gate[:, None, :8]).sum(-1) + core.gate[:, None, 8])
        fq, fk = features(q), features(k)
        state = torch.zeros(2, 4, 32, 8, dtype=q.dtype)
        first, out = k.shape[2] - q.shape[2], []
        for at in range(k.shape[2]):
            if documents is not None and at:
                state = state * (documents[:, at] == documents[:, at - 1])[:, None, None, None]
            old = (fk[:, :, at, :, None] * state).sum(-2)
            change = strength[:, :, at, None] * (v[:, :, at] - old)
            state = state + fk[:, :, at, :, None] * change[:, :, None]
            if at >= first:
                out.append((fq[:, :, at - first, :, None] * state).sum(-2))
        return torch.stack(out, 2)

    for mask in masks(150, causal=True):
        agree(core, mask, partial(reference, mask.key_documents))
