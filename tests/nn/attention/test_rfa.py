"""Random feature attention against its recurrence, gated and not."""

import pytest
import torch
from torch import Tensor

from tests.nn.attention.literal import agree, build, drawn, masks
from xscale.nn.attention.rfa import Rfa


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_the_quadratic_estimate(causal: bool) -> None:
    core = build(Rfa.Config(features=400), causal=causal, spread=0.1)
    w = core.projection(drawn(1), None)

    def features(x: Tensor) -> Tensor:
        along = x / x.norm(dim=-1, keepdim=True) * core.sigma[:, None] @ w.mT
        return torch.cat((along.sin(), along.cos()), -1)

    def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        weights = torch.where(seen, features(q) @ features(k).mT / 400, 0)
        least = seen.sum(-1, keepdim=True) / 800
        return weights @ v / torch.maximum(weights.sum(-1, keepdim=True), least)

    for mask in masks(100, causal=causal):
        agree(core, mask, reference, tolerance=1e-7)


@pytest.mark.long
def test_the_gate_is_the_recurrence() -> None:
    core = build(Rfa.Config(features=32, gated=True), causal=True, spread=0.3)
    w = core.projection(drawn(1), None)

    def features(x: Tensor) -> Tensor:
        along = x / x.norm(dim=-1, keepdim=True) * core.sigma[:, None] @ w.mT
        return torch.cat((along.sin(), along.cos()), -1) / 32**0.5

    def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        gate = torch.sigmoid((k * core.gate[:, None, :8]).sum(-1) + core.gate[:, None, 8])[..., None]
        first = k.shape[2] - q.shape[2]
        out = []
        for at in range(q.shape[2]):
            state, sums = torch.zeros(2, 4, 64, 8, dtype=q.dtype), torch.zeros(2, 4, 64, dtype=q.dtype)
            for j in range(first + at + 1):
                here = seen[:, :, at, j, None]
                g, f = gate[:, :, j], features(k[:, :, j : j + 1])[:, :, 0]
                state = torch.where(
                    here[..., None], g[..., None] * state + (1 - g)[..., None] * f[..., None] * v[:, :, j, None], state
                )
                sums = torch.where(here, g * sums + (1 - g) * f, sums)
            read = features(q[:, :, at : at + 1])[:, :, 0]
            out.append((read[..., None] * state).sum(-2) / (read * sums).sum(-1, keepdim=True))
        return torch.stack(out, 2)

    for mask in masks(70, causal=True)[1:]:
        agree(core, mask, reference, tolerance=1e-6)
