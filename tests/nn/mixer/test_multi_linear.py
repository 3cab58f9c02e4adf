"""Multi-linear attention against the paper's tensor of three modes, which is formed here, and its generation."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.conformance.made import WIDTH, close, dims, drawn, other_from, ready, tokens
from tests.parallel.test_heads import TENSOR
from tests.parallel.test_tensor import refused
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.nn.forward import Forward
from xscale.nn.mixer.multi_linear import MultiLinear
from xscale.nn.tokens import Tokens

N, FACTORS, BLOCKS = 13, 6, 3


def network(*, causal: bool, **config: Any) -> MultiLinear:
    chosen = MultiLinear.Config(**{"factors": FACTORS, "blocks": BLOCKS, **config})
    return ready(MultiLinear(chosen, dims(causal=causal, length=N)))


def literal(part: MultiLinear, x: Tensor, *, causal: bool) -> Tensor:
    """SplitConcat of the mean of the blocks' tensors, times W_o; in a causal model without later keys and values."""
    rows, length = [], x.shape[1]
    for sample in x:
        q, k, v = (sample @ part.get_submodule(name).get_parameter("weight").T for name in "qkv")
        tensor = torch.zeros(length, length, length, dtype=x.dtype)
        for block in part.diagonals:
            core = torch.zeros(FACTORS, FACTORS, FACTORS, dtype=x.dtype)
            for r, entry in enumerate(block.exp() / block.exp().sum()):
                core[r, r, r] = entry
            tensor = tensor + torch.einsum("pqr,ip,jq,mr->ijm", core, q, k, v) / BLOCKS
        if causal:
            place = torch.arange(length)
            later = torch.maximum(place[:, None], place[None]) > place[:, None, None]
            tensor = tensor.masked_fill(later, 0.0)
        concatenated = torch.cat([tensor[:, j] for j in range(length)], 1)  # [N, N^2]
        rows.append(concatenated @ part.output[:length, :length].flatten(0, 1))
    return torch.stack(rows)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 2, N])
def test_it_is_the_papers_tensor(length: int, causal: bool) -> None:
    part, x = network(causal=causal), drawn(2, length, WIDTH).requires_grad_()
    out, wanted = part(x, tokens(length)), literal(part, x, causal=causal)
    assert close(out, wanted)
    leaves, above = [x, *part.parameters()], drawn(*out.shape, seed=3)
    for ours, theirs in zip(*(torch.autograd.grad((y * above).sum(), leaves) for y in (out, wanted)), strict=True):
        assert close(ours, theirs)
    if length > 1:
        assert not close(out, literal(part, x, causal=not causal))


def test_a_token_of_the_future_is_not_seen_in_training() -> None:
    part, x = network(causal=True).train(), drawn(2, N, WIDTH)
    whole = part(x, tokens(N, rng_seed=1))
    for cut in range(1, N):
        changed = part(other_from(x, cut, 1), tokens(N, rng_seed=1))
        assert torch.equal(changed[:, :cut], whole[:, :cut])
        assert not close(changed[:, cut:], whole[:, cut:])


@pytest.mark.parametrize("chunks", [[1] * N, [5, 1, 1, 6]], ids=str)
def test_generation_keeps_the_sum_over_earlier_tokens(chunks: list[int]) -> None:
    part, x, cache, about = network(causal=True), drawn(2, N, WIDTH), dict[str, Any](), tokens(N)
    whole, start = part(x, about), 0
    for size in chunks:
        new = slice(start, start + size)
        here = Tokens(about.ids[:, new], about.positions[:, new], forward=Forward(cache=cache))
        assert close(part(x[:, new], here), whole[:, new])
        start += size
    _, total = cache[part.path]
    assert total.shape == (2, FACTORS, WIDTH)


def test_one_block_with_equal_entries_is_the_mean_over_factors() -> None:
    part, x = network(causal=False, blocks=1), drawn(1, N, WIDTH)
    with torch.no_grad():
        part.diagonals.fill_(5.0)
        q, k, v = (part.get_submodule(name)(x)[0] for name in "qkv")
        wanted = torch.einsum("ir,jr,mr,jmd->id", q, k, v, part.output) / FACTORS
    assert close(part(x, tokens(N, batch=1))[0], wanted)


@pytest.mark.parametrize("causal", [True, False])
def test_no_tensor_of_three_lengths_is_formed(causal: bool) -> None:
    """The products that run are those that are told; causal ones also compute the half that is masked."""
    part, x = network(causal=causal), drawn(2, N, WIDTH)
    with FlopCounterMode(display=False) as counter:
        part(x, tokens(N))
    projections = 3 * N * WIDTH * FACTORS
    masked = FACTORS * WIDTH * (N * N - N) if causal else 0
    assert counter.get_total_flops() == 4 * (part.multiply_adds(N, N) + projections + masked)


def test_another_length_is_refused() -> None:
    (problem,) = MultiLinear.check(decode(MultiLinear.Config, {"length": N + 1}), dims(length=N), "mixer")
    assert str(problem) == (
        f"mixer.length: the weights belong to {N + 1} positions, and a sequence has {N} tokens. Take {N} or null."
    )
    for causal in (True, False):
        with pytest.raises(ConfigError, match=f"weights for {N} positions, and the sequence has {N + 1}"):
            network(causal=causal)(drawn(1, N + 1, WIDTH), tokens(N + 1, batch=1))


def test_factors_that_tp_does_not_divide_are_refused() -> None:
    mixer = {"kind": "multi_linear", "factors": 7}
    stack = {"depth": 1, "block": {"mixer": mixer, "ffn": {"kind": "dense", "hidden": 48}}}
    model = {"kind": "decoder", "width": 32, "position": "learned", "stack": stack}
    (problem,) = refused(model, 2, **TENSOR)
    assert "tp=2 does not divide" in problem
    assert "7" in problem


@pytest.mark.parametrize("causal", [True, False])
def test_packed_documents_are_those_apart(causal: bool) -> None:
    """Also gradients of W_o, whose first rows all documents read."""
    part, x = network(causal=causal), drawn(2, N, WIDTH)
    documents = torch.tensor([[3] * 4 + [5] * 9, [0] * 13])
    above = drawn(2, N, WIDTH, seed=1)
    packed = part(x, Tokens.from_ids(torch.zeros_like(documents), documents))
    apart = [part(x[:1, :4], tokens(4)), part(x[:1, 4:], tokens(9)), part(x[1:], tokens(N))]
    expected = torch.cat((torch.cat(apart[:2], 1), apart[2]))
    assert close(packed, expected)
    weights = list(part.parameters())
    ours, theirs = (torch.autograd.grad((y * above).sum(), weights, retain_graph=True) for y in (packed, expected))
    assert all(map(close, ours, theirs))
