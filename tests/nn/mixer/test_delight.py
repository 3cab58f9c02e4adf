"""DeLighT against the paper's equations, one group at a time, and its sizes over depth."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import WIDTH, close, dims, drawn, ready, tokens
from xscale.nn.attention.reformer import Reformer
from xscale.nn.linear import Linear
from xscale.nn.mixer.delight import Delight, GroupLinear, Transformation, group_sizes, largest_groups, layers_and_width

LENGTH = 7


def mixer(*, causal: bool = True, **changes: Any) -> Delight:
    settings = {"min_layers": 3, "max_layers": 5, "max_groups": 4, **changes}
    config, around = Delight.Config(**settings), dims(length=LENGTH, causal=causal, layer=1)
    assert Delight.check(config, around, "mixer") == []
    return ready(Delight(config, around))


def transformed(part: Transformation, x: Tensor) -> Tensor:
    """Y^N of one token x [D]; H takes channel c of group 1, of group 2 ..., before channel c + 1 of group 1."""
    made: list[Tensor] = []
    for layer in part.layers:
        assert isinstance(layer, GroupLinear)
        groups = len(layer.weight)
        rows = list(x.chunk(groups))
        if made:
            order = torch.stack([group[at] for at in range(len(made[0])) for group in made])
            rows = [torch.cat(pair) for pair in zip(rows, order.chunk(groups), strict=True)]
        mapped = [layer.weight[g] @ row + layer.bias[g] for g, row in enumerate(rows)]
        made = [y * (1 + torch.erf(y / 2**0.5)) / 2 for y in mapped]
    return torch.cat(made)


def biases(linear: Linear) -> Tensor:
    assert linear.bias is not None
    return linear.bias


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_the_papers_block(causal: bool) -> None:
    part, x = mixer(causal=causal), drawn(2, LENGTH, WIDTH).requires_grad_()
    assert part.transformation.groups == [1, 2, 4, 2, 1]
    y = torch.stack([torch.stack([transformed(part.transformation, token) for token in row]) for row in x])
    assert y.shape == (2, LENGTH, WIDTH // 2)
    assert part.k is not None
    q, k, v = (torch.einsum("btc,dc->btd", y, linear.weight) + biases(linear) for linear in (part.q, part.k, part.v))
    scores = q @ k.mT / math.sqrt(WIDTH // 2)
    if causal:
        scores = scores.masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), float("-inf"))
    wanted = scores.softmax(-1) @ v @ part.o.weight.mT + biases(part.o)
    out = part(x, tokens(LENGTH))
    assert close(out, wanted)
    above, leaves = drawn(*out.shape, seed=3), [x, *part.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad((y * above).sum(), leaves) for y in (out, wanted)), strict=True):
        assert close(ours, theirs)


def test_blocks_near_the_output_are_deeper_and_wider() -> None:
    """N^b = 4 + 4 b / 4 and w^b = 2 + 4 b / (4 * 4) for five blocks."""
    config = Delight.Config()
    assert [layers_and_width(config, b, 5) for b in range(5)] == [(4, 2.0), (5, 2.25), (6, 2.5), (7, 2.75), (8, 3.0)]
    assert layers_and_width(config, 0, 1) == (4, 2.0)


def test_channels_widen_and_narrow_linearly_while_groups_double_and_halve() -> None:
    assert group_sizes(4, 2.0, 128, 4) == [(1, 192), (2, 256), (2, 160), (1, 64)]
    assert group_sizes(6, 3.0, 128, 4) == [(1, 214), (2, 300), (4, 384), (4, 280), (2, 172), (1, 64)]
    assert group_sizes(8, 2.0, 128, 4)[3:5] == [(4, 256), (4, 208)]
    assert [largest_groups(Delight.Config(), width) for width in (16, 32, 128, 768)] == [1, 1, 4, 16]
    assert mixer(max_layers=3).transformation.groups == [1, 2, 1]


def test_bad_settings_are_refused_with_what_would_work() -> None:
    def problems(**changes: Any) -> list[str]:
        return [str(problem) for problem in Delight.check(Delight.Config(**changes), dims(), "mixer")]

    (problem,) = problems(min_layers=6, max_layers=4)
    assert problem.startswith("mixer.max_layers: max_layers=4 is below min_layers=6. Take 6. Or more")
    (problem,) = problems(max_groups=6)
    assert problem == "mixer.max_groups: max_groups=6 is no power of two. Take 4."
    (problem,) = problems(max_groups=32)
    assert problem.startswith(
        "mixer.max_groups: width=32 is no multiple of twice the 32 groups. Take 1, 2, 4, 8 or 16, or"
    )
    (problem,) = problems(core=Reformer.Config())
    assert problem.startswith(
        "mixer.core: mixer 'delight' cannot hold the core 'reformer'. Take mixer.core.kind=softmax, block_sparse"
    )
