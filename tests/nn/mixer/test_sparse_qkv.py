"""Sparse QKV against the paper's equations, one channel and one tap at a time, its cache and what it refuses."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import WIDTH, close, dims, drawn, ready, tokens
from xscale.nn.attention.reformer import Reformer
from xscale.nn.mixer.sparse_qkv import ModuleConvolution, MultiplicativeLinear, SparseQkv
from xscale.nn.position.music_transformer import MusicTransformer

LENGTH, HEADS = 9, 4


def mixer(*, causal: bool = True, **changes: Any) -> SparseQkv:
    config, around = SparseQkv.Config(**{"heads": HEADS, **changes}), dims(length=LENGTH, causal=causal)
    assert SparseQkv.check(config, around, "mixer") == []
    return ready(SparseQkv(config, around))


def multiplied(part: SparseQkv, x: Tensor) -> Tensor:
    """y_{s,m} = sum_i x_i D_{i,s} E_{i,m}: [B, T, S, M]."""
    d, e = part.projection.multiplicative.scale.mT, part.projection.multiplicative.weight.mT
    columns = [[(x * d[:, s] * e[:, m]).sum(-1) for m in range(e.shape[1])] for s in range(d.shape[1])]
    return torch.stack([torch.stack(column, -1) for column in columns], -2)


def convolved(conv: ModuleConvolution, y: Tensor, documents: Tensor, causal: bool) -> Tensor:
    """Each output is a sum over the tokens and modules of the window that exist, in the token's document."""
    near, modules = conv.weight.shape[2:]
    first = 1 - near if causal else -(near // 2)
    rows = []
    for b in range(y.shape[0]):
        for t in range(LENGTH):
            for s in range(y.shape[2]):
                total = torch.zeros(y.shape[3]).double() if conv.bias is None else conv.bias
                for a in range(near):
                    for c in range(modules):
                        at, module = t + first + a, s - modules // 2 + c
                        if 0 <= at < LENGTH and 0 <= module < y.shape[2] and documents[b, at] == documents[b, t]:
                            total = total + conv.weight[:, :, a, c] @ y[b, at, module]
                rows.append(total)
    return torch.stack(rows).view(*y.shape[:2], -1)


def attended(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
    heads = []
    for h in range(HEADS):
        part = slice(h * WIDTH // HEADS, (h + 1) * WIDTH // HEADS)
        scores = q[..., part] @ k[..., part].mT / math.sqrt(WIDTH // HEADS)
        heads.append(scores.masked_fill(~shown, float("-inf")).softmax(-1) @ v[..., part])
    return torch.cat(heads, -1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"modules": 8, "bias": False, "output": True},
        {"modules": 2, "length_kernel": 2, "module_kernel": 1},
        {"shared_qk": True, "module_kernel": 5},
    ],
    ids=str,
)
def test_it_is_the_papers_layer(causal: bool, changes: dict[str, Any]) -> None:
    part, x = mixer(causal=causal, **changes), drawn(2, LENGTH, WIDTH).requires_grad_()
    documents = torch.tensor([[0] * LENGTH, [0] * 4 + [1] * 5])
    shown = documents[:, :, None] == documents[:, None]
    projection, y = part.projection, multiplied(part, x)
    q, v = (convolved(conv, y, documents, causal) for conv in (projection.q, projection.v))
    k = q if projection.k is None else convolved(projection.k, y, documents, causal)
    assert (projection.k is None) == changes.get("shared_qk", False)
    wanted = attended(q, k, v, shown.tril() if causal else shown)
    if part.output is not None:
        wanted = wanted @ part.output.weight.mT
    out = part(x, tokens(LENGTH, documents=documents))
    assert close(out, wanted)
    above, leaves = drawn(*out.shape, seed=3), [x, *part.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad((y * above).sum(), leaves) for y in (out, wanted)), strict=True):
        assert close(ours, theirs)
        assert ours.any()


def test_few_tokens_and_many_are_multiplied_alike() -> None:
    layer, x = ready(MultiplicativeLinear(WIDTH, 4, dims().init)), drawn(1, 12, WIDTH)
    assert close(torch.cat([layer(x[:, at : at + 1]) for at in range(12)], 1), layer(x))


def test_it_can_permute_the_channels() -> None:
    """Section 3.2: D has a 1 where channel i goes to module s, E where it goes to channel m of it."""
    layer, x = ready(MultiplicativeLinear(WIDTH, 4, dims().init)), drawn(2, 5, WIDTH)
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        layer.scale.zero_()
        layer.weight.zero_()
        for target, source in enumerate(order.tolist()):
            layer.scale[target // 8, source] = 1
            layer.weight[target % 8, source] = 1
        assert close(layer(x), x[..., order])


def test_weights_are_fewer_than_those_of_dense_projections() -> None:
    part = mixer()
    channels = WIDTH // HEADS
    expected = WIDTH * (HEADS + channels) + 3 * (channels * channels * 9 + channels)
    assert sum(parameter.numel() for parameter in part.parameters()) == expected


def test_generation_keeps_two_tokens_beside_the_keys_and_values() -> None:
    part = mixer()
    cache: dict[str, Any] = {}
    part(drawn(2, LENGTH, WIDTH), tokens(LENGTH, cache=cache))
    assert cache[part.projection.path].shape == (2, 2, WIDTH)
    assert set(cache) == {part.path, part.projection.path}


def test_a_hashing_core_shares_queries_and_keys() -> None:
    part = SparseQkv(SparseQkv.Config(heads=HEADS, core=Reformer.Config()), dims())
    assert part.shared_qk
    assert part.projection.k is None


def test_bad_settings_are_refused_with_what_would_work() -> None:
    def problems(**changes: Any) -> list[str]:
        return [str(problem) for problem in SparseQkv.check(SparseQkv.Config(**changes), dims(), "mixer")]

    (problem,) = problems(heads=5)
    assert problem.startswith("mixer.heads: heads=5 does not divide width=32. Take 1, 2, 4 or 8.")
    (problem,) = problems(heads=4, modules=5)
    assert problem.startswith("mixer.modules: modules=5 does not divide width=32")
    (problem,) = problems(heads=4, module_kernel=2)
    assert problem == "mixer.module_kernel: module_kernel=2 has no middle. Take 1 or 3."
    (problem,) = problems(heads=4, position=MusicTransformer.Config())
    assert "position 'music_transformer' projects its embeddings as tokens, which have no neighbours here" in problem
    assert "or mixer.kind=attention." in problem
