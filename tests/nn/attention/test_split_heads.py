"""Heads of several cores in one layer: each core's numbers on its heads, and what the cores can do together."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import close, dims, drawn, ready
from tests.nn.attention.literal import agree, build, masks
from xscale.core.config import decode
from xscale.nn.attention.block_sparse import BlockSparse
from xscale.nn.attention.linformer import Linformer
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.attention.routing_transformer import RoutingTransformer
from xscale.nn.attention.softmax import Softmax
from xscale.nn.attention.split_heads import SplitHeads
from xscale.nn.mixer.attention import Attention
from xscale.nn.pattern.window import Window
from xscale.nn.position.pairs import Pairs
from xscale.nn.position.relative import Relative
from xscale.nn.tokens import Tokens

LOCAL = BlockSparse.Config(pattern=Window.Config(), block=4)
ROUTED = RoutingTransformer.Config(clusters=4, window=6)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("shares", [(1, 1), (1, 3), (2, 2)])
def test_each_core_has_its_heads(shares: tuple[int, int], groups: int) -> None:
    """Heads take turns: L R L R, or L R R R."""
    core = build(SplitHeads.Config(cores=(LOCAL, ROUTED), shares=shares), causal=True)
    assert isinstance(core, SplitHeads)
    turn = [0, 1, 1, 1] if shares == (1, 3) else [0, 1, 0, 1]

    for mask in masks(30, causal=True):

        def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, mask: AttentionMask = mask) -> Tensor:
            out = torch.zeros_like(q)
            for kind, part in enumerate(core.cores):
                heads = [head for head in range(4) if turn[head] == kind]
                out = out.index_copy(1, torch.tensor(heads), part(q[:, heads], k[:, heads], v[:, heads], mask))
            return out

        agree(core, mask, reference, groups=groups, tolerance=1e-8)


def test_a_bias_is_that_of_the_cores_heads() -> None:
    core = build(SplitHeads.Config(cores=(LOCAL, Softmax.Config())), causal=True)
    assert isinstance(core, SplitHeads)
    bias = torch.randn(1, 4, 20, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        outs = [
            part(q[:, at::2], k[:, at::2], v[:, at::2], AttentionMask(20, 20, True, bias=bias[:, at::2]))
            for at, part in enumerate(core.cores)
        ]
        return torch.stack(outs, 2).flatten(1, 2)

    agree(core, AttentionMask(20, 20, True, bias=bias), reference)


@pytest.mark.parametrize("kind", ["shaw", "transformer_xl", "relative"])
@pytest.mark.parametrize("causal", [True, False])
def test_relative_positions_of_block_sparse_heads(kind: str, causal: bool) -> None:
    """Against all scores with the position's terms, of which block-sparse heads keep those of the pattern's blocks."""
    sizes, length, block, window = dims(causal=causal), 22, 4, 3
    local = {"kind": "block_sparse", "block": block, "pattern": {"kind": "window", "window": window}}
    core = {"kind": "split_heads", "cores": [local, {"kind": "softmax"}], "shares": [3, 1]}
    mixer = ready(Attention(decode(Attention.Config, {"heads": 4, "core": core, "position": {"kind": kind}}), sizes))
    x, place = drawn(2, length, 32).requires_grad_(), torch.arange(length)
    before, position = place[:, None] - place, mixer.position  # [T, S]
    assert position is not None
    near = ((place // block)[:, None] - place // block).abs() <= window // 2
    seen = torch.stack([near, near, near, torch.ones_like(near)]) & ((before >= 0) | (not causal))  # [H, T, S]

    def literal(x: Tensor) -> Tensor:
        q, k, v = mixer.project(x, at(length))
        if position.adds_scores:
            terms = position.scores(q, k, Pairs(length, length, causal=causal))
        else:
            terms = position.bias(place[None], place[None])
        weights = (q @ k.mT * q.shape[-1] ** -0.5 + terms).masked_fill(~seen, float("-inf")).softmax(-1)
        o = weights @ v
        return mixer.project_output(
            o + position.values(weights, Pairs(length, length, causal=causal)) if position.adds_values else o
        )

    results = []
    for out in (mixer(x, at(length)), literal(x)):
        results.append([out, *torch.autograd.grad(out, [x, *mixer.parameters()], drawn(*out.shape, seed=5))])
    assert all(map(close, *results))


def at(length: int) -> Tokens:
    return Tokens.from_ids(torch.zeros(2, length, dtype=torch.long))


def test_traits_follow_from_the_cores() -> None:
    def traits(*cores: Any) -> Any:
        return SplitHeads.traits_of(SplitHeads.Config(cores=cores))

    both = traits(LOCAL, ROUTED)
    assert (both.causal, both.bidirectional, both.per_head, both.decode) == (True, True, True, True)
    assert (both.documents, both.bias, both.dropout, both.exact) == (False, False, False, False)
    assert both.running_stats
    assert (both.position_terms, traits(LOCAL, Softmax.Config()).position_terms) == (False, True)
    assert both.context == ("ulysses",)
    assert not traits(LOCAL, Linformer.Config()).causal
    assert traits(Softmax.Config(), Softmax.Config()).exact
    assert eval(both.cost, {"T": 8, "w": 4, "K": 2}) == (2 * 8 * 4 * 2 + 2 * 8 * 4 * 2 + 2 * 8 * 2 * 2) / 2


def test_refusals_name_the_core() -> None:
    def paths(model: Any = dims, **changes: Any) -> list[str]:
        config = Attention.Config(heads=changes.pop("heads", 4), **changes)
        return [problem.path for problem in Attention.check(config, model(width=32), "mixer")]

    assert paths(core=SplitHeads.Config(cores=(LOCAL, ROUTED))) == []
    assert paths(core=SplitHeads.Config(cores=(LOCAL, Linformer.Config()))) == ["mixer.core.cores.1"]
    assert paths(core=SplitHeads.Config(cores=(LOCAL, ROUTED)), dropout=0.1) == ["mixer.core.cores.1"]
    assert paths(core=SplitHeads.Config(cores=(LOCAL, ROUTED)), position=Relative.Config()) == ["mixer.core.cores.1"]
    assert paths(core=SplitHeads.Config(cores=(LOCAL, ROUTED), shares=(1, 4))) == ["mixer.core.shares"]
    assert paths(core=SplitHeads.Config(cores=(LOCAL, ROUTED), shares=(1, 1, 1))) == ["mixer.core.shares"]
    wrong = SplitHeads.Config(cores=(Softmax.Config(), Softmax.Config()), shares=(1,))
    assert SplitHeads.traits_of(wrong).causal, "a check of the whole model reads the traits of what it then refuses"
    inner = SplitHeads.Config(cores=(Softmax.Config(), Linformer.Config()))
    assert paths(core=SplitHeads.Config(cores=(LOCAL, inner))) == ["mixer.core.cores.1.cores.1"]
