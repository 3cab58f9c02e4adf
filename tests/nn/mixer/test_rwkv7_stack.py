"""RWKV-7 as a stack: the values of the first layer in the later ones, and channel mixing, token by token."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conformance.made import close, drawn, numbered, ready, tokens
from tests.nn.mixer.test_rwkv7 import SMALL, literal
from xscale.nn.ffn.rwkv7_channel_mixing import Rwkv7ChannelMixing
from xscale.nn.forward import Forward
from xscale.nn.materialize import materialize
from xscale.nn.mixer.rwkv7 import Rwkv7
from xscale.nn.model.decoder import Decoder
from xscale.nn.module import substitute
from xscale.nn.tokens import Tokens

LENGTH, WIDTH, VOCABULARY = 12, 32, 40
MIXER = {"kind": "rwkv7", "heads": 4, "value_latent_width": 6, **SMALL}
BLOCK = {"mixer": MIXER, "ffn": {"kind": "rwkv7_channel_mixing", "hidden": 24}, "norm": {"kind": "layer"}}


def network(**changes: Any) -> Decoder:
    stack = {"depth": 3, "block": BLOCK, **changes}
    config = Decoder.Config.model_validate({"width": WIDTH, "position": {"kind": "none"}, "stack": stack})
    assert Decoder.check(config, (VOCABULARY, LENGTH), "model") == []
    return ready(Decoder(config, VOCABULARY, LENGTH))


def layer_norm(x: Tensor, norm: Any) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def channel_mixing(part: Rwkv7ChannelMixing, x: Tensor) -> Tensor:
    out = []
    for t, u in enumerate(x):
        before = x[t - 1] if t else torch.zeros_like(u)
        k = part.up.weight @ (u + (before - u) * part.get_parameter("mix"))
        out.append(part.down.weight @ torch.stack([max(unit, unit * 0) ** 2 for unit in k]))
    return torch.stack(out)


def literal_logits(model: Decoder, ids: Tensor) -> Tensor:
    """Logits [T, V] of one document [T], by loops over layers and tokens."""
    x = model.embed.table.weight[ids]
    first: list[Tensor] = []
    for block in model.stack.blocks.values():
        x = x + literal(block.mixer.part, layer_norm(x, block.mixer.norm), first)  # type: ignore[union-attr, arg-type]
        x = x + channel_mixing(block.ffn.part, layer_norm(x, block.ffn.norm))  # type: ignore[union-attr, arg-type]
    return layer_norm(x, model.stack.norm) @ model.head.weight.T


def mixers(model: Decoder) -> list[Rwkv7]:
    return [module for module in model.modules() if isinstance(module, Rwkv7)]


def test_it_is_the_papers_model() -> None:
    model, about = network(), tokens(LENGTH)
    assert [mixer.value_map is None for mixer in mixers(model)] == [True, False, False]
    assert close(model(about), torch.stack([literal_logits(model, ids) for ids in about.ids]))


def test_gradients_pass_through_the_values_of_the_first_layer() -> None:
    model, about, weights = network(), tokens(LENGTH, 1), drawn(LENGTH, VOCABULARY)
    parameters = list(model.parameters())
    computed, expected = (
        torch.autograd.grad((logits * weights).sum(), parameters)
        for logits in (model(about)[0], literal_logits(model, about.ids[0]))
    )
    assert all(close(*pair) for pair in zip(computed, expected, strict=True))


def test_the_values_matter_and_can_be_left_out() -> None:
    """The weights alone that the mixture adds change the logits; with null there are none of them."""
    model, plain = network(), network(block={**BLOCK, "mixer": {**MIXER, "value_latent_width": None}})
    extra = {name for name, _ in model.named_parameters()} - {name for name, _ in plain.named_parameters()}
    names = ("down.weight", "up.weight", "bias")
    assert extra == {f"stack.blocks.{layer}.mixer.part.value_map.{name}" for layer in (1, 2) for name in names}
    plain.load_state_dict(model.state_dict(), strict=False)
    difference = (model(tokens(LENGTH)) - plain(tokens(LENGTH))).abs().amax((0, 2))
    assert bool((difference > 1e-3).all())


def test_the_first_layer_is_the_first_one_with_such_a_mixer() -> None:
    """Values pass through blocks of other mixers, and through those that do not mix them."""
    other = {"kind": "gated_linear_attention", "heads": 4}
    without = {**MIXER, "value_latent_width": None}
    rules = tuple({"every": 5, "at": at, "mixer": mixer} for at, mixer in ((0, other), (2, other), (3, without)))
    model = network(depth=5, rules=rules)
    inside = [mixer.path for mixer in mixers(model) if mixer.value_map is not None]
    assert inside == ["stack.blocks.4.mixer.part"]
    handed_on: list[dict[str, Tensor]] = []
    substitute(model.stack, "output", lambda x, handed, _: (handed_on.append(handed), x)[1])
    written: list[Tensor] = []
    mixers(model)[0].v.register_forward_hook(lambda _, __, v: written.append(v))
    model(tokens(LENGTH))
    assert mixers(model)[0].path == "stack.blocks.1.mixer.part"
    assert [list(handed) for handed in handed_on] == [["values"]]
    assert handed_on[0]["values"] is written[0]


def test_packed_documents_are_documents_apart() -> None:
    model, ids = network(), tokens(LENGTH).ids
    packed = model(Tokens.from_ids(ids, numbered(5, 1, 6)))
    apart = [model(Tokens.from_ids(piece)) for piece in ids.split([5, 1, 6], 1)]
    assert close(packed, torch.cat(apart, 1))


def test_generation_is_the_full_forward() -> None:
    """The values of the first layer are of the new tokens: the cache holds states and shifted tokens, nothing else."""
    model, about, cache = network(), tokens(LENGTH), dict[str, Any]()
    whole = model(about)
    for begin, end in [(0, 5), (5, 6), (6, LENGTH)]:
        new = Tokens(about.ids[:, begin:end], about.positions[:, begin:end], forward=Forward(cache=cache))
        assert close(model(new), whole[:, begin:end])
    parts = {name.removeprefix("stack.blocks.") for name in cache}
    assert parts == {
        f"{layer}.{part}" for layer in range(3) for part in ("mixer.part", "mixer.part.shift", "ffn.part.shift")
    }


def test_tokens_that_have_left_fill_the_caches_of_later_blocks() -> None:
    """`fill_cache` keeps what a forward keeps, with the token shift behind the mixer, and hands on the same values."""
    model, x, about = network(), drawn(2, LENGTH, WIDTH), tokens(LENGTH)
    first, second = (model.stack.blocks[name] for name in "01")
    ended = []
    for run in (first, first.fill_cache):
        cache = dict[str, Any]()
        handed_on: Any = run(
            x, Tokens(about.ids, about.positions, forward=Forward(cache=cache)), *[None] * 2 * (run is first), {}
        )
        handed_on = handed_on[1] if run is first else handed_on
        ended.append((cache, second(x, about, None, None, handed_on)[0]))
    (cache, expected), (filled, computed) = ended
    assert cache.keys() == filled.keys()
    assert all(close(filled[name], kept) for name, kept in cache.items())
    assert close(computed, expected)


def test_channel_mixing_starts_as_the_authors() -> None:
    """In the second of three layers tokens are mixed by 1 - (i / D)^((2 / 3)^4); what it adds starts at 0."""
    model = network()
    materialize(model, 0)
    part = model.stack.blocks["1"].ffn.part  # type: ignore[union-attr]
    expected = [1 - (channel / WIDTH) ** ((2 / 3) ** 4) for channel in range(WIDTH)]
    assert part.get_parameter("mix").tolist() == pytest.approx(expected, abs=1e-6)
    assert not part.down.weight.any()
    assert part.up.weight.abs().max().item() == pytest.approx(0.5 * WIDTH**-0.5, rel=0.02)
    value_map = mixers(model)[1].value_map
    assert value_map is not None
    assert value_map.get_parameter("bias").unique().tolist() == [1.0]
    assert not value_map.down.weight.any()


@pytest.mark.parametrize(
    ("changes", "path", "says"),
    [
        ({"share": "all"}, "model.stack.share", "Take ffn or none, or model.stack.block.mixer.value_latent_width"),
        (
            {"block": {**BLOCK, "residual": "reversible"}},
            "model.stack.block.residual",
            "values that blocks hand on would be kept",
        ),
    ],
)
def test_what_keeps_no_values_is_refused(changes: dict[str, Any], path: str, says: str) -> None:
    stack = {"depth": 3, "block": BLOCK, **changes}
    config = Decoder.Config.model_validate({"width": WIDTH, "position": {"kind": "none"}, "stack": stack})
    problems = Decoder.check(config, (VOCABULARY, LENGTH), "model")
    assert [(problem.path, says in str(problem)) for problem in problems] == [(path, True)]
