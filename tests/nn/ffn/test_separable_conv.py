"""The separable transition of Universal Transformers, against sums written out token by token."""

import pytest
import torch
from torch import Tensor

from tests.conformance.made import close, drawn, ready
from xscale.conformance.small_parts import dims, numbered, tokens
from xscale.nn.ffn.separable_conv import SeparableConv

WIDTH, HIDDEN, LENGTH = 6, 10, 13


def separable(x: Tensor, kernel: Tensor, point: Tensor, bias: Tensor, first: int) -> Tensor:
    """A separable convolution of one document x [T, C] (Chollet 2017): each channel over the tokens, then each token
    over the channels. The kernel [C, k] begins `first` tokens before a token, and zeros stand beyond the ends."""
    out = torch.zeros(len(x), len(point), dtype=x.dtype)
    for at in range(len(x)):
        mixed = torch.zeros(x.shape[1], dtype=x.dtype)
        for tap in range(kernel.shape[1]):
            place = at - first + tap
            if 0 <= place < len(x):
                mixed = mixed + kernel[:, tap] * x[place]
        out[at] = point @ mixed + bias
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", [(3, 5), (1, 4)])
def test_it_is_two_separable_convolutions_around_a_relu(causal: bool, sizes: tuple[int, int]) -> None:
    part = ready(
        SeparableConv(SeparableConv.Config(hidden=HIDDEN, kernel_sizes=sizes), dims(width=WIDTH, causal=causal))
    )
    x, documents = drawn(2, LENGTH, WIDTH), numbered(5, 1, LENGTH - 6)
    # TensorFlow's padding LEFT, and SAME, which has the smaller half of an even kernel before a token.
    before = [size - 1 if causal else (size - 1) // 2 for size in sizes]
    rows = []
    for row in x:
        pieces = []
        for piece in row.split([5, 1, LENGTH - 6]):
            h = separable(piece, part.mix.weight, part.up.weight, part.up.bias, before[0]).relu()
            pieces.append(separable(h, part.mix_hidden.weight, part.down.weight, part.down.bias, before[1]))
        rows.append(torch.cat(pieces))
    assert close(part(x, tokens(LENGTH, documents=documents)), torch.stack(rows))
