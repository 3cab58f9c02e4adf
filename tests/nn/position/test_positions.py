"""Positions against their papers' formulas, and against transformers where it has them."""

import cmath
import math

import pytest
import torch

from tests.conformance.made import dims, drawn
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.nn.position.alibi import Alibi, slopes
from xscale.nn.position.learned import LearnableSinusoidal, Learned, Sinusoidal
from xscale.nn.position.position import POSITIONS
from xscale.nn.position.rope import Rope
from xscale.nn.tokens import Tokens
from xscale.parallel.precision.precision import apply


def at(*positions: int) -> Tokens:
    places = torch.tensor([positions])
    return Tokens(ids=torch.zeros_like(places), positions=places)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rope_turns_pairs_of_channels(fraction: float) -> None:
    part, x = Rope(Rope.Config(base=100.0, fraction=fraction), dims(), 2, 8), drawn(1, 2, 3, 8)
    found = part.rotate(x, at(0, 5, 70))
    half = int(8 * fraction) // 2
    for place, position in enumerate((0, 5, 70)):
        for pair in range(half):
            angle = position * 100.0 ** (-pair / half)
            turned = complex(x[0, 1, place, pair], x[0, 1, place, pair + half]) * cmath.exp(1j * angle)
            assert found[0, 1, place, pair].item() == pytest.approx(turned.real)
            assert found[0, 1, place, pair + half].item() == pytest.approx(turned.imag)
    assert torch.equal(found[..., 2 * half :], x[..., 2 * half :])
    assert torch.allclose(found.norm(dim=-1), x.norm(dim=-1))


def test_rope_is_exact_far_out_in_single_precision() -> None:
    part, x = Rope(Rope.Config(), dims(), 1, 8), drawn(1, 1, 1, 8)
    exact = part.rotate(x, at(131_071))
    assert torch.allclose(part.rotate(x.float(), at(131_071)).double(), exact, atol=1e-5)


def test_rope_refuses_a_share_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"fraction: must be in \(0, 1\], got 1.5"):
        decode(Rope.Config, {"fraction": 1.5})
    assert decode(Rope.Config, {"fraction": 0.25}).fraction == 0.25


def test_sinusoidal_is_its_formula() -> None:
    part, x = Sinusoidal(Sinusoidal.Config(), dims(width=6)), drawn(1, 2, 6)
    added = part.embed(x, at(0, 9)) - x
    for pair in range(3):
        rate = 10000.0 ** (-2 * pair / 6)
        assert added[0, 1, 2 * pair].item() == pytest.approx(math.sin(9 * rate), abs=1e-6)
        assert added[0, 1, 2 * pair + 1].item() == pytest.approx(math.cos(9 * rate), abs=1e-6)
    assert added[0, 0].tolist() == pytest.approx([0, 1, 0, 1, 0, 1])
    assert "Take model.width=8" in str(Sinusoidal.check(Sinusoidal.Config(), dims(width=7), "position")[0])


def test_learnable_frequencies_begin_as_sinusoidal_and_turn_pairs() -> None:
    part, x = LearnableSinusoidal(LearnableSinusoidal.Config(), dims(width=6)), drawn(1, 2, 6)
    part.factors.data = torch.ones(3, dtype=torch.float64)
    fixed = Sinusoidal(Sinusoidal.Config(), dims(width=6)).embed(x, at(0, 9))
    assert torch.allclose(part.embed(x, at(0, 9)), fixed, atol=1e-6)
    part.factors.data = torch.tensor([1.0, 0.5, 3.0], dtype=torch.float64)
    added = part.embed(x, at(0, 9)) - x
    added[0, 1].sum().backward()
    assert part.factors.grad is not None
    for pair in range(3):
        rate = 10000.0 ** (-pair / 3)
        angle = 9 * rate * part.factors[pair].item()
        assert added[0, 1, 2 * pair].item() == pytest.approx(math.sin(angle), abs=1e-6)
        assert added[0, 1, 2 * pair + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
        # d(sin + cos)/d(factor)
        assert part.factors.grad[pair].item() == pytest.approx(9 * rate * (math.cos(angle) - math.sin(angle)), rel=1e-5)


def test_learnable_frequencies_are_exact_far_out_in_bfloat16() -> None:
    """A factor of 8 bits would be off by hundreds of radians here."""
    part = LearnableSinusoidal(LearnableSinusoidal.Config(), dims(width=2))
    part.factors.data = torch.tensor([1.001])
    apply(part, torch.bfloat16, torch.float32)
    added = part.embed(torch.zeros(1, 1, 2), at(100_000))[0, 0]
    assert added.tolist() == pytest.approx([math.sin(100_100), math.cos(100_100)], abs=0.02)


def test_learned_has_a_row_for_each_position() -> None:
    part = Learned(Learned.Config(length=7), dims(width=4))
    assert part.weight.shape == (7, 4)
    assert Learned(Learned.Config(), dims(width=4, length=11)).weight.shape == (11, 4)
    torch.nn.init.normal_(part.weight)
    x = torch.zeros(1, 2, 4)
    assert torch.equal(part.embed(x, at(6, 2))[0], part.weight[[6, 2]])


@pytest.mark.parametrize("heads", [1, 2, 8, 12, 16, 20])
def test_alibi_has_the_slopes_of_its_authors(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    mask = torch.ones(1, 5)
    theirs = build_alibi_tensor(mask, heads, torch.float32).view(heads, 5)
    assert slopes(heads) == pytest.approx(theirs[:, 1].tolist(), rel=1e-6)


def test_alibi_penalises_the_distance() -> None:
    bias = Alibi(Alibi.Config(), dims(), 8, 4).bias(torch.tensor([[4]]), torch.arange(7)[None])
    assert bias.shape == (1, 8, 1, 7)
    assert bias[0, 0, 0].tolist() == pytest.approx([-0.5 * abs(4 - key) for key in range(7)])
    assert bias[0, 7, 0].tolist() == pytest.approx([-abs(4 - key) / 256 for key in range(7)])


@pytest.mark.parametrize("kind", ["learned", "music_transformer", "tupe"])
def test_a_table_shorter_than_the_sequence_is_refused(kind: str) -> None:
    entry = POSITIONS.get(kind)
    (problem,) = entry.part.check(decode(entry.part.Config, {"length": 16}), dims(length=24), "model.position")
    assert str(problem) == (
        "model.position.length: the table has 16 positions, and a sequence has 24 tokens. Take 24 or null. "
        "Higher values work too."
    )
    for length in (24, 30, None):
        assert entry.part.check(decode(entry.part.Config, {"length": length}), dims(length=24), "model.position") == []
