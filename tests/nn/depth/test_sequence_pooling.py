"""Encoders whose sequence gets shorter: Funnel-Transformer and Informer's distilling against `transformers`, padding,
distances between windows written out, FLOPs, and what is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.conformance.made import close, dims, drawn, ready
from xscale.core.config import decode
from xscale.measure.flops import training_flops
from xscale.nn.depth.token_windows import Distilling, TokenWindows
from xscale.nn.model.decoder import Decoder
from xscale.nn.model.encoder import Encoder
from xscale.nn.model.encoder_decoder import EncoderDecoder
from xscale.nn.norm.batch_statistics import BatchNorm
from xscale.nn.position.pairs import Pairs, PositionPairs
from xscale.nn.position.position import POSITIONS, PositionTerms
from xscale.nn.tokens import Tokens

VOCABULARY, LENGTH, WIDTH, HEADS, HIDDEN = 17, 16, 12, 3, 20
K = WIDTH // HEADS
DISTILL = {"before": [1], "method": "distill", "separate_first": False, "queries_only": False}


def built(pooling: Any, *, problems: int = 0, part: Any = Encoder, model: Any = None, **stack: Any) -> Any:
    block = {
        "mixer": {"kind": "attention", "heads": HEADS, "bias": True, **stack.pop("mixer", {})},
        "ffn": {"kind": "dense", "hidden": HIDDEN, "bias": True, "activation": "gelu_tanh"},
        "norm": "layer",
        "residual": "post",
        **stack.pop("block", {}),
    }
    stack = {"depth": 4, "block": block, "pooling": pooling, **stack}
    plain = {"depth": 2, "block": block}
    stacks = {"encoder": stack, "decoder": plain} if part is EncoderDecoder else {"stack": stack}
    config = decode(part.Config, {"width": WIDTH, "position": "rope", **stacks, **(model or {})})
    refused = part.check(config, (VOCABULARY, LENGTH), "model")
    assert len(refused) == problems, [str(problem) for problem in refused]
    return " ".join(map(str, refused)) if problems else ready(part(config, VOCABULARY, LENGTH))


def ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))


def padded(text: Tensor, count: int) -> Tokens:
    documents = torch.zeros_like(text)
    return Tokens.from_ids(F.pad(text, (0, count), value=3), F.pad(documents, (0, count), value=1))


@pytest.mark.parametrize(
    ("length", "method", "separate", "queries_only"),
    [(16, "mean", True, True), (13, "mean", True, True), (11, "max", False, False)],
)
def test_an_encoder_is_funnel_transformer(
    length: int, method: str, separate: bool, queries_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    funnel = pytest.importorskip("transformers.models.funnel.modeling_funnel")
    attention = funnel.FunnelRelMultiheadAttention
    scores = attention.relative_positional_attention
    # Theirs leaves the position out of the scores with [CLS].
    monkeypatch.setattr(attention, "relative_positional_attention", lambda self, *args: scores(self, *args[:3]))
    config = funnel.FunnelConfig(
        vocab_size=VOCABULARY, block_sizes=[2, 1, 2], num_decoder_layers=2, d_model=WIDTH, n_head=HEADS, d_head=K,
        d_inner=HIDDEN, pooling_type=method, separate_cls=separate, truncate_seq=False, pool_q_only=queries_only,
        attention_type="factorized", layer_norm_eps=1e-5, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = funnel.FunnelForMaskedLM(config).double().eval()
    for module in theirs.modules():
        for name in ("r_kernel", "r_r_bias", "r_w_bias") if isinstance(module, attention) else ():
            torch.nn.init.normal_(getattr(module, name), std=0.5)
        for name in ("seg_embed", "r_s_bias") if isinstance(module, attention) else ():
            torch.nn.init.zeros_(getattr(module, name))
    pooling = {"before": [2, 3], "method": method, "separate_first": separate, "queries_only": queries_only}
    model = {"position": "transformer_xl", "embedding_norm": "layer", "head_bias": True}
    ours = built({**pooling, "decoder_blocks": 2}, depth=7, model=model)
    layers = [layer for block in theirs.funnel.encoder.blocks for layer in block] + list(theirs.funnel.decoder.layers)
    state = {
        "embed.table.weight": theirs.funnel.embeddings.word_embeddings.weight,
        "embed.norm.weight": theirs.funnel.embeddings.layer_norm.weight,
        "embed.norm.bias": theirs.funnel.embeddings.layer_norm.bias,
        "head.weight": theirs.lm_head.weight,
        "head.bias": theirs.lm_head.bias,
    }
    for at, layer in enumerate(layers):
        path = f"stack.blocks.{at}"
        linears = {"k": "k_head", "v": "v_head", "o": "post_proj"}
        parts = {f"mixer.part.{name}": getattr(layer.attention, other) for name, other in linears.items()}
        parts |= {"mixer.norm": layer.attention.layer_norm, "ffn.norm": layer.ffn.layer_norm}
        parts |= {"ffn.part.up": layer.ffn.linear_1, "ffn.part.down": layer.ffn.linear_2}
        for name, part in parts.items():
            state |= {f"{path}.{name}.weight": part.weight, f"{path}.{name}.bias": part.bias}
        state[f"{path}.mixer.part.q.weight"] = layer.attention.q_head.weight
        state[f"{path}.mixer.part.q.bias"] = torch.zeros(WIDTH)
        position = f"{path}.mixer.part.position"
        state[f"{position}.weight"] = layer.attention.r_kernel.permute(1, 2, 0).flatten(0, 1)
        state[f"{position}.content_bias"] = layer.attention.r_w_bias
        state[f"{position}.position_bias"] = layer.attention.r_r_bias
    ours.load_state_dict(state)
    text = ids(length)
    with torch.no_grad():
        expected = theirs(input_ids=text, attention_mask=torch.ones_like(text)).logits
        # Theirs computes the softmax of scores that it has rounded to float32.
        assert (ours(Tokens.from_ids(text)) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("length", [1, 9, 16])
def test_distilling_is_informers_layer(length: int) -> None:
    informer = pytest.importorskip("transformers.models.informer.modeling_informer")
    theirs = informer.InformerConvLayer(WIDTH).double().train()
    # Texts are no circles.
    theirs.downConv.padding_mode = "zeros"
    ours = ready(Distilling(dims(width=WIDTH, causal=False), BatchNorm.Config())).train()
    with torch.no_grad():
        theirs.downConv.weight.copy_(ours.conv.weight.view(WIDTH, 3, WIDTH).transpose(1, 2))
        theirs.downConv.bias.copy_(ours.conv.bias)
        theirs.norm.weight.copy_(ours.norm.weight)
        theirs.norm.bias.copy_(ours.norm.bias)
    x, text = drawn(2, length, WIDTH), Tokens.from_ids(ids(length))
    windows = TokenWindows.split(length, x.device, separate_first=False)
    assert close(ours(x, text, windows), theirs(x))
    plain = ready(Distilling(dims(width=WIDTH, causal=False), None))
    plain.load_state_dict({name: value for name, value in ours.state_dict().items() if "norm" not in name})
    theirs.norm = torch.nn.Identity()
    assert close(plain(x, text, windows), theirs(x)), "without a norm, the equation of the paper"


def test_queries_are_pooled_and_keys_are_not_before_a_norm_too() -> None:
    """A pre-norm block with ALiBi, each pair of a window and a token by itself."""
    block = {"residual": "pre", "ffn": "none"}
    model = built({"before": [1]}, depth=2, model={"position": "alibi"}, block=block)
    text = ids(6)
    first, second = model.stack.blocks.values()
    x = first(model.embed(Tokens.from_ids(text)), Tokens.from_ids(text))[0]
    pooled = torch.stack((x[0], (x[1] + x[2]) / 2, (x[3] + x[4]) / 2, x[5]))
    places, part, norm = (0, 1, 3, 5), second.mixer.part, second.mixer.norm
    q, k, v = (linear(norm(states)) for linear, states in ((part.q, pooled), (part.k, x), (part.v, x)))
    outputs = torch.empty(4, WIDTH, dtype=torch.float64)
    for h in range(HEADS):
        rows, slope = slice(h * K, (h + 1) * K), float(-part.position.relative_bias(torch.tensor([1]))[h, 0])
        for i, place in enumerate(places):
            scores = torch.stack([q[i, rows] @ k[j, rows] / K**0.5 - slope * abs(place - j) for j in range(6)])
            outputs[i, rows] = scores.softmax(0) @ v[:, rows]
    states = model.stack.norm(pooled + part.o(outputs))
    logits = states[[0, 1, 1, 2, 2, 3]] @ model.embed.table.weight.T
    assert close(model(Tokens.from_ids(text))[0], logits), "states of windows are repeated for their tokens"


@pytest.mark.parametrize("length", [7, 8])
@pytest.mark.parametrize("pooling", [{"before": [1, 2], "decoder_blocks": 1}, {"before": [1, 2]}, DISTILL])
def test_padding_changes_nothing(pooling: Any, length: int) -> None:
    model, text = built(pooling), ids(length)
    expected = model(Tokens.from_ids(text))
    assert close(model(padded(text, 5))[:, :length], expected)
    without = Tokens.from_ids(F.pad(text, (0, 5), value=3))
    assert not close(model(without)[:, :length], expected), "without documents padding is text"


@pytest.mark.parametrize("pooling", [{"before": [1, 2]}, DISTILL])
def test_a_decoder_reads_the_windows_of_its_source(pooling: Any) -> None:
    model, source = built(pooling, part=EncoderDecoder), ids(7)
    target = padded(ids(5, 1), 0)
    assert model.encode(Tokens.from_ids(source)).shape[1] == (3 if pooling is not DISTILL else 4)
    expected = model(target, source=Tokens.from_ids(source))
    assert close(model(target, source=padded(source, 6)), expected)


def test_a_document_never_reads_another() -> None:
    model = built({"before": [1, 2], "decoder_blocks": 1})
    text, documents = ids(9), torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]]).expand(2, -1)
    changed = text.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % VOCABULARY
    before, after = (model(Tokens.from_ids(batch, documents)) for batch in (text, changed))
    assert close(before[:, :4], after[:, :4])
    changed = text.clone()
    changed[:, :4] = (changed[:, :4] + 1) % VOCABULARY
    assert close(before[:, 4:], model(Tokens.from_ids(changed, documents))[:, 4:])


@pytest.mark.parametrize("name", ["transformer_xl", "shaw", "deberta"])
def test_pairs_by_position_are_pairs_by_index_where_nothing_was_shortened(name: str) -> None:
    entry = POSITIONS.get(name)
    position: Any = ready(entry.part(entry.part.example(), dims(width=WIDTH, causal=False), HEADS, K))
    q, k = drawn(2, HEADS, 7, K), drawn(2, HEADS, 7, K, seed=1)
    pairs = Pairs(7, 7, project=lambda x: (x[:, :K].expand(HEADS, -1, -1), x[:, K : 2 * K].expand(HEADS, -1, -1)))
    places = torch.arange(7).expand(2, -1)
    by_position = PositionPairs.of(pairs, places, places, 20)
    assert close(position.scores(q, k, by_position), position.scores(q, k, pairs))
    moved = PositionPairs.of(pairs, places * 2, places * 2, 20)
    assert not close(position.scores(q, k, moved), position.scores(q, k, pairs))
    # Blocks of queries and FlexAttention take differences of indices.
    assert PositionTerms(position, pairs).tables(q) is not None
    assert PositionTerms(position, moved).tables(q) is None
    if position.adds_values:
        weights = drawn(2, HEADS, 7, 7).softmax(-1)
        assert close(position.values(weights, by_position), position.values(weights, pairs))


@pytest.mark.parametrize(
    "pooling",
    [{"before": [1, 2], "decoder_blocks": 1, "separate_first": False}, {**DISTILL, "before": [1, 2]}],
    ids=["a decoder", "distilling"],
)
def test_flops_are_those_of_shorter_sequences(pooling: Any) -> None:
    block = {"residual": "no_norm", "ffn": {"kind": "dense", "hidden": HIDDEN}}
    model = built(pooling, mixer={"core": "entmax", "bias": False}, block=block)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(Tokens.from_ids(ids(16)[:1]))
    assert training_flops(model, 16) == 3 * counter.get_total_flops()


def test_what_cannot_be_shortened_is_refused_with_what_would_work() -> None:
    one = {"before": [1]}
    assert "model.stack.pooling: a window has a later token" in built(one, problems=1, part=Decoder)
    assert "pooling.before: [4] are not ascending blocks" in built({"before": [4]}, problems=1)
    assert "[1, 3] are not" in built({"before": [1, 3], "decoder_blocks": 1}, problems=1)
    both = built({"before": [1], "method": "distill"}, problems=2)
    assert "separate_first: the convolution reads all tokens" in both
    assert "only distill has a norm" in built({**one, "norm": "batch"}, problems=1)
    assert "core 'informer' has as many queries as keys" in built(one, problems=1, mixer={"core": "informer"})
    assert "queries_only: the first block of a stage begins" in built(one, problems=1, block={"mixer": "fourier"})
    assert "block.residual=pre" in built({**one, "queries_only": False}, problems=1, block={"residual": "reversible"})
    assert "stack.halting=null" in built(one, problems=1, halting={})
    assert "global_tokens: would be pooled" in built(one, problems=1, model={"global_tokens": 1})
    counts = {"mixer": {"core": "block_sparse"}, "model": {"position": "relative"}}
    assert "counts distances in windows" in built({**one, "queries_only": False}, problems=1, **counts)
    transparent = built(one, problems=1, part=EncoderDecoder, model={"transparent": True})
    assert "which have several lengths" in transparent
