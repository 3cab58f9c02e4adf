"""Transformer-LS against its definition, one query at a time."""

import pytest
import torch
from torch import Tensor

from tests.nn.attention.literal import agree, build, masks
from xscale.nn.attention.transformer_ls import TransformerLs


def window_of(query: int, length: int, window: int | None, *, causal: bool) -> slice:
    """Keys of a query: in a causal model its latest w, itself among them (the authors' code); otherwise the w tokens
    in a row that it is one of, and w/2 on each side (section 3.2). Without w the own and neighbouring segments of 8."""
    if window is None:
        segment = query // 8
        return slice(max(0, (segment - 1) * 8), query + 1 if causal else min(length, (segment + 2) * 8))
    if causal:
        return slice(max(0, query - window + 1), query + 1)
    begin = query // window * window
    return slice(max(0, begin - window // 2), min(length, begin + window + window // 2))


@pytest.mark.parametrize("window", [None, 4, 12, 20], ids=["one length", "shorter", "longer", "no multiple"])
@pytest.mark.parametrize("causal", [True, False])
def test_each_query_sees_its_window_and_the_slots(causal: bool, window: int | None) -> None:
    core = build(TransformerLs.Config(segment=8, projection_rank=3, window=window), causal=causal)

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain

    def slots(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        shares = torch.softmax(k @ core.mix, 2).mT
        return norm(shares @ k, core.gains[2]), norm(shares @ v, core.gains[3])

    def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        first, length, out = k.shape[2] - q.shape[2], k.shape[2], []
        for at in range(q.shape[2]):
            segment = (first + at) // 8
            near = window_of(first + at, length, window, causal=causal)
            keys, values = [norm(k[:, :, near], core.gains[0])], [norm(v[:, :, near], core.gains[1])]
            spans = [slice(8 * s, 8 * s + 8) for s in range(segment)] if causal else [slice(0, length)]
            for span in spans:
                slot_k, slot_v = slots(k[:, :, span], v[:, :, span])
                keys.append(slot_k)
                values.append(slot_v)
            weights = torch.softmax(q[:, :, at : at + 1] @ torch.cat(keys, 2).mT / 8**0.5, -1)
            out.append(weights @ torch.cat(values, 2))
        return torch.cat(out, 2)

    for mask in masks(53, causal=causal, documents=False):
        agree(core, mask, reference, tolerance=1e-8)
