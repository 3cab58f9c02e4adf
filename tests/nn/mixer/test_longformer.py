"""Longformer's mixer against the paper's equations, and a whole encoder against `transformers`."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conformance.made import close, drawn, numbered, ready
from tests.nn.attention import literal
from xscale.core.config import decode
from xscale.nn.attention.block_sparse import BlockSparse
from xscale.nn.dims import Dims
from xscale.nn.materialize import materialize
from xscale.nn.mixer.longformer import LongformerAttention
from xscale.nn.model.encoder import Encoder
from xscale.nn.module import name_modules
from xscale.nn.pattern.global_blocks import GlobalBlocks
from xscale.nn.pattern.union import UnionPattern
from xscale.nn.pattern.window import Band
from xscale.nn.position.rope import Rope
from xscale.nn.tokens import Tokens

WIDTH, HEADS, SIDE = 32, 4, 6
GLOBAL = (0, 17, 900)
CORE = {"kind": "block_sparse", "block": 8, "pattern": {"kind": "band", "left": SIDE, "right": SIDE}}
DIMS = Dims(width=WIDTH, depth=2, vocabulary=9, length=256, causal=False)


def mixer(**changes: Any) -> LongformerAttention:
    config = decode(
        LongformerAttention.Config, {"heads": HEADS, "core": CORE, "global_token_indices": GLOBAL, **changes}
    )
    assert LongformerAttention.check(config, DIMS, "mixer") == []
    part = LongformerAttention(config, DIMS)
    name_modules(part)
    return part


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("length", [40, 53])
def test_it_is_the_papers_attention(length: int, documents: bool) -> None:
    """One query at a time: a global one by Q_g, K_g, V_g over all keys, another by Q, K, V over window and globals."""
    part = ready(mixer(bias=True))
    assert part.k is not None
    x = drawn(2, length, WIDTH).requires_grad_()
    numbers = numbered(15, length - 15) if documents else torch.zeros(2, length, dtype=torch.long)
    local, wide = (
        [(x @ linear.weight.mT + linear.bias).unflatten(-1, (HEADS, -1)) for linear in linears]
        for linears in ((part.q, part.k, part.v), (part.global_q, part.global_k, part.global_v))
    )
    rows = []
    for t in range(length):
        q, k, v = wide if t in GLOBAL else local
        keys = [
            s
            for s in range(length)
            if (t in GLOBAL or s in GLOBAL or abs(s - t) <= SIDE) and numbers[0, s] == numbers[0, t]
        ]
        scores = torch.einsum("bhk,bshk->bhs", q[:, t], k[:, keys]) / 8**0.5
        rows.append(torch.einsum("bhs,bshk->bhk", scores.softmax(-1), v[:, keys]).flatten(1))
    wanted = torch.stack(rows, 1) @ part.o.weight.mT + part.o.bias
    ids = torch.zeros(2, length, dtype=torch.long)
    out = part(x, Tokens.from_ids(ids, numbers if documents else None))
    assert close(out, wanted)
    above = drawn(*out.shape, seed=3)
    leaves = [x, *part.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad((y * above).sum(), leaves) for y in (out, wanted)), strict=True):
        assert close(ours, theirs)


def test_global_projections_begin_as_copies() -> None:
    part = mixer()
    materialize(part, 0)
    assert part.k is not None
    for copied, original in ((part.global_q, part.q), (part.global_k, part.k), (part.global_v, part.v)):
        assert torch.equal(copied.weight, original.weight)
    assert not torch.equal(part.q.weight, part.k.weight)


def test_dropout_reaches_the_global_rows() -> None:
    part = ready(mixer(dropout=0.5)).train()
    x = drawn(2, 40, WIDTH)
    tokens = Tokens.from_ids(torch.zeros(2, 40, dtype=torch.long), rng_seed=1)
    torch.manual_seed(0)
    dropped = part(x, tokens)
    assert not close(dropped[:, 17], part.eval()(x, tokens)[:, 17])


def test_what_global_tokens_cannot_have_is_refused() -> None:
    def problems(position: Any = None, **changes: Any) -> list[str]:
        config = decode(LongformerAttention.Config, {"heads": HEADS, "core": CORE, **changes})
        dims = Dims(width=WIDTH, depth=2, vocabulary=9, length=256, causal=False, position=position)
        return [problem.path for problem in LongformerAttention.check(config, dims, "mixer")]

    assert problems(Rope.Config()) == ["model.position"]
    assert problems(kv_heads=2) == ["mixer.kv_heads"]
    assert problems(shared_qk=True) == ["mixer.shared_qk"]
    assert problems(qk_norm="rms") == ["mixer.qk_norm"]
    assert problems(core={**CORE, "soft_cap": 9.0}) == ["mixer.core.soft_cap"]
    assert problems(core={**CORE, "sinks": True}) == ["mixer.core.sinks"]
    assert problems(core={"kind": "softmax"}) == ["mixer.core"]


def test_its_cost_counts_the_global_rows() -> None:
    with torch.device("meta"):
        part, fewer = mixer(), mixer(global_token_indices=[0])
    assert part.multiply_adds(1000, 1000) > fewer.multiply_adds(1000, 1000) >= 2 * WIDTH * 1000


def test_an_encoder_is_transformers_longformer() -> None:
    """Two layers with windows of 8 and 12, two global tokens, and projections of their own; theirs is in float32."""
    from transformers import LongformerConfig, LongformerModel

    theirs_config = LongformerConfig(
        vocab_size=50,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_hidden_layers=2,
        intermediate_size=48,
        attention_window=[8, 8],
        max_position_embeddings=80,
        pad_token_id=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    theirs = LongformerModel(theirs_config, add_pooling_layer=False).eval()
    for name, parameter in theirs.named_parameters():
        nn.init.normal_(parameter, mean=float("LayerNorm.weight" in name), std=0.2)
    block = {
        "mixer": {
            "kind": "longformer",
            "heads": HEADS,
            "bias": True,
            "core": {"kind": "block_sparse", "block": 8, "pattern": {"kind": "band", "left": 4, "right": 4}},
            "global_token_indices": [0, 21],
        },
        "ffn": {"kind": "dense", "hidden": 48, "activation": "gelu", "bias": True},
        "norm": {"kind": "layer", "eps": 1e-12},
        "residual": "post",
    }
    config = decode(
        Encoder.Config,
        {
            "width": WIDTH,
            "position": "learned",
            "embedding_norm": {"kind": "layer", "eps": 1e-12},
            "stack": {"depth": 2, "block": block},
        },
    )
    assert Encoder.check(config, (50, 64), "model") == []
    ours = Encoder(config, 50, 64)
    materialize(ours, 0)
    ours.eval()
    copy_weights(ours, dict(theirs.named_parameters()))
    ids = torch.randint(2, 50, (2, 64), generator=torch.Generator().manual_seed(0))
    is_global = torch.zeros_like(ids)
    is_global[:, [0, 21]] = 1
    tokens = Tokens.from_ids(ids)
    with torch.no_grad():
        wanted = theirs(ids, attention_mask=torch.ones_like(ids), global_attention_mask=is_global).last_hidden_state
        found = ours.stack(ours.embed(tokens), tokens)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        ours.get_parameter("stack.blocks.1.mixer.part.global_k.weight").zero_()
        assert not torch.allclose(ours.stack(ours.embed(tokens), tokens), wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def copy_weights(ours: Encoder, weights: dict[str, Tensor]) -> None:
    # Every token is of type 0, and the first position is the one after the padding's.
    positions = (
        weights["embeddings.position_embeddings.weight"][2:66] + weights["embeddings.token_type_embeddings.weight"][0]
    )
    ours.get_parameter("embed.position.weight").copy_(positions)
    names = {"embed.table": "embeddings.word_embeddings", "embed.norm": "embeddings.LayerNorm"}
    for layer in range(2):
        here, there = f"stack.blocks.{layer}", f"encoder.layer.{layer}"
        names |= {
            f"{here}.mixer.norm": f"{there}.attention.output.LayerNorm",
            f"{here}.mixer.part.o": f"{there}.attention.output.dense",
            f"{here}.ffn.norm": f"{there}.output.LayerNorm",
            f"{here}.ffn.part.up": f"{there}.intermediate.dense",
            f"{here}.ffn.part.down": f"{there}.output.dense",
        }
        for name, other in (("q", "query"), ("k", "key"), ("v", "value")):
            names[f"{here}.mixer.part.{name}"] = f"{there}.attention.self.{other}"
            names[f"{here}.mixer.part.global_{name}"] = f"{there}.attention.self.{other}_global"
    for name, parameter in ours.named_parameters():
        module, kind = name.rsplit(".", 1)
        if module in names:
            parameter.copy_(weights[f"{names[module]}.{kind}"])
        else:
            assert name == "embed.position.weight"


def test_single_global_tokens_decode_as_in_parallel() -> None:
    """The pattern alone in a causal model: a query over a cache sees the global tokens before it, and no more."""
    pattern = UnionPattern.Config(
        patterns=(
            Band.Config(left=SIDE, right=0),
            GlobalBlocks.Config(global_block_indices=(), global_token_indices=(5, 21)),
        )
    )
    core = literal.build(BlockSparse.Config(block=8, pattern=pattern), causal=True)

    def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        j = torch.arange(k.shape[2])
        i = j[-q.shape[2] :, None]
        shown = (i - j <= SIDE) | (j == 5) | (j == 21) | (i == 5) | (i == 21)
        return torch.softmax((q @ k.mT / 8**0.5).masked_fill(~(shown & seen), float("-inf")), -1) @ v

    for mask in literal.masks(50, causal=True):
        literal.agree(core, mask, reference)
