"""LongT5's mixer against the paper's equations, and whole encoders against `transformers`."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conformance.made import close, drawn, ready
from xscale.core.config import decode
from xscale.nn.attention.longt5 import LongT5
from xscale.nn.dims import Dims
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.longt5 import TransientGlobalAttention
from xscale.nn.mixer.mixer import MIXERS
from xscale.nn.model.encoder import Encoder
from xscale.nn.position.alibi import Alibi
from xscale.nn.position.relative import Relative
from xscale.nn.position.rope import Rope
from xscale.nn.tokens import Tokens

WIDTH, HEADS, BUCKETS, DISTANCE, RADIUS, BLOCK = 32, 4, 16, 40, 6, 4
CORE = {"kind": "longt5", "radius": RADIUS, "block": BLOCK}


def dims(position: Any = None) -> Dims:
    return Dims(width=WIDTH, depth=2, vocabulary=9, length=256, causal=False, position=position)


def mixer(position: Any = None, **changes: Any) -> TransientGlobalAttention:
    config = decode(TransientGlobalAttention.Config, {"heads": HEADS, "core": CORE, **changes})
    assert TransientGlobalAttention.check(config, dims(position), "mixer") == []
    return ready(TransientGlobalAttention(config, dims(position)))


def bucket(offset: int) -> int:
    """T5's bucket of an offset key - query, both ways: half of the buckets, half of them exact."""
    half, exact = BUCKETS // 2, BUCKETS // 4
    distance = abs(offset)
    if distance >= exact:
        distance = exact + int(math.log(distance / exact) / math.log(DISTANCE / exact) * (half - exact))
        distance = min(distance, half - 1)
    return distance + half * (offset > 0)


@pytest.mark.parametrize("length", [48, 54])
def test_it_is_the_papers_attention(length: int) -> None:
    """One query at a time: T5's scores, without a factor, of the local keys and of the normed sums of the blocks."""
    part = mixer(Relative.Config(buckets=BUCKETS, distance=DISTANCE), scale=1.0)
    assert part.position is not None
    assert part.block_position is not None
    x = drawn(2, length, WIDTH).requires_grad_()
    # The tokens after the last whole block belong to it.
    ends = [*range(BLOCK, length // BLOCK * BLOCK, BLOCK), length]
    sums = torch.stack([x[:, a:b].sum(1) for a, b in zip([0, *ends], ends, strict=False)], 1)
    summaries = sums / (sums.square().mean(-1, keepdim=True) + 1e-6).sqrt() * part.block_norm.weight
    assert part.k is not None
    q, k, v, gk, gv = (
        (y @ linear.weight.mT).unflatten(-1, (HEADS, -1))
        for y, linear in ((x, part.q), (x, part.k), (x, part.v), (summaries, part.k), (summaries, part.v))
    )
    rows = []
    for t in range(length):
        near = range(max(0, t - RADIUS), min(length, t + RADIUS + 1))
        local = torch.einsum("bhk,bshk->bhs", q[:, t], k[:, near.start : near.stop])
        local = local + part.position.weight[[bucket(s - t) for s in near]].T
        own = min(t // BLOCK, len(ends) - 1)
        far = torch.einsum("bhk,bmhk->bhm", q[:, t], gk)
        far = far + part.block_position.weight[[bucket(m - own) for m in range(len(ends))]].T
        weights = torch.cat((local, far), -1).softmax(-1)
        values = torch.cat((v[:, near.start : near.stop], gv), 1)
        rows.append(torch.einsum("bhs,bshk->bhk", weights, values).flatten(1))
    wanted = torch.stack(rows, 1) @ part.o.weight.mT
    out = part(x, Tokens.from_ids(torch.zeros(2, length, dtype=torch.long)))
    assert close(out, wanted)
    above = drawn(*out.shape, seed=3)
    leaves = [x, *part.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad((y * above).sum(), leaves) for y in (out, wanted)), strict=True):
        assert close(ours, theirs)
        assert ours.any()


def test_positions_that_a_block_has_not_are_refused() -> None:
    for position in (Rope.Config(), Alibi.Config()):
        config = decode(TransientGlobalAttention.Config, {"heads": HEADS, "core": CORE})
        problems = TransientGlobalAttention.check(config, dims(position), "mixer")
        assert [problem.path for problem in problems] == ["model.position"]
        assert "relative" in str(problems[0])
    config = decode(TransientGlobalAttention.Config, {"heads": HEADS, "core": {"kind": "softmax"}})
    assert "cannot hold the core 'softmax'" in str(TransientGlobalAttention.check(config, dims(), "mixer")[0])
    assert MIXERS.get("longt5").deviations


CORES: dict[str, dict[str, Any]] = {
    "local": {
        "kind": "attention",
        "core": {"kind": "block_sparse", "block": 16, "pattern": {"kind": "band", "left": 15, "right": 15}},
    },
    "transient-global": {"kind": "longt5", "core": {"kind": "longt5", "radius": 15, "block": 8}},
}


@pytest.mark.parametrize("kind", CORES)
def test_an_encoder_is_transformers_longt5(kind: str) -> None:
    """Three layers with their weights; theirs computes the softmax in float32."""
    from transformers import LongT5Config
    from transformers.models.longt5.modeling_longt5 import LongT5EncoderModel

    theirs_config = LongT5Config(
        vocab_size=50,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        num_heads=HEADS,
        d_ff=48,
        num_layers=3,
        local_radius=15,
        global_block_size=8,
        dropout_rate=0.0,
        encoder_attention_type=kind,
        feed_forward_proj="gated-gelu",
        relative_attention_num_buckets=BUCKETS,
        relative_attention_max_distance=DISTANCE,
    )
    # Theirs approximates the GELU by tanh.
    theirs_config.dense_act_fn = "gelu"
    torch.manual_seed(0)
    theirs = LongT5EncoderModel(theirs_config).double().eval()
    for name, parameter in theirs.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    block = {
        "mixer": {"heads": HEADS, "scale": 1.0, **CORES[kind]},
        "ffn": {"kind": "gated", "hidden": 48, "gate": "geglu"},
        "norm": "rms",
    }
    position = {"kind": "relative", "buckets": BUCKETS, "distance": DISTANCE, "shared": True}
    given = {"width": WIDTH, "position": position, "stack": {"depth": 3, "block": block}}
    config = decode(Encoder.Config, given)
    assert Encoder.check(config, (50, 100), "model") == []
    ours = ready(Encoder(config, 50, 100))
    weights = dict(theirs.named_parameters())
    copy_weights(ours, weights, kind)
    ids = torch.randint(50, (2, 75), generator=torch.Generator().manual_seed(0))
    wanted = theirs(ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    tokens = Tokens.from_ids(ids)
    found = ours.stack(ours.embed(tokens), tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        ours.get_parameter("stack.position.weight")[BUCKETS // 2 + 1] += 1
    assert not torch.allclose(ours.stack(ours.embed(tokens), tokens), wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def copy_weights(ours: Encoder, weights: dict[str, Tensor], kind: str) -> None:
    attention = "TransientGlobalSelfAttention" if kind == "transient-global" else "LocalSelfAttention"
    first = f"encoder.block.0.layer.0.{attention}"
    renamed = {
        "embed.table.weight": "shared.weight",
        "stack.norm.weight": "encoder.final_layer_norm.weight",
        "stack.position.weight": f"{first}.relative_attention_bias.weight",
        "stack.core_tables.block_position.weight": f"{first}.global_relative_attention_bias.weight",
    }
    for layer in range(3):
        here, there = f"stack.blocks.{layer}", f"encoder.block.{layer}.layer"
        renamed |= {
            f"{here}.mixer.norm.weight": f"{there}.0.layer_norm.weight",
            f"{here}.ffn.norm.weight": f"{there}.1.layer_norm.weight",
            f"{here}.mixer.part.block_norm.weight": f"{there}.0.{attention}.global_input_layer_norm.weight",
        }
        for name in ("q", "k", "v", "o"):
            renamed[f"{here}.mixer.part.{name}.weight"] = f"{there}.0.{attention}.{name}.weight"
        for name, other in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
            renamed[f"{here}.ffn.part.{name}.weight"] = f"{there}.1.DenseReluDense.{other}.weight"
    for name, parameter in ours.named_parameters():
        parameter.copy_(weights[renamed[name]])


def test_norms_of_the_input_need_the_mixer() -> None:
    dims = Dims(width=32, depth=1, vocabulary=11, length=64, causal=False)
    core = LongT5.Config(norm="input")
    (problem,) = Attention.check(Attention.Config(heads=4, core=core), dims, "mixer")
    assert str(problem).startswith("mixer.core.norm: 'input' is what the mixer longt5 sets")
    assert "Take projection, or mixer.kind=longt5." in str(problem)
    assert TransientGlobalAttention.check(TransientGlobalAttention.Config(heads=4, core=core), dims, "mixer") == []
