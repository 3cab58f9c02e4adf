"""The sparse feed-forward layer against the paper's equations, one block at a time, and what decoding reads."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import close, dims, drawn, ready, tokens
from xscale.generate.generate import lay_out_matrices
from xscale.nn.ffn.sparse import SparseFfn
from xscale.nn.forward import Forward
from xscale.nn.module import substitute
from xscale.nn.random import RandomNumbers
from xscale.nn.tokens import Tokens

WIDTH, HIDDEN, BLOCK = 8, 24, 4


def layer(**changes: Any) -> SparseFfn:
    config = SparseFfn.Config(**{"hidden": HIDDEN, "block_size": BLOCK, "controller_width": 3, **changes})
    around = dims(width=WIDTH)
    assert SparseFfn.check(config, around, "ffn") == []
    return ready(SparseFfn(config, around))


class Given(RandomNumbers):
    """The noise that a test gives, and whether the micro-batch is hard."""

    def __init__(self, noise: Tensor, hard: bool) -> None:
        self.noise, self.hard = noise, hard

    def gumbel(self, *_: Any, **__: Any) -> Tensor:
        return self.noise

    def integer(self, high: int, device: Any = "cpu") -> Tensor:
        return torch.tensor(0 if self.hard else high - 1)


def weights(part: SparseFfn) -> list[Tensor]:
    return [part.reduce.weight.mT, part.control.weight.mT, part.up.weight.mT, part.down.weight.mT]


def written(part: SparseFfn, x: Tensor, masks: Any) -> Tensor:
    """y of each token by the equations; `masks(b, t, block, logits [N])` is the block's mask."""
    c1, c2, w1, w2 = weights(part)
    rows = []
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            logits = x[b, t] @ c1 @ c2
            inner = (x[b, t] @ w1 + (0 if part.up.bias is None else part.up.bias)).clamp(min=0)
            blocks = [slice(block * BLOCK, (block + 1) * BLOCK) for block in range(HIDDEN // BLOCK)]
            sparse = [inner[block] * masks(b, t, at, logits[block]) for at, block in enumerate(blocks)]
            rows.append(torch.cat(sparse) @ w2 + (0 if part.down.bias is None else part.down.bias))
    return torch.stack(rows).view(x.shape)


def chosen(b: int, t: int, block: int, logits: Tensor) -> Tensor:
    """One-hot argmax."""
    return (torch.arange(BLOCK) == int(logits.argmax())).double()


def same_with_gradients(part: SparseFfn, x: Tensor, out: Tensor, wanted: Tensor) -> None:
    assert close(out, wanted)
    above, leaves = drawn(*out.shape, seed=3), [x, *part.parameters()]
    ours, theirs = (torch.autograd.grad((y * above).sum(), leaves, allow_unused=True) for y in (out, wanted))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None or not mine.any()) if other is None else close(mine, other)


@pytest.mark.parametrize("bias", [True, False])
def test_evaluation_uses_the_unit_of_the_highest_logit_in_each_block(bias: bool) -> None:
    part, x = layer(bias=bias), drawn(2, 5, WIDTH).requires_grad_()
    same_with_gradients(part, x, part(x, tokens(5)), written(part, x, chosen))


def test_training_is_a_gumbel_softmax() -> None:
    part, x = layer(temperature=0.7).train(), drawn(2, 5, WIDTH).requires_grad_()
    noise = drawn(2, 5, HIDDEN, seed=9)
    substitute(part, "random", Given(noise, hard=False))

    def mask(b: int, t: int, block: int, logits: Tensor) -> Tensor:
        powers = ((logits + noise[b, t, block * BLOCK : (block + 1) * BLOCK]) / 0.7).exp()
        return powers / powers.sum()

    same_with_gradients(part, x, part(x, tokens(5, rng_seed=1)), written(part, x, mask))


def test_a_hard_micro_batch_has_one_hot_masks_and_the_soft_ones_gradients() -> None:
    part, x = layer(temperature=0.7).train(), drawn(2, 5, WIDTH).requires_grad_()
    noise = drawn(2, 5, HIDDEN, seed=9)
    substitute(part, "random", Given(noise, hard=True))

    def mask(b: int, t: int, block: int, logits: Tensor) -> Tensor:
        noisy = (logits + noise[b, t, block * BLOCK : (block + 1) * BLOCK]) / 0.7
        soft = noisy.exp() / noisy.exp().sum()
        return chosen(b, t, block, noisy) + soft - soft.detach()

    out = part(x, tokens(5, rng_seed=1))
    same_with_gradients(part, x, out, written(part, x, mask))
    plain = written(part, x, lambda b, t, block, logits: mask(b, t, block, logits).detach())
    assert close(out, plain)
    assert torch.autograd.grad(part(x, tokens(5, rng_seed=1)).sum(), part.control.weight)[0].any()


@pytest.mark.parametrize(("fraction", "least", "most"), [(0.0, 0, 0), (0.3, 20, 40), (1.0, 100, 100)])
def test_a_share_of_the_micro_batches_is_hard(fraction: float, least: int, most: int) -> None:
    part, x, hard = layer(hard_fraction=fraction).train(), drawn(1, 3, WIDTH), 0
    logits = drawn(1, 3, HIDDEN // BLOCK, BLOCK)
    for seed in range(100):
        torch.manual_seed(seed)
        mask = part.soft_mask(logits, tokens(3, rng_seed=seed))
        assert close(mask.sum(-1), torch.ones(1, 3, HIDDEN // BLOCK).double())
        hard += int(((mask == 0) | (mask == 1)).all())
    assert least <= hard <= most
    torch.manual_seed(0)
    assert part(x, tokens(3, rng_seed=1)).isfinite().all()


def steps(part: SparseFfn, x: Tensor) -> Tensor:
    """Outputs of a token at a time, as in generation."""
    cache: dict[str, Any] = {}
    outputs = []
    for at in range(x.shape[1]):
        around = Tokens(
            ids=torch.zeros(len(x), 1).long(), positions=torch.full((len(x), 1), at), forward=Forward(cache=cache)
        )
        outputs.append(part(x[:, at : at + 1], around))
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("bias", [True, False])
def test_decoding_is_the_masked_dense_form(bias: bool) -> None:
    part, x = layer(bias=bias), drawn(3, 7, WIDTH)
    with torch.no_grad():
        wanted = part(x, tokens(7, 3))
        assert close(steps(part, x), wanted)
        # More tokens than a block has units: dense.
        assert close(part(x, tokens(7, 3, cache={})), wanted)


def test_decoding_reads_only_the_chosen_rows_and_columns() -> None:
    """The other rows are NaN, which no product hides; the dense form is the negative control."""
    part, x = layer(), drawn(1, 1, WIDTH)
    with torch.no_grad():
        wanted = part(x, tokens(1, 1))
        c1, c2, *_ = weights(part)
        logits = (x[0, 0] @ c1 @ c2).view(-1, BLOCK)
        unused = torch.ones(HIDDEN // BLOCK, BLOCK, dtype=torch.bool)
        unused[torch.arange(HIDDEN // BLOCK), logits.argmax(-1)] = False
        assert int((~unused).sum()) == HIDDEN // BLOCK
        part.up.weight[unused.flatten()] = float("nan")
        assert part.up.bias is not None
        part.up.bias[unused.flatten()] = float("nan")
        part.down.weight[:, unused.flatten()] = float("nan")
        assert close(steps(part, x), wanted)
        assert part(x, tokens(1, 1)).isnan().any()


def test_generation_keeps_what_it_gathers_contiguous() -> None:
    part = layer().float()
    lay_out_matrices(part)
    assert part.up.weight.is_contiguous()
    assert part.down.weight.mT.is_contiguous()


def test_the_controller_is_as_wide_as_in_the_paper() -> None:
    part = SparseFfn(SparseFfn.Config(block_size=4), dims(width=32))
    assert part.reduce.weight.shape == (8, 32)
    assert part.control.weight.shape == (128, 8)
    assert SparseFfn(SparseFfn.Config(block_size=64), dims(width=32)).reduce.weight.shape == (1, 32)


def test_a_block_that_does_not_divide_is_refused() -> None:
    (problem,) = SparseFfn.check(SparseFfn.Config(hidden=30, block_size=8), dims(), "ffn")
    assert str(problem).startswith("ffn.block_size: block_size=8 does not divide the 30 hidden units")
    assert "ffn.hidden=32." in str(problem)
