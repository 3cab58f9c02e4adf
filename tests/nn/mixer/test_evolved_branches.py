"""The convolution branches of the Evolved Transformer against the paper's blocks, one token and one tap at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import WIDTH, close, dims, drawn, ready, tokens
from xscale.core.config import decode
from xscale.nn.blocks.block import Block, BlockConfig
from xscale.nn.dims import Dims
from xscale.nn.mixer.evolved_branches import EvolvedBranches

LENGTH = 21
DOCUMENTS = torch.tensor([[0] * LENGTH, [0] * 8 + [1] * (LENGTH - 8)])


def places(t: int, size: int, causal: bool, documents: Tensor) -> list[int | None]:
    """Tokens under the taps of a window at t; None: zero, beyond the ends or in another document."""
    first = t - size + 1 if causal else t - (size - 1) // 2
    near = range(first, first + size)
    return [s if 0 <= s < LENGTH and documents[s] == documents[t] else None for s in near]


def depthwise(x: Tensor, kernel: Tensor, causal: bool, documents: Tensor) -> Tensor:
    """Convolve each channel of x [T, C] with its kernel [C, k]."""
    rows = []
    for t in range(LENGTH):
        taps = enumerate(places(t, kernel.shape[1], causal, documents))
        rows.append(sum((kernel[:, j] * x[s] for j, s in taps if s is not None), torch.zeros(x.shape[1]).double()))
    return torch.stack(rows)


def padded(x: Tensor, width: int) -> Tensor:
    return torch.cat((x, x.new_zeros(len(x), width - x.shape[1])), 1)


def literal(part: Any, x: Tensor, form: str, causal: bool, documents: Tensor) -> Tensor:
    """So et al. 2019, figure 3, for one sequence [T, D]."""
    branches, separable = part.branches, part.separable
    left, right = branches.left_map, branches.right_map
    if form == "encoder":
        wide = torch.clamp(x @ left.weight.T + left.bias, min=0)
        rows = []
        for t in range(LENGTH):
            row = right.bias
            for j, s in enumerate(places(t, 3, causal, documents)):
                row = row if s is None else row + right.weight[:, j * WIDTH : (j + 1) * WIDTH] @ x[s]
            rows.append(torch.clamp(row, min=0))
        h = wide + padded(torch.stack(rows), 4 * WIDTH)
    else:
        wide = depthwise(x, branches.left_depthwise.kernel, causal, documents) @ left.weight.T + left.bias
        narrow = depthwise(x, branches.right_depthwise.kernel, causal, documents) @ right.weight.T + right.bias
        h = torch.clamp(wide, min=0) + padded(narrow, 2 * WIDTH)
    h = torch.nn.functional.layer_norm(h, h.shape[-1:], part.norm.weight, part.norm.bias)
    y = depthwise(h, separable.depthwise.kernel, causal, documents) @ separable.map.weight.T + separable.map.bias
    return padded(y, WIDTH)


@pytest.mark.parametrize("form", ["encoder", "decoder"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_it_is_the_papers_pair_of_branches(form: Any, causal: bool, apart: bool) -> None:
    part = ready(EvolvedBranches(EvolvedBranches.Config(form=form), dims(length=LENGTH, causal=causal)))
    sizes = {"encoder": (WIDTH * 4, WIDTH // 2, WIDTH // 2, 9), "decoder": (WIDTH * 2, WIDTH // 2, WIDTH, 7)}[form]
    weights = part.branches.left_map.weight, part.branches.right_map.weight, part.separable.map.weight
    assert (*(len(weight) for weight in weights), part.separable.depthwise.kernel.shape[1]) == sizes
    x = drawn(2, LENGTH, WIDTH).requires_grad_()
    documents = DOCUMENTS if apart else torch.zeros_like(DOCUMENTS)
    wanted = torch.stack([literal(part, row, form, causal, of) for row, of in zip(x, documents, strict=True)])
    out = part(x, tokens(LENGTH, documents=DOCUMENTS if apart else None))
    assert close(out, wanted)
    above, leaves = drawn(*out.shape, seed=3), [x, *part.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad((y * above).sum(), leaves) for y in (out, wanted)), strict=True):
        assert close(ours, theirs)
        assert ours.any()


def block(sublayers: list[dict[str, Any]], **changes: Any) -> tuple[BlockConfig, Dims]:
    section = {"mixer": {"kind": "attention", "heads": 2}, "ffn": {"kind": "dense", "hidden": 9}, **changes}
    return decode(BlockConfig, {**section, "sublayers": sublayers}), dims(width=8)


def test_a_parallel_sublayer_reads_the_input_of_the_one_before() -> None:
    """y = x + self_attention(norm_1(x)) + cross_attention(norm_2(x)), then the ffn reads y."""
    sublayers: list[dict[str, Any]] = [{"part": "mixer"}, {"part": "cross", "parallel": True}, {"part": "ffn"}]
    made: Any = ready(Block(*block(sublayers), cross=True))
    x, memory, about, source = drawn(2, 5, 8), drawn(2, 9, 8, seed=1), tokens(5), tokens(9)
    y = x + made.mixer.part(made.mixer.norm(x), about)
    y = y + made.cross.part(made.cross.norm(x), about, memory, source)
    wanted = y + made.ffn.part(made.ffn.norm(y), about)
    assert close(made(x, about, memory, source), wanted)


def test_what_cannot_be_is_refused_with_what_would_work() -> None:
    first: list[dict[str, Any]] = [{"part": "mixer", "parallel": True}, {"part": "ffn"}]
    (problem,) = Block.check(*block(first), "block")
    assert str(problem) == "block.sublayers.0.parallel: the first sublayer has none before it. Take false."
    second: list[dict[str, Any]] = [{"part": "mixer"}, {"part": "ffn", "parallel": True}]
    assert Block.check(*block(second), "block") == []
    (problem,) = Block.check(*block(second, residual="post"), "block")
    assert "residual 'post' leaves no sum that both sublayers could be added to" in str(problem)
    assert "Take false, or block.residual.kind=pre" in str(problem)
    (problem,) = EvolvedBranches.check(EvolvedBranches.Config(), dims(width=33), "mixer")
    assert "a branch has half of the channels, and width=33 is odd. Take 34." in str(problem)
