"""Attention with relative positions, against that of `transformers` with copied weights, with all scores and by blocks.

T5, BLOOM and MPT have biases by distance; VITS has Shaw et al.'s embeddings of keys and of values, Wav2Vec2-BERT and
SpeechT5 those of keys; XLNet and Wav2Vec2-Conformer have Transformer-XL's terms, and DeBERTa v2 its own.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import dims, drawn, ready
from xscale.core.config import decode
from xscale.nn.mixer.attention import Attention
from xscale.nn.tokens import Tokens

WIDTH, HEADS = 32, 4


CORES = {
    "softmax": {"kind": "softmax"},
    "block_sparse": {"kind": "block_sparse", "block": 8, "pattern": {"kind": "window", "window": 99}},
}
every_core = pytest.mark.parametrize("core", CORES)


def network(position: dict[str, Any], causal: bool, core: str = "softmax", **changes: Any) -> Attention:
    config = decode(Attention.Config, {"heads": HEADS, "position": position, "core": CORES[core], **changes})
    return ready(Attention(config, dims(causal=causal)))


def copy_projections(mixer: Attention, *linears: torch.nn.Linear) -> None:
    """Copy the weights and biases of linear maps to queries, keys, values and output."""
    for ours, theirs in zip((mixer.q, mixer.k, mixer.v, mixer.o), linears, strict=True):
        assert ours is not None
        with torch.no_grad():
            ours.weight.copy_(theirs.weight)
            if theirs.bias is not None:
                assert ours.bias is not None
                ours.bias.copy_(theirs.bias)


def random_weights(module: torch.nn.Module) -> Any:
    """Return the module in evaluation and in float64, with random weights, so that no term is zero or small."""
    module = module.double().eval()
    for at, parameter in enumerate(module.parameters()):
        with torch.no_grad():
            parameter.copy_(0.3 * drawn(*parameter.shape, seed=100 + at))
    return module


def future(length: int) -> Tensor:
    """[T, T], -inf at later keys."""
    return torch.full((length, length), float("-inf"), dtype=torch.double).triu(1)


def at(length: int) -> Tokens:
    return Tokens.from_ids(torch.zeros(2, length, dtype=torch.long))


@every_core
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_transformer_xl_is_xlnets_attention(causal: bool, core: str) -> None:
    from transformers import XLNetConfig, XLNetModel

    config = XLNetConfig(d_model=WIDTH, n_head=HEADS, n_layer=1, d_inner=8, dropout=0.0, vocab_size=9)
    config.attn_type = "uni" if causal else "bi"
    theirs, mixer, x = (
        XLNetModel(config).double().eval(),
        network({"kind": "transformer_xl"}, causal, core),
        drawn(2, 17, 32),
    )
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


@every_core
@pytest.mark.parametrize(("buckets", "distance"), [(8, 30), (256, 512), (None, 12)])
def test_deberta_is_deberta_v2s_attention(buckets: int | None, distance: int, core: str) -> None:
    from transformers import DebertaV2Config
    from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

    config = DebertaV2Config(
        hidden_size=WIDTH, num_attention_heads=HEADS, relative_attention=True, pos_att_type=["c2p", "p2c"],
        share_att_key=True, position_buckets=buckets or -1, max_relative_positions=distance,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = DisentangledSelfAttention(config).double().eval()
    position = {"kind": "deberta", "buckets": buckets, "distance": distance}
    mixer, x = network(position, False, core, bias=True), drawn(2, 60, WIDTH)
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


@every_core
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_relative_is_t5s_attention(causal: bool, core: str) -> None:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(
        d_model=WIDTH, d_kv=8, num_heads=HEADS, relative_attention_num_buckets=8, relative_attention_max_distance=20,
        is_decoder=causal, dropout_rate=0.0,
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = random_weights(T5Attention(config, has_relative_attention_bias=True, layer_idx=0))
    mixer = network({"kind": "relative", "buckets": 8, "distance": 20}, causal, core, scale=1.0)
    copy_projections(mixer, theirs.q, theirs.k, theirs.v, theirs.o)
    part: Any = mixer.position
    with torch.no_grad():
        part.weight.copy_(theirs.relative_attention_bias.weight)
    x = drawn(2, 45, WIDTH)
    wanted = theirs(x, mask=future(45).expand(2, 1, -1, -1) if causal else None)[0]
    assert torch.allclose(mixer(x, at(45)), wanted, atol=1e-4)


@every_core
def test_alibi_is_blooms_attention(core: str) -> None:
    from transformers import BloomConfig
    from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor

    theirs = random_weights(BloomAttention(BloomConfig(hidden_size=WIDTH, n_head=HEADS, hidden_dropout=0.0), 0))
    mixer, x = network({"kind": "alibi"}, True, core, bias=True), drawn(2, 45, WIDTH)
    both = theirs.query_key_value
    projections = [torch.nn.Linear(WIDTH, WIDTH, dtype=torch.double) for _ in range(3)]
    with torch.no_grad():
        for which, linear in enumerate(projections):
            linear.weight.copy_(both.weight.view(HEADS, 3, -1, WIDTH)[:, which].flatten(0, 1))
            linear.bias.copy_(both.bias.view(HEADS, 3, -1)[:, which].flatten())
    copy_projections(mixer, *projections, theirs.dense)
    alibi = build_alibi_tensor(torch.ones(2, 45), HEADS, torch.double)
    wanted = theirs(x, torch.zeros_like(x), alibi, future(45).expand(2, 1, -1, -1))[0]
    assert torch.allclose(mixer(x, at(45)), wanted, atol=1e-4)


@every_core
@pytest.mark.parametrize("heads", [4, 8])
def test_alibi_is_mpts_attention(heads: int, core: str) -> None:
    from transformers import MptConfig
    from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

    theirs = random_weights(MptAttention(MptConfig(d_model=WIDTH, n_heads=heads), 0))
    mixer, x = network({"kind": "alibi"}, True, core, heads=heads), drawn(2, 45, WIDTH)
    projections = [torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.double) for _ in range(3)]
    for linear, weight in zip(projections, theirs.Wqkv.weight.chunk(3), strict=True):
        linear.weight = torch.nn.Parameter(weight)
    copy_projections(mixer, *projections, theirs.out_proj)
    alibi = build_mpt_alibi_tensor(heads, 45).double()
    wanted = theirs(x, alibi, attention_mask=future(45).isinf().expand(2, 1, -1, -1))[0]
    assert torch.allclose(mixer(x, at(45)), wanted, atol=1e-4)


@every_core
def test_shaw_is_vits_attention(core: str) -> None:
    """With embeddings of all distances: farther ones have none in VITS, and the last one's in the paper."""
    from transformers import VitsConfig
    from transformers.models.vits.modeling_vits import VitsAttention

    config = VitsConfig(hidden_size=WIDTH, num_attention_heads=HEADS, window_size=44, attention_dropout=0.0)
    theirs = random_weights(VitsAttention(config))
    mixer, x = network({"kind": "shaw", "distance": 44}, False, core, bias=True), drawn(2, 45, WIDTH)
    copy_projections(mixer, theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.out_proj)
    part: Any = mixer.position
    with torch.no_grad():
        part.key_table.copy_(theirs.emb_rel_k[0])
        part.value_table.copy_(theirs.emb_rel_v[0])
    assert torch.allclose(mixer(x, at(45)), theirs(x)[0], atol=1e-4)


@every_core
def test_shaw_without_values_is_wav2vec2_berts_attention(core: str) -> None:
    from transformers import Wav2Vec2BertConfig
    from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention

    config = Wav2Vec2BertConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, position_embeddings_type="relative_key",
        left_max_position_embeddings=7, right_max_position_embeddings=7, attention_dropout=0.0,
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = random_weights(Wav2Vec2BertSelfAttention(config))
    mixer, x = network({"kind": "shaw", "distance": 7, "values": False}, False, core, bias=True), drawn(2, 45, WIDTH)
    copy_projections(mixer, theirs.linear_q, theirs.linear_k, theirs.linear_v, theirs.linear_out)
    part: Any = mixer.position
    with torch.no_grad():
        part.key_table.copy_(theirs.distance_embedding.weight)
    assert torch.allclose(mixer(x, at(45)), theirs(x)[0], atol=1e-4)


@every_core
def test_shaw_without_values_is_speecht5s_attention(core: str) -> None:
    """Its rows are by query - key, and of the distances before the query it has one less."""
    from transformers.models.speecht5.modeling_speecht5 import SpeechT5Attention, SpeechT5RelativePositionalEncoding

    distance = 7
    theirs = random_weights(SpeechT5Attention(WIDTH, HEADS))
    rows = random_weights(SpeechT5RelativePositionalEncoding(WIDTH // HEADS, distance))
    position = {"kind": "shaw", "distance": distance, "values": False}
    mixer, x = network(position, False, core, bias=True), drawn(2, 45, WIDTH)
    copy_projections(mixer, theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.out_proj)
    part: Any = mixer.position
    table = rows.pe_k.weight.flip(0)  # by key - query, from 1 - distance on
    with torch.no_grad():
        part.key_table.copy_(torch.cat((table[:1], table)))
    wanted = theirs(x, position_bias=rows(x))[0]
    assert torch.allclose(mixer(x, at(45)), wanted, atol=1e-4)


@every_core
def test_transformer_xl_is_wav2vec2_conformers_attention(core: str) -> None:
    """Its sines and cosines take turns; those of the paper follow each other."""
    from transformers import Wav2Vec2ConformerConfig
    from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import (
        Wav2Vec2ConformerRelPositionalEmbedding,
        Wav2Vec2ConformerSelfAttention,
    )

    config = Wav2Vec2ConformerConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, position_embeddings_type="relative", attention_dropout=0.0,
        max_source_positions=60,
    )  # fmt: skip
    theirs = random_weights(Wav2Vec2ConformerSelfAttention(config))
    mixer, x = network({"kind": "transformer_xl"}, False, core, bias=True), drawn(2, 45, WIDTH)
    copy_projections(mixer, theirs.linear_q, theirs.linear_k, theirs.linear_v, theirs.linear_out)
    part: Any = mixer.position
    with torch.no_grad():
        part.weight.copy_(torch.cat((theirs.linear_pos.weight[:, 0::2], theirs.linear_pos.weight[:, 1::2]), 1))
        part.content_bias.copy_(theirs.pos_bias_u)
        part.position_bias.copy_(theirs.pos_bias_v)
    rows = Wav2Vec2ConformerRelPositionalEmbedding(config)(x)
    wanted = theirs(x, relative_position_embeddings=rows)[0]
    assert torch.allclose(mixer(x, at(45)), wanted, atol=1e-4)
