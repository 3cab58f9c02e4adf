"""Peak memory of the operators. Peaks are read off the allocator, so a busy machine changes nothing."""

import pytest
import torch

from xscale.bench.harness.timing import peak_bytes
from xscale_kernels.cases import ForwardBackward
from xscale_kernels.linear_cross_entropy import linear_cross_entropy
from xscale_kernels.linear_cross_entropy.cases import _plain
from xscale_kernels.rmsnorm import rmsnorm
from xscale_kernels.rmsnorm.op import reference_rmsnorm


@pytest.fixture(autouse=True)
def poisoned() -> None:
    """Filling new memory is work that only other tests want."""


@pytest.mark.long
@pytest.mark.parametrize("words", [32768, 131072])
def test_the_loss_without_logits_takes_less_than_a_quarter(words: int) -> None:
    hidden = torch.randn(512, 16, requires_grad=True)
    weight = (torch.randn(words, 16) * 0.2).requires_grad_()
    targets = torch.randint(0, words, (512,))
    inputs = (hidden, weight, targets)
    ours, plain = (peak_bytes(ForwardBackward(way, inputs), "cpu") for way in (linear_cross_entropy, _plain))
    assert plain >= 2 * 512 * words * 4
    assert ours < plain / 4, f"{ours / 2**20:.0f} MB against {plain / 2**20:.0f}"


def test_a_norm_keeps_one_number_a_row() -> None:
    inputs = (torch.randn(512, 1024, requires_grad=True), torch.ones(1024, requires_grad=True))
    ours = peak_bytes(ForwardBackward(lambda x, w: rmsnorm(x, w, implementation="cpu"), inputs), "cpu")
    plain = peak_bytes(ForwardBackward(lambda x, w: reference_rmsnorm(x, w, 1e-6), inputs), "cpu")
    assert ours < plain * 0.75


@pytest.mark.long
def test_the_loss_in_half_precision_takes_less_than_a_quarter_at_wide_hidden_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """N=8192, V=131072, D=4096 at a sixteenth of each, with the GPU's order of allocations.

    The weight's gradient, which is summed in float32, is most of it. The launch and the products, which allocate
    nothing on a GPU, are stand-ins: a CPU without products in bfloat16 allocates their results in float32 too.
    """
    from xscale_kernels import torch_private
    from xscale_kernels.cross_entropy.op import LossTerms
    from xscale_kernels.linear_cross_entropy import chunked, triton
    from xscale_kernels.linear_cross_entropy.op import default_chunk

    N, V, D = 512, 8192, 256
    monkeypatch.setattr(chunked, "compute_dtype", lambda weight: weight.dtype)
    monkeypatch.setattr(chunked, "SLAB_BYTES", chunked.SLAB_BYTES // 16**2)
    monkeypatch.setattr(torch_private, "accumulate_product_", lambda total, *_: total.zero_())
    monkeypatch.setattr(triton.softmax, "launch", lambda logits, *_, **__: logits.zero_())
    hidden = torch.randn(N, D, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(V, D, dtype=torch.bfloat16, requires_grad=True)
    inputs, targets, seed = (hidden.detach(), weight.detach()), torch.randint(0, V, (N,)), torch.ones(N)
    chunk = default_chunk(16 * V, torch.device("cuda")) // 16
    assert chunk == 2048 // 16

    def ours() -> object:
        loss, _, gradients = triton.forward(*inputs, None, targets, seed, LossTerms(), chunk)
        assert gradients is not None
        return loss.sum(), gradients.hidden.mul_(2), gradients.weight.mul_(2)

    plain = peak_bytes(ForwardBackward(_plain, (hidden, weight, targets)), "cpu")
    monkeypatch.setattr(torch, "mm", lambda left, right, *, out: out.zero_())
    assert peak_bytes(ours, "cpu") < plain / 4


def test_the_backward_of_a_summed_loss_copies_no_gradient() -> None:
    hidden, weight = torch.randn(16, 64, requires_grad=True), torch.randn(4096, 64, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.randint(0, 4096, (16,)))
    first, again = (torch.autograd.grad(2 * loss, (hidden, weight), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, again))
    assert peak_bytes(lambda: torch.autograd.grad(2 * loss, (hidden, weight)), "cpu") < weight.numel()
