"""Linear maps by the Hamilton product, against the multiplication table of quaternions."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import close, drawn, ready, tokens
from tests.parallel.test_tensor import refused
from xscale.convert.hf.architecture import Requirements, require_features
from xscale.core.config import decode
from xscale.measure.flops import size, training_flops
from xscale.nn.depth.quaternion import QuaternionLinear
from xscale.nn.init import Init
from xscale.nn.linear import Linear
from xscale.nn.model.decoder import Decoder
from xscale.nn.model.encoder_decoder import EncoderDecoder
from xscale.nn.module import linear_map_names

TABLE = {
    ("1", "1"): (1, "1"), ("1", "i"): (1, "i"), ("1", "j"): (1, "j"), ("1", "k"): (1, "k"),
    ("i", "1"): (1, "i"), ("i", "i"): (-1, "1"), ("i", "j"): (1, "k"), ("i", "k"): (-1, "j"),
    ("j", "1"): (1, "j"), ("j", "i"): (-1, "k"), ("j", "j"): (-1, "1"), ("j", "k"): (1, "i"),
    ("k", "1"): (1, "k"), ("k", "i"): (1, "j"), ("k", "j"): (-1, "i"), ("k", "k"): (-1, "1"),
}  # fmt: skip
"""Hamilton 1843: i^2 = j^2 = k^2 = ijk = -1."""
BLOCK: dict[str, Any] = {
    "mixer": {"kind": "attention", "heads": 4, "core": "hamilton"},
    "ffn": {"kind": "dense", "hidden": 48},
}
MODEL: dict[str, Any] = {
    "kind": "decoder",
    "width": 32,
    "position": "learned",
    "stack": {"depth": 2, "block": BLOCK, "linear_maps": "quaternion"},
}


def hamilton(weight: Tensor, x: Tensor) -> Tensor:
    """W (x) x, one pair of components at a time."""
    parts = dict(zip("1ijk", weight.chunk(4, 0), strict=True)), dict(zip("1ijk", x.chunk(4, -1), strict=True))
    product = {name: torch.zeros(*x.shape[:-1], len(weight) // 4, dtype=x.dtype) for name in "1ijk"}
    for (left, right), (sign, name) in TABLE.items():
        product[name] = product[name] + sign * (parts[1][right] @ parts[0][left].T)
    return torch.cat([product[name] for name in "1ijk"], -1)


@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_hamilton_product(bias: bool) -> None:
    part = ready(QuaternionLinear(Linear(12, 20, ("ffn", "width"), Init(std=0.3), bias=bias)))
    assert part.weight.shape == (20, 3)
    x = drawn(2, 5, 12).requires_grad_()
    wanted = hamilton(part.weight, x)
    wanted = wanted if part.bias is None else wanted + part.bias
    out = part(x)
    assert close(out, wanted)
    above, leaves = drawn(*out.shape, seed=3), [x, *part.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad((y * above).sum(), leaves) for y in (out, wanted)), strict=True):
        assert close(ours, theirs)


def model(linear_maps: str = "quaternion", **stack: Any) -> Decoder:
    section = {name: value for name, value in MODEL.items() if name != "kind"}
    section["stack"] = {**MODEL["stack"], "linear_maps": linear_maps, **stack}
    config = decode(Decoder.Config, section)
    assert Decoder.check(config, (67, 23), "model") == []
    return ready(Decoder(config, 67, 23))


def split(x: Tensor) -> dict[str, Tensor]:
    """Components of x [B, T, D], each with the channels of each head: [B, H, T, K / 4]."""
    return {
        name: part.reshape(*x.shape[:2], 4, -1).transpose(1, 2)
        for name, part in zip("1ijk", x.chunk(4, -1), strict=True)
    }


@pytest.mark.parametrize("core", ["softmax", "hamilton"])
def test_a_block_is_the_papers(core: str) -> None:
    """Pre-norm, attention and a feed-forward layer, each map a Hamilton product; with the core hamilton the scores too.

    A head has its quarter of each component of the queries, keys and values.
    """
    made, x = model(block={**BLOCK, "mixer": {**BLOCK["mixer"], "core": core}}), drawn(2, 7, 32)
    block: Any = made.stack.blocks["0"]
    mixer, ffn = block.mixer.part, block.ffn.part
    inner, hidden = block.mixer.norm(x), ~torch.ones(7, 7, dtype=torch.bool).tril()
    q, k, v = (split(hamilton(linear.weight, inner)) for linear in (mixer.q, mixer.k, mixer.v))
    scores = {name: torch.zeros(2, 4, 7, 7, dtype=x.dtype) for name in "1ijk"}
    if core == "hamilton":
        for (left, right), (sign, name) in TABLE.items():
            scores[name] = scores[name] + sign * (q[left] @ k[right].mT)
    else:
        real = sum((q[name] @ k[name].mT for name in "1ijk"), torch.zeros(2, 4, 7, 7, dtype=x.dtype))
        scores = dict.fromkeys("1ijk", real)
    heads = {name: (E / 8**0.5).masked_fill(hidden, float("-inf")).softmax(-1) @ v[name] for name, E in scores.items()}
    joined = torch.cat([heads[name].transpose(1, 2).flatten(2) for name in "1ijk"], -1)
    y = x + hamilton(mixer.o.weight, joined)
    up = hamilton(ffn.up.weight, block.ffn.norm(y))
    wanted = y + hamilton(ffn.down.weight, torch.nn.functional.gelu(up))
    assert close(block(x, tokens(7)), wanted)
    above, leaves = drawn(*x.shape, seed=3), list(block.parameters())
    ours, theirs = (torch.autograd.grad((out * above).sum(), leaves) for out in (block(x, tokens(7)), wanted))
    assert all(close(*pair) for pair in zip(ours, theirs, strict=True))


def test_they_have_a_quarter_of_the_weights_and_as_many_flops() -> None:
    real, quaternion = model("real"), model()
    weights = [
        sum(module.weight.numel() for module in made.stack.blocks.modules() if isinstance(module, Linear))
        for made in (real, quaternion)
    ]
    assert weights[0] == 4 * weights[1]
    assert training_flops(quaternion, 23) == training_flops(real, 23)
    assert size(quaternion).multiplied == size(real).multiplied
    assert not [name for name in linear_map_names(quaternion) if "stack" in name], (
        "no optimizer of matrices updates them"
    )


def problems(**stack: Any) -> list[str]:
    section = {name: value for name, value in MODEL.items() if name != "kind"}
    config = decode(Decoder.Config, {**section, "stack": {**MODEL["stack"], **stack}})
    return [str(problem) for problem in Decoder.check(config, (67, 23), "model")]


def test_what_cannot_be_is_refused_with_what_would_work() -> None:
    (problem,) = problems(block={**BLOCK, "mixer": {"kind": "collaborative", "heads": 4}})
    assert "model.stack.linear_maps: 'collaborative' has no linear maps of quaternions" in problem
    assert "Take real, or the mixer attention in place of 'collaborative'." in problem
    (problem,) = problems(block={**BLOCK, "ffn": {"kind": "moe"}})
    assert "'moe' has no linear maps of quaternions. Take real, or the ffn dense or gated in place of 'moe'." in problem
    (problem,) = problems(block={**BLOCK, "ffn": {"kind": "dense", "hidden": 30}})
    assert (
        "4 does not divide hidden=30, whose quarters are the components. Take real, or model.stack.block.ffn" in problem
    )
    (problem,) = problems(block={**BLOCK, "mixer": {"kind": "attention", "heads": 3, "head_width": 2}})
    assert "4 does not divide head_width=2, whose quarters are the components. Take real, or model.stack" in problem
    assert problem.endswith("mixer.head_width=4.")
    section = {"init": "t_fixup", "decoder": {"linear_maps": "quaternion"}}
    (problem,) = map(str, EncoderDecoder.check(decode(EncoderDecoder.Config, section), (67, 23), "model"))
    assert "model.decoder.linear_maps: t_fixup scales real matrices by their sizes" in problem
    narrow = {"kind": "attention", "heads": 16, "core": "hamilton"}
    (problem,) = problems(linear_maps="real", block={**BLOCK, "mixer": narrow})
    assert "model.stack.block.mixer.core: a head's 2 channels have no four quarters." in problem
    assert "core.kind=softmax. Or take heads with a multiple of 4 channels." in problem


def test_a_rank_has_no_part_of_a_quaternion() -> None:
    (problem,) = refused(MODEL, 2, mesh={"tp": 2})
    assert "a rank's rows would not be whole quaternions. Take 1, or model.stack.linear_maps=real." in problem


def test_an_export_refuses_them() -> None:
    require = Requirements("llama")
    require_features(decode(Decoder.Config, {"stack": MODEL["stack"]}), (), require)
    assert any(problem.path == "model.stack.linear_maps" for problem in require.problems)
