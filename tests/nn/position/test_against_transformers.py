"""Attention with positions that read queries and keys, against that of `transformers` with copied weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import dims, drawn, ready
from xscale.core.config import decode
from xscale.nn.mixer.attention import Attention
from xscale.nn.tokens import Tokens

WIDTH, HEADS = 32, 4


def network(position: dict[str, Any], causal: bool, **changes: Any) -> Attention:
    config = decode(Attention.Config, {"heads": HEADS, "position": position, **changes})
    return ready(Attention(config, dims(causal=causal)))


def at(length: int) -> Tokens:
    return Tokens.from_ids(torch.zeros(2, length, dtype=torch.long))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_transformer_xl_is_xlnets_attention(causal: bool) -> None:
    from transformers import XLNetConfig, XLNetModel

    config = XLNetConfig(d_model=WIDTH, n_head=HEADS, n_layer=1, d_inner=8, dropout=0.0, vocab_size=9)
    config.attn_type = "uni" if causal else "bi"
    theirs, mixer, x = XLNetModel(config).double().eval(), network({"kind": "transformer_xl"}, causal), drawn(2, 17, 32)
    attention: Any = theirs.layer[0].rel_attn
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    part: Any = mixer.position
    copies = {mixer.q: attention.q, mixer.k: attention.k, mixer.v: attention.v, part: attention.r}
    with torch.no_grad():
        for module, weight in copies.items():
            module.weight.copy_(weight.flatten(1).T)
        mixer.o.weight.copy_(attention.o.flatten(1))
        part.content_bias.copy_(attention.r_w_bias)
        part.position_bias.copy_(attention.r_r_bias)
    r = theirs.relative_positional_encoding(17, 17, bsz=2).double()
    h = x.transpose(0, 1)
    hidden = torch.ones(17, 17, dtype=torch.double).triu(1)[:, :, None, None] if causal else None
    q, k, v = (torch.einsum("ibh,hnd->ibnd", h, weight) for weight in (attention.q, attention.k, attention.v))
    keys = torch.einsum("ibh,hnd->ibnd", r, attention.r)
    heads = attention.rel_attn_core(q, k, v, keys, attn_mask=hidden)
    wanted = attention.post_attention(h, heads, residual=False)
    found = torch.nn.functional.layer_norm(mixer(x, at(17)), (WIDTH,), eps=config.layer_norm_eps)
    found = found * attention.layer_norm.weight + attention.layer_norm.bias
    assert torch.allclose(found, wanted.transpose(0, 1), atol=1e-4)


@pytest.mark.parametrize(("buckets", "distance"), [(8, 30), (256, 512), (None, 12)])
def test_deberta_is_deberta_v2s_attention(buckets: int | None, distance: int) -> None:
    from transformers import DebertaV2Config
    from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

    config = DebertaV2Config(
        hidden_size=WIDTH, num_attention_heads=HEADS, relative_attention=True, pos_att_type=["c2p", "p2c"],
        share_att_key=True, position_buckets=buckets or -1, max_relative_positions=distance,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = DisentangledSelfAttention(config).double().eval()
    position = {"kind": "deberta", "buckets": buckets, "distance": distance}
    mixer, x = network(position, False, bias=True), drawn(2, 60, WIDTH)
    with torch.no_grad():
        for ours, name in ((mixer.q, "query"), (mixer.k, "key"), (mixer.v, "value")):
            linear = theirs.get_submodule(f"{name}_proj")
            assert ours is not None
            assert ours.bias is not None
            linear.weight.copy_(ours.weight)
            linear.bias.copy_(ours.bias)
        mixer.o.weight.copy_(torch.eye(WIDTH))
        assert mixer.o.bias is not None
        mixer.o.bias.zero_()
    part: Any = mixer.position
    everyone = torch.ones(2, 1, 60, 60)
    wanted: Tensor = theirs(x, everyone, rel_embeddings=part.table)[0]
    assert torch.allclose(mixer(x, at(60)), wanted, atol=1e-4)


@pytest.mark.parametrize(("buckets", "distance"), [(4, 8), (8, 30), (32, 128), (256, 512)])
def test_debertas_buckets_are_deberta_v2s(buckets: int, distance: int) -> None:
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    part: Any = network({"kind": "deberta", "buckets": buckets, "distance": distance}, False).position
    distances = torch.arange(-1000, 1000)
    wanted = make_log_bucket_position(distances, buckets, distance).long()
    assert torch.equal(part.row(distances), (wanted + buckets).clamp(0, 2 * buckets - 1))
