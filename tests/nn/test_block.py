"""A block: where the norms stand, what is dropped, and what is refused before anything is built."""

from typing import Any

import pytest
import torch

from tests.conformance.made import dims, drawn, ready, tokens
from xscale.nn.blocks.block import Block, BlockConfig, SublayerConfig
from xscale.nn.ffn.ffn import FFNS, Dense
from xscale.nn.materialize import materialize
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import Fourier
from xscale.nn.norm.norm import Layer
from xscale.nn.residual.parallel import Parallel
from xscale.nn.residual.residual_stream import RESIDUALS

SMALL = BlockConfig(mixer=Attention.Config(heads=2), ffn=Dense.Config(hidden=8), norm=Layer.Config())


def block(config: BlockConfig, **changes: bool) -> Block:
    return ready(Block(config, dims(width=8), **changes))


def test_norms_stand_where_the_placement_says() -> None:
    x, about = drawn(2, 5, 8), tokens(5)
    pre = block(SMALL)
    mixed = x + pre.mixer.part(pre.mixer.norm(x), about)
    assert torch.allclose(pre(x, about), mixed + pre.ffn.part(pre.ffn.norm(mixed), about))
    post = block(SMALL.model_copy(update={"residual": RESIDUALS.get("post").part.Config()}))
    mixed = post.mixer.norm(x + post.mixer.part(x, about))
    assert torch.allclose(post(x, about), post.ffn.norm(mixed + post.ffn.part(mixed, about)))
    both = block(SMALL.model_copy(update={"residual": RESIDUALS.get("sandwich").part.Config()}))
    assert both.mixer.after is not None
    assert both.ffn.after is not None
    mixed = x + both.mixer.after(both.mixer.part(both.mixer.norm(x), about))
    assert torch.allclose(both(x, about), mixed + both.ffn.after(both.ffn.part(both.ffn.norm(mixed), about)))
    late = block(SMALL.model_copy(update={"residual": RESIDUALS.get("res_post").part.Config()}))
    mixed = x + late.mixer.norm(late.mixer.part(x, about))
    assert torch.allclose(late(x, about), mixed + late.ffn.norm(late.ffn.part(mixed, about)))


HALF = SublayerConfig(part="ffn", factor=0.5)
MIX = SublayerConfig(part="mixer")
LISTS: dict[str, tuple[SublayerConfig, ...]] = {
    "macaron": (HALF, MIX, HALF),
    "attention alone": (MIX,),
    "another ffn": (MIX, SublayerConfig(part="ffn", ffn=Dense.Config(hidden=12))),
}


@pytest.mark.parametrize("sublayers", LISTS.values(), ids=LISTS)
def test_sublayers_follow_the_list(sublayers: tuple[SublayerConfig, ...]) -> None:
    listed = block(SMALL.model_copy(update={"sublayers": sublayers}))
    x, about = drawn(2, 5, 8), tokens(5)
    wanted, seen = x, {"mixer": 0, "ffn": 0}
    for entry in sublayers:
        seen[entry.part] += 1
        suffix = "" if seen[entry.part] == 1 else f"_{seen[entry.part]}"
        sublayer = listed.get_submodule(f"{entry.part}{suffix}")
        wanted = wanted + entry.factor * sublayer.part(sublayer.norm(wanted), about)  # type: ignore[operator]
    assert len(list(listed.children())) == len(sublayers)
    assert torch.allclose(listed(x, about), wanted)


def test_the_usual_list_is_the_usual_block() -> None:
    usual = block(SMALL)
    listed = block(SMALL.model_copy(update={"sublayers": (MIX, SublayerConfig(part="ffn"))}))
    assert [name for name, _ in listed.named_parameters()] == [name for name, _ in usual.named_parameters()]
    assert torch.equal(listed(drawn(2, 5, 8), tokens(5)), usual(drawn(2, 5, 8), tokens(5)))


def test_macaron_with_an_empty_first_half_and_factor_one_is_the_usual_block() -> None:
    plain, whole = block(SMALL), SublayerConfig(part="ffn", factor=1.0)
    macaron = block(SMALL.model_copy(update={"sublayers": (whole, MIX, whole)}))
    macaron.get_submodule("mixer").load_state_dict(plain.mixer.state_dict())
    macaron.get_submodule("ffn_2").load_state_dict(plain.ffn.state_dict())
    x, about = drawn(2, 5, 8), tokens(5)
    assert not torch.allclose(macaron(x, about), plain(x, about))
    for parameter in macaron.ffn.part.parameters():
        parameter.data.zero_()
    assert torch.equal(macaron(x, about), plain(x, about))


def test_a_decoder_reads_the_source_where_the_list_says() -> None:
    first = SMALL.model_copy(update={"sublayers": (SublayerConfig(part="cross"), MIX)})
    reader = block(first, cross=True)
    x, memory = drawn(2, 5, 8), drawn(2, 9, 8, seed=1)
    assert reader.cross is not None
    read = x + reader.cross.part(reader.cross.norm(x), tokens(5), memory, tokens(9))
    wanted = read + reader.mixer.part(reader.mixer.norm(read), tokens(5))
    assert torch.allclose(reader(x, tokens(5), memory, tokens(9)), wanted)


@pytest.mark.parametrize(
    ("update", "said"),
    [
        (
            {"sublayers": (MIX, SublayerConfig(part="ffn", mixer=Attention.Config()))},
            "x.sublayers.1.mixer: is not used",
        ),
        ({"sublayers": (MIX, SublayerConfig(part="cross"))}, "x.sublayers.1.part: 'cross' reads the output of an enc"),
        ({"sublayers": (MIX, HALF), "ffn": FFNS.get("none").part.Config()}, "x.sublayers.1.part: its ffn is none"),
        (
            {"sublayers": (MIX, HALF), "residual": RESIDUALS.get("none").part.Config()},
            "x.sublayers.1.factor: multiplies what is added",
        ),
        (
            {"sublayers": (MIX, SublayerConfig(part="ffn", factor=0))},
            "x.sublayers.1.factor: 0 leaves nothing of the sublayer's output. Take 1.0. Or leave the entry out",
        ),
        (
            {"sublayers": (MIX, HALF), "residual": Parallel.Config()},
            "x.residual: 'parallel' adds a mixer and an ffn to one",
        ),
        (
            {"sublayers": (SublayerConfig(part="mixer", mixer=Attention.Config(heads=3)),)},
            "x.sublayers.0.mixer.heads: heads=3",
        ),
    ],
)
def test_a_wrong_list_is_refused_at_its_entry(update: dict[str, Any], said: str) -> None:
    problems = Block.check(SMALL.model_copy(update=update), dims(width=8), "x")
    assert any(said in str(problem) for problem in problems), problems


def test_rezero_weights_each_branch_and_has_no_norm() -> None:
    x, about = drawn(2, 5, 8), tokens(5)
    weighted = block(SMALL.model_copy(update={"residual": RESIDUALS.get("rezero").part.Config()}))
    assert weighted.mixer.alpha is not None
    assert weighted.ffn.alpha is not None
    mixed = x + weighted.mixer.alpha.weight * weighted.mixer.part(x, about)
    assert torch.allclose(weighted(x, about), mixed + weighted.ffn.alpha.weight * weighted.ffn.part(mixed, about))
    assert not [name for name, _ in weighted.named_parameters() if "norm" in name]


def test_rezero_starts_as_the_identity() -> None:
    x = drawn(2, 5, 8).float()
    weighted = Block(SMALL.model_copy(update={"residual": RESIDUALS.get("rezero").part.Config()}), dims(width=8))
    materialize(weighted, seed=0)
    assert torch.equal(weighted(x, tokens(5)), x)


@pytest.mark.parametrize("placement", ["pre", "res_post"])
def test_parallel_sublayers_read_the_same_input(placement: str) -> None:
    x, about = drawn(2, 5, 8), tokens(5)
    both = block(SMALL.model_copy(update={"residual": Parallel.Config(placement=placement)}))
    added = torch.zeros_like(x)
    for sublayer in (both.mixer, both.ffn):
        if placement == "pre":
            added = added + sublayer.part(sublayer.norm(x), about)
        else:
            added = added + sublayer.norm(sublayer.part(x, about))
    assert torch.allclose(both(x, about), x + added)


def test_a_block_that_reads_another_sequence_has_a_sublayer_more() -> None:
    reader = block(SMALL, cross=True)
    x, memory = drawn(2, 5, 8), drawn(2, 9, 8, seed=1)
    assert reader.cross is not None
    mixed = x + reader.mixer.part(reader.mixer.norm(x), tokens(5))
    read = mixed + reader.cross.part(reader.cross.norm(mixed), tokens(5), memory, tokens(9))
    wanted = read + reader.ffn.part(reader.ffn.norm(read), tokens(5))
    assert torch.allclose(reader(x, tokens(5), memory, tokens(9)), wanted)


def test_dropout_drops_in_training_only() -> None:
    part = block(SMALL.model_copy(update={"dropout": 0.5}))
    x, about = drawn(2, 5, 8), tokens(5, rng_seed=1)
    assert torch.equal(part(x, about), part(x, about))
    part.train()
    torch.manual_seed(0)
    first = part(x, about)
    assert not torch.equal(first, part(x, about))
    torch.manual_seed(0)
    assert torch.equal(first, part(x, about))


@pytest.mark.parametrize(
    ("config", "cross", "said"),
    [
        (SMALL.model_copy(update={"mixer": Fourier.Config()}), False, "x.mixer: 'fourier' is not causal"),
        (SMALL.model_copy(update={"cross": Fourier.Config()}), True, "x.cross: 'fourier' cannot do cross attention"),
        (
            SMALL.model_copy(update={"mixer": Attention.Config(heads=3)}),
            False,
            "x.mixer.heads: heads=3 does not divide",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(config: BlockConfig, cross: bool, said: str) -> None:
    problems = [str(problem) for problem in Block.check(config, dims(width=8), "x", cross=cross)]
    assert any(one.startswith(said) for one in problems), problems
    assert all("attention" in one for one in problems if "These can" in one)


def test_what_can_be_built_has_no_problem() -> None:
    assert Block.check(SMALL, dims(width=8), "x", cross=True) == []
    bidirectional = SMALL.model_copy(update={"mixer": Fourier.Config()})
    assert Block.check(bidirectional, dims(width=8, causal=False), "x") == []


def test_admin_weighs_the_residual_before_the_norm() -> None:
    """Liu et al. 2020: x_i = LN(x_{i-1} omega_i + f_i(x_{i-1})); the gains have gradients."""
    made: Any = block(SMALL.model_copy(update={"residual": RESIDUALS.get("admin").part.Config()}))
    x = wanted = drawn(2, 5, 8)
    for sublayer in (made.mixer, made.ffn):
        wanted = sublayer.norm(wanted * sublayer.omega.weight + sublayer.part(wanted, tokens(5)))
    out = made(x, tokens(5))
    assert torch.allclose(out, wanted)
    gains = [sublayer.omega.weight for sublayer in made.sublayers().values()]
    for gradient in torch.autograd.grad(out.square().sum(), gains):
        assert gradient.any()
