"""Vocabulary-parallel pieces over simulated ranks against the whole loss."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from xscale_kernels.cross_entropy import Terms
from xscale_kernels.linear_cross_entropy import reference
from xscale_kernels.vocab_cross_entropy import Statistics, vocab_gradients, vocab_loss, vocab_statistics


@pytest.mark.parametrize("settings", [{}, {"softcap": 3.0, "z_loss": 0.1, "label_smoothing": 0.2}], ids=str)
@pytest.mark.parametrize("cuts", [[0, 11], [0, 4, 5, 11]], ids=str)
def test_ranks_together_are_one_device(settings: dict[str, Any], cuts: list[int]) -> None:
    terms = Terms(**settings)
    hidden, weight, bias = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((9, 4), (11, 4), (11,))
    )
    targets = torch.randint(0, 11, (9,))
    targets[2] = targets[8] = -100
    seed = torch.rand(9, dtype=torch.float64)
    expected = reference.linear_cross_entropy(hidden, weight, bias, targets, terms)
    dhidden, dweight, dbias = torch.autograd.grad(expected, (hidden, weight, bias), seed)
    parts = [slice(a, b) for a, b in pairwise(cuts)]
    local = [
        vocab_statistics(hidden, weight[part], targets, part.start, bias=bias[part], terms=terms, chunk=4)
        for part in parts
    ]
    combined = Statistics(
        torch.stack([each.lse for each in local]).logsumexp(0),
        torch.stack([each.picked for each in local]).sum(0),
        torch.stack([each.total for each in local]).sum(0),
    )
    torch.testing.assert_close(vocab_loss(combined, targets, 11, terms), expected)
    found = [
        vocab_gradients(
            hidden, weight[part], targets, part.start, combined.lse, seed, 11, bias=bias[part], terms=terms, chunk=4
        )
        for part in parts
    ]
    torch.testing.assert_close(torch.stack([each.hidden for each in found]).sum(0), dhidden)
    torch.testing.assert_close(torch.cat([each.weight for each in found]), dweight)
    torch.testing.assert_close(torch.cat([each.bias for each in found if each.bias is not None]), dbias)
