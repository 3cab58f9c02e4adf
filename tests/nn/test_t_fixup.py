"""T-Fixup's initial weights (Huang et al. 2020, section 3.2) by their variances, and its block without norms."""

import math

import pytest

from tests.conformance.made import dims, drawn, ready, tokens
from xscale.nn.blocks.block import Block, BlockConfig
from xscale.nn.blocks.stack import StackConfig
from xscale.nn.ffn.ffn import Dense
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.sparse_qkv import SparseQkv
from xscale.nn.model.encoder_decoder import EncoderDecoder
from xscale.nn.module import parameter_inits
from xscale.nn.residual.normless import NoNorm

BLOCK = BlockConfig(mixer=Attention.Config(heads=2), ffn=Dense.Config(hidden=24), residual=NoNorm.Config())
CONFIG = EncoderDecoder.Config(
    width=8,
    init="t_fixup",
    encoder=StackConfig(depth=3, block=BLOCK),
    decoder=StackConfig(depth=5, block=BLOCK),
)


def starts() -> dict[str, float]:
    return {name: init.std for name, _, init in parameter_inits(EncoderDecoder(CONFIG, 100, 16))}


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("source.table.weight", 1 / math.sqrt(8) / (9 * 3) ** 0.25),
        ("encoder.blocks.0.mixer.part.q.weight", math.sqrt(2 / 16)),
        ("encoder.blocks.2.mixer.part.k.weight", math.sqrt(2 / 16)),
        ("encoder.blocks.2.mixer.part.v.weight", math.sqrt(2 / 16) * 0.67 / 3**0.25),
        ("encoder.blocks.0.mixer.part.o.weight", math.sqrt(2 / 16) * 0.67 / 3**0.25),
        ("encoder.blocks.1.ffn.part.up.weight", math.sqrt(2 / 32) * 0.67 / 3**0.25),
        ("encoder.blocks.1.ffn.part.down.weight", math.sqrt(2 / 32) * 0.67 / 3**0.25),
        ("decoder.blocks.0.mixer.part.q.weight", math.sqrt(2 / 16)),
        ("decoder.blocks.4.cross.part.k.weight", math.sqrt(2 / 16)),
        ("decoder.blocks.4.cross.part.v.weight", math.sqrt(2 / 16) / (9 * 5) ** 0.25),
        ("decoder.blocks.0.mixer.part.o.weight", math.sqrt(2 / 16) / (9 * 5) ** 0.25),
        ("decoder.blocks.0.ffn.part.down.weight", math.sqrt(2 / 32) / (9 * 5) ** 0.25),
    ],
)
def test_a_weight_starts_with_the_papers_variance(name: str, std: float) -> None:
    assert starts()[name] == pytest.approx(std)


def test_no_norm_is_left() -> None:
    assert not [name for name in starts() if "norm" in name]


def test_a_block_without_norms_adds_its_sublayers() -> None:
    x, about = drawn(2, 5, 8), tokens(5)
    bare = ready(Block(BLOCK, dims(width=8)))
    mixed = x + bare.mixer.part(x, about)
    assert bare.ffn is not None
    assert bare(x, about).allclose(mixed + bare.ffn.part(mixed, about))


def test_a_mixer_without_projections_is_refused() -> None:
    block = BLOCK.model_copy(update={"mixer": SparseQkv.Config(heads=2)})
    config = CONFIG.model_copy(update={"encoder": StackConfig(depth=3, block=block)})
    (problem,) = EncoderDecoder.check(config, (100, 16), "model")
    assert str(problem).startswith("model.encoder.block.mixer: t_fixup scales the value and output projections")
    assert "Take model.encoder.block.mixer.kind=attention, or model.init=normal." in str(problem)
