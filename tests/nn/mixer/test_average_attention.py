"""The average attention network against the paper's equations, token by token, and its state in generation."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import WIDTH, close, dims, drawn, numbered, other_from, ready, tokens
from xscale.core.config import decode
from xscale.nn.forward import Forward
from xscale.nn.mixer.average_attention import AverageAttention
from xscale.nn.model.encoder_decoder import EncoderDecoder
from xscale.nn.tokens import Tokens
from xscale.parallel import context
from xscale.parallel.config import ParallelConfig
from xscale.parallel.tensor import apply

HIDDEN = 20


def network(**config: Any) -> AverageAttention:
    return ready(AverageAttention(AverageAttention.Config(**{"hidden": HIDDEN, **config}), dims()))


def literal(part: AverageAttention, y: Tensor, starts: list[int]) -> Tensor:
    """h~ of each token; `starts` is the first index of each token's document."""

    def affine(name: str, x: Tensor) -> Tensor:
        linear = part.get_submodule(name)
        product = linear.get_parameter("weight") @ x
        return product if linear.bias is None else product + linear.get_parameter("bias")

    rows = []
    for sample in y:
        out = []
        for j, start in enumerate(starts):
            mean = torch.zeros(WIDTH, dtype=torch.float64)
            for k in range(start, j + 1):
                mean = mean + sample[k] / (j + 1 - start)
            g = affine("down", affine("up", mean).clamp(min=0))
            both = torch.cat((sample[j], g))
            i, f = (1 / (1 + (-affine(name, both)).exp()) for name in ("input_gate", "forget_gate"))
            out.append(i * sample[j] + f * g)
        rows.append(torch.stack(out))
    return torch.stack(rows)


def agree(part: AverageAttention, y: Tensor, about: Tokens, starts: list[int]) -> bool:
    """Output and gradients."""
    out, wanted = part(y, about), literal(part, y, starts)
    above = drawn(*out.shape, seed=3)
    leaves = [y, *part.parameters()]
    ours, theirs = (torch.autograd.grad((h * above).sum(), leaves) for h in (out, wanted))
    return close(out, wanted) and all(close(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("length", [1, 2, 13])
def test_it_is_the_papers_equation(length: int, bias: bool) -> None:
    part, y = network(bias=bias), drawn(2, length, WIDTH).requires_grad_()
    assert {name for name, _ in part.named_parameters() if "bias" in name} == {
        f"{name}.bias" for name in ("up", "down", "input_gate", "forget_gate") if bias
    }
    assert agree(part, y, tokens(length), [0] * length)
    if length > 2:
        assert not close(part(y, tokens(length)), literal(part, y, [0] * (length - 1) + [1]))


@pytest.mark.parametrize("lengths", [(1, 1, 1), (4, 9), (16, 1, 5), (3, 8, 1, 1)], ids=str)
def test_packed_documents_have_means_of_their_own(lengths: tuple[int, ...]) -> None:
    part, total = network(), sum(lengths)
    starts = [sum(lengths[:at]) for at, length in enumerate(lengths) for _ in range(length)]
    y = drawn(2, total, WIDTH).requires_grad_()
    assert agree(part, y, tokens(total, documents=numbered(*lengths)), starts)


def test_nothing_of_another_document_is_left_behind() -> None:
    """Not even the rounding of a loud document before a quiet one."""
    part, y = network(), drawn(2, 30, WIDTH)
    about = tokens(30, documents=numbered(12, 18))
    loud = torch.cat((1e12 * y[:, :12], y[:, 12:]), 1)
    assert torch.equal(part.mean(loud, about)[:, 12:], part.mean(y, about)[:, 12:])
    difference = loud.cumsum(1)[:, 12:] - loud.cumsum(1)[:, 11:12]
    assert not torch.allclose(difference, y[:, 12:].cumsum(1), rtol=1e-9, atol=1e-9), "the loud one would be heard"


def test_a_token_of_the_future_is_not_seen_in_training() -> None:
    part, y = network().train(), drawn(2, 40, WIDTH)
    whole = part(y, tokens(40, rng_seed=1))
    for cut in (1, 17, 39):
        changed = part(other_from(y, cut, 1), tokens(40, rng_seed=1))
        assert torch.equal(changed[:, :cut], whole[:, :cut])
        assert not close(changed[:, cut:], whole[:, cut:])


def test_generation_keeps_one_vector() -> None:
    part, y = network(), drawn(2, 50, WIDTH)
    whole, cache = part(y, tokens(50)), dict[str, Any]()
    for start in range(50):
        about = tokens(50)
        here = Tokens(
            about.ids[:, start : start + 1], about.positions[:, start : start + 1], forward=Forward(cache=cache)
        )
        assert close(part(y[:, start : start + 1], here), whole[:, start : start + 1])
        (total, count) = cache[part.path]
        assert total.shape == (2, WIDTH)
        assert total.untyped_storage().nbytes() == 2 * WIDTH * 8
        assert count == start + 1


def test_half_precision_sums_in_single() -> None:
    """In bfloat16 a sum stops growing at 256 ones; its mean would fall to 0."""
    part = network().bfloat16()
    ones = torch.ones(1, 4096, WIDTH, dtype=torch.bfloat16)
    for about in (tokens(4096, batch=1), tokens(4096, batch=1, documents=numbered(96, 4000, batch=1))):
        assert torch.equal(part.mean(ones, about), ones)
        assert part(ones, about).dtype == torch.bfloat16


def test_it_is_a_decoders_and_the_papers_size() -> None:
    part = AverageAttention(AverageAttention.Config(), dims())
    assert part.up.weight.shape == (4 * WIDTH, WIDTH)
    stack = {"depth": 1, "block": {"mixer": {"kind": "attention", "heads": 4}}}
    averaging = {"depth": 1, "block": {"mixer": "average_attention", "cross": {"kind": "attention", "heads": 4}}}
    section = {"width": WIDTH, "position": "sinusoidal", "encoder": stack, "decoder": averaging}
    config = decode(EncoderDecoder.Config, section)
    assert EncoderDecoder.check(config, (40, 20), "model") == []
    for name, said in (("encoder", "is not bidirectional"), ("decoder", "cannot do cross attention")):
        wrong = decode(EncoderDecoder.Config, {**section, name: {"depth": 1, "block": {"mixer": "average_attention"}}})
        problems = [str(problem) for problem in EncoderDecoder.check(wrong, (40, 20), "model")]
        assert any(said in problem and "attention" in problem for problem in problems), problems
    model = EncoderDecoder(config, 40, 20)
    (cp,) = context.check(model, decode(ParallelConfig, {"mesh": {"cp": 2}}), "parallel")
    assert "mixer 'average_attention' mixes the full sequence" in str(cp)
    assert apply.check(model, decode(ParallelConfig, {"mesh": {"tp": 2}}), "parallel") == []


def test_the_gates_begin_half_open() -> None:
    part = network()
    with torch.no_grad():
        for gate in (part.input_gate, part.forget_gate):
            for parameter in gate.parameters():
                parameter.zero_()
        y = drawn(1, 3, WIDTH)
        g = part.down(part.up(part.mean(y, tokens(3))).relu())
        assert close(part(y, tokens(3)), (y + g) / 2)
        part.forget_gate.get_parameter("bias").fill_(-math.inf)
        assert close(part(y, tokens(3)), y / 2)
