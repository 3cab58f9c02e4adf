"""linear_attention's chunks against the token-by-token definition, forward and gradients."""

import pytest
import torch

from xscale_kernels.linear_attention import linear_attention


def inputs(T: int, gated: bool, stated: bool) -> list[torch.Tensor]:
    drawn = [torch.randn(2, 3, T, width) for width in (5, 5, 4)]
    drawn += [-torch.rand(2, 3, T)] if gated else []
    return drawn + ([torch.randn(2, 3, 5, 4)] if stated else [])


def test_two_halves_with_the_state_between_are_the_whole() -> None:
    q, k, v, gate = (each.double() for each in inputs(12, True, False))
    whole, last = linear_attention(q, k, v, log_decay=gate, chunk=4)
    first, state = linear_attention(q[:, :, :7], k[:, :, :7], v[:, :, :7], log_decay=gate[..., :7], chunk=4)
    second, end = linear_attention(q[:, :, 7:], k[:, :, 7:], v[:, :, 7:], log_decay=gate[..., 7:], state=state, chunk=4)
    torch.testing.assert_close(torch.cat((first, second), 2), whole)
    torch.testing.assert_close(end, last)


def test_strong_decay_neither_overflows_nor_leaks() -> None:
    q, k, v = inputs(12, False, False)
    gate = torch.full((2, 3, 12), -200.0)
    out, _ = linear_attention(q, k, v, log_decay=gate, chunk=4)
    torch.testing.assert_close(out, (q * k).sum(-1, keepdim=True) * v)


def test_faults_are_named() -> None:
    q, k, v = inputs(6, False, False)
    with pytest.raises(ValueError, match=r"log_decay is \[B, H, T\]"):
        linear_attention(q, k, v, log_decay=torch.zeros(2, 3))
