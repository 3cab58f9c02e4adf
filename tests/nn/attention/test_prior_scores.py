"""Scores handed from block to block against the papers' equations, written out: RealFormer, LazyFormer, Evolving."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.made import close, dims, drawn, numbered, ready
from xscale.core.config import decode
from xscale.nn.attention.evolving import Evolving
from xscale.nn.attention.ops.mask import AttentionMask, ScoreEdge
from xscale.nn.attention.prior_scores import PriorScores
from xscale.nn.attention.softmax import Softmax
from xscale.nn.forward import Forward
from xscale.nn.model.decoder import Decoder
from xscale.nn.model.encoder import Encoder
from xscale.nn.model.encoder_decoder import EncoderDecoder
from xscale.nn.tokens import Tokens
from xscale.parallel.config import RecomputeConfig
from xscale.parallel.recompute.activation_checkpointing import apply

VOCABULARY, LENGTH, WIDTH, HEADS = 17, 9, 12, 3
KINDS: dict[str, type[Any]] = {"decoder": Decoder, "encoder": Encoder, "encoder_decoder": EncoderDecoder}
REAL = {"kind": "prior_scores"}
LAZY = {"kind": "prior_scores", "previous": 0.0}
EVOLVING = {"kind": "evolving", "alpha": 0.3, "beta": 0.4}
REUSED = [{"every": 2, "at": 1, "mixer": {"kind": "reused_attention", "heads": HEADS}}]
Combine = Callable[[Tensor, Tensor | None, int, Tensor], Tensor]
"""This layer's scaled products, the scores of the layer before, the layer, and where a query sees a key -> scores."""


def model(kind: str, core: dict[str, Any], rules: Any = (), **block: Any) -> Any:
    """A model in float64 whose weights are all off their start."""
    mixer = {"kind": "attention", "heads": HEADS, "core": core}
    stack = {
        "depth": 4,
        "block": {"mixer": mixer, "ffn": {"kind": "dense", "hidden": 8}, **block},
        "rules": list(rules),
    }
    stacks = {"encoder": stack, "decoder": stack} if kind == "encoder_decoder" else {"stack": stack}
    part = KINDS[kind]
    config = decode(part.Config, {"width": WIDTH, "position": "learned", **stacks})
    assert part.check(config, (VOCABULARY, LENGTH), "model") == []
    return ready(part(config, VOCABULARY, LENGTH))


def ids(length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))


def in_heads(x: Tensor, weight: Tensor) -> Tensor:
    return torch.stack((x @ weight.T).split(WIDTH // HEADS, -1), 1)


def attention(mixer: Any, x: Tensor, other: Tensor, previous: Tensor | None, seen: Tensor, mix: Any) -> Any:
    """Attention of x to `other`, and its scores, from the mixer's weights; `mix` makes the scores."""
    if hasattr(mixer, "q"):
        q, k = in_heads(x, mixer.q.weight), in_heads(other, mixer.k.weight)
        scores = mix(q @ k.mT / (WIDTH // HEADS) ** 0.5, previous, seen)
    else:
        scores = previous
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.cat((weights @ in_heads(other, mixer.v.weight)).unbind(1), -1) @ mixer.o.weight.T, scores


def literal(stack: Any, x: Tensor, causal: bool, combine: Combine, memory: Tensor | None = None) -> Tensor:
    """A pre-norm stack whose attention is written out."""
    scores: dict[str, Tensor] = {}
    for layer, block in enumerate(stack.blocks.values()):
        for name in block.order:
            part = getattr(block, name)
            inner = part.norm(x)
            if name == "ffn":
                x = x + part.part(inner, None)
                continue
            other = inner if name == "mixer" or memory is None else memory
            seen = torch.ones(x.shape[1], other.shape[1]).bool()
            seen = seen.tril() if causal and name == "mixer" else seen
            mix = lambda own, before, seen, layer=layer: combine(own, before, layer, seen)  # noqa: E731
            added, scores[name] = attention(part.part, inner, other, scores.get(name), seen, mix)
            x = x + added
    return stack.norm(x)


def check(built: Any, kind: str, combine: Callable[[Any], Combine]) -> None:
    """Compare a model's stacks with the literal ones; `combine` gets a stack."""
    tokens = Tokens.from_ids(ids())
    if kind != "encoder_decoder":
        x = built.embed(tokens)
        wanted = literal(built.stack, x, kind == "decoder", combine(built.stack))
        assert close(built.stack(x, tokens), wanted)
        return
    source = Tokens.from_ids(ids(5, seed=1))
    memory = literal(built.encoder, built.source(source), False, combine(built.encoder))
    assert close(built.encode(source), memory)
    x = built.target(tokens)
    wanted = literal(built.decoder, x, True, combine(built.decoder), memory)
    assert close(built.decoder(x, tokens, memory, source), wanted)


def added(own: Tensor, before: Tensor | None, layer: int, seen: Tensor) -> Tensor:
    return own if before is None else own + before


@pytest.mark.parametrize("kind", KINDS)
def test_realformer_adds_the_scores_of_the_layer_below(kind: str) -> None:
    check(model(kind, REAL), kind, lambda stack: added)


def test_learned_weights_are_those_of_equation_22() -> None:
    built = model("decoder", {"kind": "prior_scores", "own": 0.7, "previous": 0.2, "learned": True})

    def combine(stack: Any) -> Combine:
        def mix(own: Tensor, before: Tensor | None, layer: int, seen: Tensor) -> Tensor:
            core = stack.blocks[str(layer)].mixer.part.core
            own = own * core.own_weight
            return own if before is None else own + core.previous_weight * before

        return mix

    check(built, "decoder", combine)
    names = [name for name, _ in built.named_parameters() if name.endswith("previous_weight")]
    assert len(names) == 3, "the first layer reads none"
    fixed = model("decoder", {"kind": "prior_scores", "own": 0.7, "previous": 0.2})
    mix = lambda own, before, layer, seen: 0.7 * own + (0 if before is None else 0.2 * before)  # noqa: E731
    check(fixed, "decoder", lambda stack: mix)


def test_without_the_scores_below_it_is_the_plain_model() -> None:
    plain, zero = model("decoder", {"kind": "softmax"}), model("decoder", LAZY)
    assert close(zero(Tokens.from_ids(ids())), plain(Tokens.from_ids(ids())))


def test_an_edge_of_zeros_changes_nothing() -> None:
    core, (q, k, v) = (
        ready(PriorScores(PriorScores.Config(), dims(layer=1), 2, 4)),
        (drawn(1, 2, 6, 4, seed=at) for at in range(3)),
    )
    edge = ScoreEdge(torch.zeros(1, 2, 6, 6, dtype=torch.float64))
    plain = Softmax(Softmax.Config(), dims(), 2, 4)
    assert close(core(q, k, v, AttentionMask(6, 6, True, score_edge=edge)), plain(q, k, v, AttentionMask(6, 6, True)))
    edge.previous = drawn(1, 2, 6, 6)
    other = core(q, k, v, AttentionMask(6, 6, True, score_edge=edge))
    assert not close(other, plain(q, k, v, AttentionMask(6, 6, True)))


@pytest.mark.parametrize("kind", KINDS)
def test_lazyformer_computes_a_map_once_in_each_lazy_block(kind: str) -> None:
    built = model(kind, LAZY, REUSED)
    check(built, kind, lambda stack: lambda own, before, layer, seen: own)
    block = (built.decoder if kind == "encoder_decoder" else built.stack).blocks["1"]
    for sublayer in (block.mixer, *([block.cross] if kind == "encoder_decoder" else [])):
        assert {name for name, _ in sublayer.part.named_parameters()} == {"v.weight", "o.weight"}


def test_latent_attention_hands_on_its_scores() -> None:
    """Against the same weights with a core that does not."""

    def outputs(core: dict[str, Any], layer: int) -> Tensor:
        mixer = {"kind": "mla", "heads": HEADS, "kv_latent_width": 6, "rope_width": 2, "head_width": 4, "core": core}
        stack = {"depth": 2, "block": {"mixer": mixer, "ffn": {"kind": "dense", "hidden": 8}}}
        config = decode(Decoder.Config, {"width": WIDTH, "position": "rope", "stack": stack})
        assert Decoder.check(config, (VOCABULARY, LENGTH), "model") == []
        built = ready(Decoder(config, VOCABULARY, LENGTH))
        states: list[Tensor] = []
        for block in built.stack.blocks.values():
            block.register_forward_hook(lambda _, __, out: states.append(out[0] if isinstance(out, tuple) else out))
        built(Tokens.from_ids(ids()))
        return states[layer]

    assert close(outputs(REAL, 0), outputs({"kind": "softmax"}, 0))
    assert not close(outputs(REAL, 1), outputs({"kind": "softmax"}, 1))
    assert close(outputs(LAZY, 1), outputs({"kind": "softmax"}, 1))


def convolved(scores: Tensor, kernel: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    """The 3 x 3 convolution of maps [B, H, T, S], term by term; a kernel of two rows lacks that of later queries."""
    out = torch.zeros_like(scores)
    queries, keys = scores.shape[2:]
    for i, j, row, column in itertools.product(range(queries), range(keys), range(kernel.shape[2]), range(3)):
        at, key = i + row - 1, j + column - 1
        if 0 <= at < queries and 0 <= key < keys and seen[at, key]:
            out[:, :, i, j] += torch.einsum("oh,bh->bo", kernel[:, :, row, column], scores[:, :, at, key])
    return out + bias[:, None, None]


@pytest.mark.parametrize("kind", KINDS)
def test_evolving_attention_is_its_equation(kind: str) -> None:
    def combine(stack: Any) -> Combine:
        def mix(own: Tensor, before: Tensor | None, layer: int, seen: Tensor) -> Tensor:
            name = "mixer" if seen.shape[0] == seen.shape[1] else "cross"
            core = getattr(stack.blocks[str(layer)], name).part.core
            rows = 2 if stack.blocks["0"].mixer.part.causal else 3
            assert core.kernel.shape == (HEADS, HEADS, rows, 3), "a decoder's taps of later queries are left out"
            a = own if before is None else 0.3 * before + 0.7 * own
            return 0.4 * convolved(a, core.kernel, core.kernel_bias, seen).relu() + 0.6 * a

        return mix

    check(model(kind, EVOLVING), kind, combine)


@pytest.mark.parametrize("causal", [True, False])
def test_evolving_attention_convolves_the_bias_of_a_position_too(causal: bool) -> None:
    core = ready(Evolving(Evolving.Config(alpha=0.3, beta=0.4), dims(causal=causal, layer=1), HEADS, 4))
    (q, k, v), bias = (drawn(2, HEADS, 6, 4, seed=at) for at in range(3)), drawn(1, HEADS, 6, 6, seed=4)
    edge, seen = ScoreEdge(drawn(2, HEADS, 6, 6, seed=5)), torch.ones(6, 6).bool()
    seen = seen.tril() if causal else seen
    a = 0.3 * edge.previous + 0.7 * (q @ k.mT / 2 + bias)
    wanted = 0.4 * convolved(a, core.kernel, core.kernel_bias, seen).relu() + 0.6 * a
    out = core(q, k, v, AttentionMask(6, 6, causal, bias=bias, score_edge=edge))
    assert close(edge.scores, wanted)
    assert close(out, wanted.masked_fill(~seen, float("-inf")).softmax(-1) @ v)


@pytest.mark.parametrize("core", [REAL, LAZY, EVOLVING], ids=["realformer", "lazyformer", "evolving"])
def test_packed_documents_are_those_apart(core: dict[str, Any]) -> None:
    built = model("decoder", core, REUSED if core is LAZY else ())
    packed = built(Tokens.from_ids(ids(), numbered(4, 5)))
    apart = [built(Tokens.from_ids(part)) for part in ids().split((4, 5), 1)]
    assert close(packed, torch.cat(apart, 1))


def test_reused_cross_attention_keeps_pairs_apart() -> None:
    built, source = model("encoder_decoder", LAZY, REUSED), ids(5, seed=1)
    packed = built(Tokens.from_ids(ids(), numbered(4, 5)), source=Tokens.from_ids(source, numbered(2, 3)))
    parts = zip(ids().split((4, 5), 1), source.split((2, 3), 1), strict=True)
    apart = [built(Tokens.from_ids(target), source=Tokens.from_ids(read)) for target, read in parts]
    assert close(packed, torch.cat(apart, 1))


@pytest.mark.parametrize("kind", ["decoder", "encoder_decoder"])
@pytest.mark.parametrize("core", [REAL, LAZY, EVOLVING], ids=["realformer", "lazyformer", "evolving"])
def test_decoding_over_a_cache_is_the_parallel_form(kind: str, core: dict[str, Any]) -> None:
    built = model(kind, core, REUSED if core is LAZY else ())
    source = {"source": Tokens.from_ids(ids(5, seed=1))} if kind == "encoder_decoder" else {}
    whole, cache, rows = built(Tokens.from_ids(ids()), **source), {}, []  # type: ignore[var-annotated]
    for first, last in [(0, 4), (4, 5), (5, 6), (6, 9)]:
        positions = torch.arange(first, last).expand(2, -1)
        rows.append(
            built(Tokens(ids=ids()[:, first:last], positions=positions, forward=Forward(cache=cache)), **source)
        )
    assert close(torch.cat(rows, 1), whole)


@pytest.mark.parametrize("granularity", ["full", "selective"])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("core", [REAL, EVOLVING], ids=["realformer", "evolving"])
def test_the_edge_passes_recomputed_blocks(core: dict[str, Any], granularity: str, every: int) -> None:
    def gradients(recompute: bool) -> list[Tensor]:
        built = model("decoder", core, dropout=0.1).train()
        if recompute:
            apply(built, decode(RecomputeConfig, {"every": every, "granularity": granularity}))
        built(Tokens.from_ids(ids(), rng_seed=3)).square().sum().backward()
        return [parameter.grad for parameter in built.parameters()]

    for kept, recomputed in zip(gradients(False), gradients(True), strict=True):
        assert close(kept, recomputed)


def test_what_cannot_be_handed_on_is_refused() -> None:
    def problems(core: dict[str, Any], rules: list[dict[str, Any]]) -> str:
        mixer = {"kind": "attention", "heads": HEADS, "core": core}
        stack = {"depth": 3, "block": {"mixer": mixer}, "rules": rules}
        config = decode(Decoder.Config, {"width": WIDTH, "stack": stack})
        return " ".join(map(str, Decoder.check(config, (VOCABULARY, LENGTH), "model")))

    reused = REUSED[0]["mixer"]
    split = problems({"kind": "split_heads", "cores": [REAL, {"kind": "softmax"}], "shares": [1, 2]}, [])
    assert "core.cores.0: 'prior_scores' hands its scores to the same heads of the next block" in split
    assert "(block 0): 'mixer' reads the attention scores of the block before, which hands on none" in problems(
        LAZY, [{"last": 1, "mixer": reused}]
    )
    problem = problems({"kind": "softmax"}, [{"first": 1, "mixer": reused}])
    assert "(block 1)" in problem
    assert "Take model.stack.block.mixer.kind=attention and model.stack.block.mixer.core.kind=evolving, or" in problem
    softmax = {"kind": "attention", "heads": HEADS}
    problem = problems(REAL, [{"first": 1, "last": 2, "mixer": softmax}])
    assert "(block 2)" in problem
    assert "prior_scores" in problem
    # By default it reads no scores of the block before, and hands on none.
    assert "general_prior" not in problem
    four = {"kind": "attention", "heads": 4, "core": REAL}
    assert "4 heads and reads the scores of the 3 before it" in problems(REAL, [{"first": 1, "mixer": four}])
    other = problems(LAZY, [{"first": 1, "mixer": {**reused, "heads": 4}}])
    assert "Take model.stack.rules.0.mixer.heads=3, or model.stack.block.mixer.heads=4." in other
    assert problems(LAZY, [{"first": 1, "last": 2, "mixer": softmax}]) == ""
