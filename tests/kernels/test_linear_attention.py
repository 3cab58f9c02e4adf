"""linear_attention's chunks against the token-by-token definition, forward and gradients."""

from collections.abc import Callable

import pytest
import torch

from xscale_kernels.linear_attention import linear_attention, reference

PRECISIONS = [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]


def inputs(T: int, gated: bool, stated: bool) -> list[torch.Tensor]:
    drawn = [torch.randn(2, 3, T, width) for width in (5, 5, 4)]
    drawn += [-torch.rand(2, 3, T)] if gated else []
    return drawn + ([torch.randn(2, 3, 5, 4)] if stated else [])


@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("T", [1, 13])
def test_forward_and_gradients(
    agree: Callable[..., None], dtype: torch.dtype, bound: float, gated: bool, packed: bool, stated: bool, T: int
) -> None:
    documents = torch.randint(0, 3, (2, T)).sort(1).values if packed else None

    def both(function: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., torch.Tensor]:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            gate, state = rest[0] if gated else None, rest[-1] if stated else None
            out, last = function(q, k, v, gate, documents, state)
            return torch.cat((out.flatten(), last.flatten().to(out.dtype)))

        return run

    agree(
        both(lambda q, k, v, g, d, s: linear_attention(q, k, v, log_decay=g, documents=d, state=s, chunk=4)),
        both(reference.linear_attention),
        inputs(T, gated, stated),
        dtype,
        bound,
    )


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


def test_gradcheck_registration_and_compile() -> None:
    q, k, v, gate, state = (each.double().requires_grad_() for each in inputs(6, True, True))
    documents = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 2]])

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return linear_attention(*given[:3], log_decay=given[3], documents=documents, state=given[4], chunk=4)

    assert torch.autograd.gradcheck(run, (q, k, v, gate, state))
    arguments = (q, k, v, gate, documents, state, False, 4, "")
    torch.library.opcheck(torch.ops.xscale.linear_attention.default, arguments)
    whole = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(q, k, v, gate, state)[0], run(q, k, v, gate, state)[0])


def test_faults_are_named() -> None:
    q, k, v = inputs(6, False, False)
    with pytest.raises(ValueError, match=r"log_decay is \[B, H, T\]"):
        linear_attention(q, k, v, log_decay=torch.zeros(2, 3))
