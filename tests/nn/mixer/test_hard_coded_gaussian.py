"""Hard-coded Gaussian attention against the density of the paper, token by token, and its state in generation."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.conformance.made import close, dims, drawn, numbered, ready, tokens
from xscale.conformance.attention import mixer as conformance
from xscale.core.config import decode
from xscale.nn.forward import Forward
from xscale.nn.mixer.hard_coded_gaussian import HardCodedGaussian
from xscale.nn.mixer.mixer import MIXERS
from xscale.nn.model.decoder import Decoder
from xscale.nn.tokens import Tokens
from xscale.parallel import context
from xscale.parallel.config import ParallelConfig
from xscale.parallel.tensor import apply

WIDTH, HEADS, HEAD_WIDTH = 24, 3, 8
SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {},
    "own": {"offsets": (-4, 0, 2), "sigmas": (0.3, 2.5, 1.0)},
    "narrow": {"offsets": (-2,), "sigmas": (0.05,)},
    "far": {"offsets": (-30, -1), "sigmas": (1.0, 0.5, 4.0)},
}
EVERY = pytest.mark.parametrize("setting", SETTINGS)
CAUSAL = pytest.mark.parametrize("causal", [True, False])


def gaussian(setting: str, causal: bool = True, **config: Any) -> HardCodedGaussian:
    chosen = decode(HardCodedGaussian.Config, {"heads": HEADS, **SETTINGS[setting], **config})
    around = dims(width=WIDTH, causal=causal)
    assert HardCodedGaussian.check(chosen, around, "mixer") == []
    return ready(HardCodedGaussian(chosen, around))


def literal(part: HardCodedGaussian, setting: str, x: Tensor, causal: bool, documents: list[int]) -> Tensor:
    """sum_j N(j; i + offset, sigma^2) v_j over all j that i sees, for each head; `documents` numbers each token's."""
    chosen = SETTINGS[setting]
    offsets = chosen.get("offsets", (-1, 0) if causal else (-1, 1))
    sigmas = chosen.get("sigmas", (1.0,))
    out = torch.zeros_like(x)
    for head in range(HEADS):
        offset, sigma = offsets[head % len(offsets)], sigmas[head % len(sigmas)]
        rows = slice(head * HEAD_WIDTH, (head + 1) * HEAD_WIDTH)
        values = x @ part.v.weight[rows].T
        for i, document in enumerate(documents):
            mixed = torch.zeros(len(x), HEAD_WIDTH, dtype=torch.float64)
            for j, other in enumerate(documents):
                if other == document and not (causal and j > i):
                    normal = torch.distributions.Normal(torch.tensor(i + offset).double(), sigma)
                    mixed = mixed + normal.log_prob(torch.tensor(j).double()).exp() * values[:, j]
            out[:, i] = out[:, i] + mixed @ part.o.weight[:, rows].T
    return out


def agree(part: HardCodedGaussian, x: Tensor, about: Tokens, wanted: Tensor) -> bool:
    """Output and gradients."""
    out = part(x, about)
    above = drawn(*out.shape, seed=3)
    leaves = [x, *part.parameters()]
    ours, theirs = (torch.autograd.grad((y * above).sum(), leaves) for y in (out, wanted))
    return close(out, wanted) and all(close(a, b) for a, b in zip(ours, theirs, strict=True))


@EVERY
@CAUSAL
@pytest.mark.parametrize("length", [1, 2, 16, pytest.param(47, marks=pytest.mark.long)])
def test_it_is_the_papers_density(setting: str, causal: bool, length: int) -> None:
    part, x = gaussian(setting, causal), drawn(2, length, WIDTH).requires_grad_()
    assert agree(part, x, tokens(length), literal(part, setting, x, causal, [0] * length))
    if length == 47:
        assert not close(part(x, tokens(length)), literal(part, setting, x, causal, [0] * 46 + [1]))


@EVERY
@CAUSAL
@pytest.mark.parametrize("lengths", [(1, 1, 1), (4, 9), (30, 20)], ids=str)
def test_packed_documents_stay_apart(setting: str, causal: bool, lengths: tuple[int, ...]) -> None:
    part, total = gaussian(setting, causal), sum(lengths)
    numbers = numbered(*lengths)
    x = drawn(2, total, WIDTH).requires_grad_()
    wanted = literal(part, setting, x, causal, numbers[0].tolist())
    assert agree(part, x, tokens(total, documents=numbers), wanted)


def test_rows_are_no_distributions() -> None:
    """Weights beyond the beginning are lost: the first token has what the density gives it."""
    part = gaussian("paper")
    band = part.weights(1, HEADS, torch.device("cpu"))[:, 0]  # [H, left + 1]
    density = 1 / math.sqrt(2 * math.pi)
    beside = density * math.exp(-0.5)
    assert band[:, -1].tolist() == pytest.approx([beside, density, beside])
    # A Gaussian sampled at all integers sums to 1; half of it and the middle are seen, or the middle and one more.
    half = (1 + density) / 2
    assert band.sum(1).tolist() == pytest.approx([half + beside, half, half + beside], rel=1e-7)


def test_there_are_no_queries_and_keys() -> None:
    assert {name for name, _ in gaussian("paper").named_parameters()} == {"v.weight", "o.weight"}


@EVERY
def test_it_keeps_its_traits(setting: str) -> None:
    case = MIXERS.get("hard_coded_gaussian"), HardCodedGaussian.Config(heads=4, **SETTINGS[setting])
    # Tokens that no head can reach would not be missed: the suite's settings have one at the next token.
    if setting in ("paper", "own"):
        conformance.the_future_does_not_leak(case)
        conformance.it_looks_both_ways(case)
    conformance.packed_documents_stay_apart(case)
    conformance.gradients_fit_differences(case)
    for chunks in ([1] * 12, [5, 1, 1, 5], [70, 1, 2, 1]):
        conformance.incremental_is_parallel(case, chunks)


def test_generation_keeps_what_the_band_reaches() -> None:
    part, cache = gaussian("paper"), dict[str, Any]()
    for start in range(30):
        about = tokens(30)
        part(
            drawn(2, 1, WIDTH),
            Tokens(about.ids[:, :1], about.positions[:, start : start + 1], forward=Forward(cache=cache)),
        )
        assert cache[part.path].shape == (2, HEADS, 10, HEAD_WIDTH)
        assert cache[part.path].untyped_storage().nbytes() == 2 * HEADS * 10 * HEAD_WIDTH * 8


def test_multiply_adds_grow_with_the_length_alone() -> None:
    part = gaussian("paper")
    assert part.multiply_adds(1000, 1000) == 1000 * 11 * HEADS * HEAD_WIDTH
    assert part.multiply_adds(5, 5) == 5 * 5 * HEADS * HEAD_WIDTH
    counted = []
    for length in (160, 1600):
        with FlopCounterMode(display=False) as counter:
            part(drawn(2, length, WIDTH), tokens(length))
        counted.append(counter.get_total_flops())
    assert counted[1] == pytest.approx(10 * counted[0], rel=0.05)


@pytest.mark.parametrize(
    ("config", "causal", "path"),
    [
        ({"heads": 5}, True, "m.heads"),
        ({"offsets": (-1, 0, 1, 2)}, True, "m.offsets"),
        ({"sigmas": (1.0, 2.0, 3.0, 4.0)}, False, "m.sigmas"),
        ({"offsets": (0, 12)}, True, "m.offsets"),
    ],
)
def test_what_does_not_fit_is_refused(config: dict[str, Any], causal: bool, path: str) -> None:
    chosen = decode(HardCodedGaussian.Config, {"heads": HEADS, **config})
    (problem,) = HardCodedGaussian.check(chosen, dims(width=WIDTH, causal=causal), "m")
    assert problem.path == path
    assert problem.advice


def test_layouts_that_cannot_be_are_refused() -> None:
    block = {"mixer": {"kind": "hard_coded_gaussian", "heads": HEADS}}
    config = decode(Decoder.Config, {"width": WIDTH, "position": "learned", "stack": {"depth": 1, "block": block}})
    model = Decoder(config, 40, 23)
    (tp,) = apply.check(model, decode(ParallelConfig, {"mesh": {"tp": 2}}), "parallel")
    assert "tp=2 does not divide heads=3" in str(tp)
    (cp,) = context.check(model, decode(ParallelConfig, {"mesh": {"cp": 2}}), "parallel")
    assert "mixer 'hard_coded_gaussian' mixes the full sequence" in str(cp)


def test_half_precision_is_near() -> None:
    part, x = gaussian("own"), drawn(2, 40, WIDTH)
    exact = part(x, tokens(40))
    half = part.bfloat16()(x.bfloat16(), tokens(40))
    assert half.dtype == torch.bfloat16
    assert (half - exact).abs().max() < 0.05 * exact.abs().max()
