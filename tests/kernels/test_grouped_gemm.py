"""grouped_gemm against a loop of F.linear, forward and gradients."""

from typing import Any, get_args

import pytest
import torch

from xscale.nn.ffn.ffn import Activation, activation
from xscale_kernels.gated_activation import gated_activation
from xscale_kernels.grouped_gemm import blocks, gate_up, gated, grouped_gemm, plain
from xscale_kernels.select import UnusableError


def draw(counts: list[int], D: int, F: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(sum(counts), D, dtype=torch.float64)
    w = torch.randn(len(counts), F, D, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), torch.randn(sum(counts), F, dtype=dtype)


def test_strided_operands() -> None:
    x, w, _ = draw([4, 6], 6, 4, torch.float64)
    odd_x, odd_w = x.detach().t().contiguous().t(), w.detach().transpose(1, 2).contiguous().transpose(1, 2)
    # Another layout is another path through the BLAS, which may add in another order.
    torch.testing.assert_close(grouped_gemm(odd_x, odd_w, [4, 6]), grouped_gemm(x, w, [4, 6]), rtol=1e-14, atol=1e-14)


def test_compiles_whole_and_runs_on_meta() -> None:
    x, w, _ = draw([2, 0, 3], 3, 2, torch.float64)
    counts = torch.tensor([2, 0, 3])
    whole = torch.compile(lambda a, b, c: grouped_gemm(a, b, c), fullgraph=True, backend="aot_eager")
    assert torch.equal(whole(x, w, counts), grouped_gemm(x, w, counts))
    assert grouped_gemm(x.to("meta"), w.to("meta"), [2, 0, 3]).shape == (5, 2)


def test_flops_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x, w, _ = draw([2, 0, 3], 3, 2, torch.float64)
    with FlopCounterMode(display=False) as counter:
        grouped_gemm(x, w, [2, 0, 3]).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 5 * 3 * 2


def test_faults_are_named() -> None:
    x, w, _ = draw([2, 0, 3], 3, 2, torch.float64)
    with pytest.raises(ValueError, match="the counts sum to 4, x has 5 rows"):
        grouped_gemm(x, w, [2, 0, 2])
    with pytest.raises(ValueError, match="one count a group"):
        grouped_gemm(x, w, [2, 3])
    with pytest.raises(ValueError, match="one dtype"):
        grouped_gemm(x.float(), w, [2, 0, 3])
    with pytest.raises(UnusableError, match=r"Triton needs a GPU.*These can: cpu, reference"):
        grouped_gemm(x, w, [2, 0, 3], implementation="triton")


KINDS = ("glu", "bilinear", "reglu", "geglu", "swiglu")


def gated_case(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """x [31, 6], three weights of 4 experts with hidden 5, and counts with an empty group and one of a single row."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((31, 6), (4, 5, 6), (4, 5, 6), (4, 6, 5))
    drawn = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    return (*drawn, torch.tensor([20, 0, 10, 1]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [blocks.LEAST_ROWS, 4])
def test_gated_experts_in_one_operator(kind: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and gradients against the products and the activation one by one, in one block and in several."""
    monkeypatch.setattr(blocks, "LEAST_ROWS", block)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)
    x, gate, up, down, counts = gated_case()
    middle = gated_activation(grouped_gemm(x, gate, counts), grouped_gemm(x, up, counts), kind)
    wanted = grouped_gemm(middle, down, counts)
    got = gated.grouped_gated(x, gate, up, down, counts, kind)
    torch.testing.assert_close(got, wanted)
    seed = torch.randn(wanted.shape, dtype=wanted.dtype)
    for ours, theirs in zip(*(torch.autograd.grad(y, (x, gate, up, down), seed) for y in (got, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", [*KINDS, "geglu_tanh"])
def test_gate_and_up_as_one_product(kind: str) -> None:
    """Hidden layer and gradients in float64 against the two products one by one."""
    x, gate, up, _, counts = gated_case()
    wanted = gated_activation(grouped_gemm(x, gate, counts), grouped_gemm(x, up, counts), kind)
    got = gate_up.gate_up_hidden(x, gate, up, counts, kind)
    torch.testing.assert_close(got, wanted)
    seed = torch.randn(wanted.shape, dtype=wanted.dtype)
    for ours, theirs in zip(*(torch.autograd.grad(y, (x, gate, up), seed) for y in (got, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gated_experts_by_differences_and_by_torch() -> None:
    x, gate, up, down, counts = gated_case()
    assert torch.autograd.gradcheck(
        lambda *given: gated.grouped_gated(*given, counts, "swiglu"), (x, gate, up, down), fast_mode=True
    )
    torch.library.opcheck(torch.ops.xscale.grouped_gated.default, (x, gate, up, down, counts, "geglu"))


def test_gated_experts_refuse_counts_that_are_not_the_rows() -> None:
    x, gate, up, down, counts = gated_case()
    with pytest.raises(ValueError, match="the counts sum to 30, x has 31 rows"):
        gated.grouped_gated(x, gate, up, down, counts - torch.tensor([1, 0, 0, 0]), "swiglu")
    wide = torch.zeros(4, 64, 6, dtype=x.dtype)
    assert gated.supports(x, wide, "swiglu")
    assert not gated.supports(x, wide, "geglu_tanh")
    assert not gated.supports(x, wide.float(), "swiglu")
    assert not gated.supports(x, gate, "swiglu")
    assert not gated.supports(x.to("meta"), wide, "swiglu")


def plain_case(biased: bool) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """x [31, 6], two weights of 4 experts with hidden 5 and, if `biased`, two biases; and the counts."""
    x, up, _, down, counts = gated_case()
    biases = [torch.randn(size, dtype=x.dtype).requires_grad_() for size in ((4, 5), (4, 6))]
    return (x, up, down, *(biases if biased else ())), counts


def whole(given: tuple[torch.Tensor, ...], counts: torch.Tensor, kind: str) -> torch.Tensor:
    """The operator on what `plain_case` gives."""
    x, up, down, *biases = given
    up_bias, down_bias = biases or (None, None)
    return plain.grouped_plain(x, up, down, counts, kind, up_bias=up_bias, down_bias=down_bias)


@pytest.mark.parametrize("kind", sorted(plain.ACTIVATIONS))
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("block", [blocks.LEAST_ROWS, 4])
def test_plain_experts_in_one_operator(kind: Any, biased: bool, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and gradients against the maps and the activation one by one, in one block and in several."""
    monkeypatch.setattr(blocks, "LEAST_ROWS", block)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)
    given, counts = plain_case(biased)
    x, up, down, *biases = given
    spread = [bias.repeat_interleave(counts, dim=0) for bias in biases] or [0.0, 0.0]
    wanted = grouped_gemm(activation(kind)(grouped_gemm(x, up, counts) + spread[0]), down, counts) + spread[1]
    got = whole(given, counts, kind)
    torch.testing.assert_close(got, wanted)
    seed = torch.randn(wanted.shape, dtype=wanted.dtype)
    for ours, theirs in zip(*(torch.autograd.grad(y, given, seed) for y in (got, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_plain_experts_have_every_activation() -> None:
    assert set(plain.ACTIVATIONS) == set(get_args(Activation))


@pytest.mark.parametrize("biased", [False, True])
def test_plain_experts_by_differences_and_by_torch(biased: bool) -> None:
    given, counts = plain_case(biased)
    assert torch.autograd.gradcheck(lambda *these: whole(these, counts, "gelu"), given, fast_mode=True)
    x, up, down, *biases = given
    torch.library.opcheck(
        torch.ops.xscale.grouped_plain.default, (x, up, down, *(biases or (None, None)), counts, "relu")
    )


def test_plain_experts_refuse_what_does_not_fit() -> None:
    (x, up, down, up_bias, _), counts = plain_case(True)
    with pytest.raises(ValueError, match="the counts sum to 30, x has 31 rows"):
        plain.grouped_plain(x, up, down, counts - torch.tensor([1, 0, 0, 0]), "relu")
    with pytest.raises(ValueError, match="both biases or neither"):
        plain.grouped_plain(x, up, down, counts, "relu", up_bias=up_bias)
    wide = torch.zeros(4, 64, 6, dtype=x.dtype)
    assert plain.supports(x, wide, "relu")
    assert not plain.supports(x, wide, "swiglu")
    assert not plain.supports(x, wide.float(), "relu")
    assert not plain.supports(x, up, "relu")
    assert not plain.supports(x.to("meta"), wide, "relu")


def test_flops_of_whole_experts_are_those_of_their_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    given, counts = plain_case(False)
    with FlopCounterMode(display=False) as counter:
        whole(given, counts, "relu").sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 31 * 2 * 5 * 6
