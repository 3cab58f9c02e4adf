"""The synthesizer's four generators against the paper's equations, position by position, and what they owe."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.conformance.made import close, dims, drawn, numbered, ready, tokens
from xscale.conformance.attention import mixer as conformance
from xscale.core.config import decode
from xscale.core.errors import ConfigError
from xscale.nn.materialize import materialize
from xscale.nn.mixer.mixer import MIXERS
from xscale.nn.mixer.synthesizer import Synthesizer
from xscale.nn.model.decoder import Decoder
from xscale.nn.module import parameter_axes
from xscale.parallel import context
from xscale.parallel.config import ParallelConfig
from xscale.parallel.tensor import apply

WIDTH, HEADS, HEAD_WIDTH, POSITIONS = 24, 3, 8, 13
GENERATORS: dict[str, dict[str, Any]] = {
    "dense": {"hidden": 5},
    "factorized_dense": {"hidden": 5, "factor_width": 3},
    "random": {},
    "factorized_random": {"factor_columns": 4},
}
EVERY = pytest.mark.parametrize("generator", GENERATORS)


def synthesizer(generator: str, causal: bool = True, **config: Any) -> Synthesizer:
    chosen: Any = {"generator": generator, "heads": HEADS, "length": POSITIONS, **GENERATORS[generator], **config}
    around = dims(width=WIDTH, length=POSITIONS, causal=causal)
    assert Synthesizer.check(decode(Synthesizer.Config, chosen), around, "mixer") == []
    return ready(Synthesizer(decode(Synthesizer.Config, chosen), around))


def score(part: Synthesizer, head: int, x: Tensor, i: int, j: int) -> Tensor:
    """S_ij of one head, by x_i [D] alone, by positions alone."""
    if part.generator == "random":
        return part.scores[head, i, j]
    if part.generator == "factorized_random":
        return (part.rows[head, i] * part.columns[head, j]).sum()
    first = slice(head * 5, head * 5 + 5)
    assert part.up.bias is not None
    hidden = (part.up.weight[first] @ x + part.up.bias[first]).clamp(min=0)
    if part.generator == "dense":
        return (part.scores[head] @ hidden + part.scores_bias[head])[j]
    a = part.tiled[head] @ hidden + part.tiled_bias[head]
    b = part.repeated[head] @ hidden + part.repeated_bias[head]
    # tile: a_0 a_1 a_2 a_0 a_1 ..., repeat: b_0 b_0 b_0 b_1 b_1 ...
    pairs = [(first, second) for second in b for first in a]
    return pairs[j][0] * pairs[j][1]


def literal(part: Synthesizer, x: Tensor, causal: bool, documents: list[list[int]]) -> Tensor:
    """Y = softmax(S) G(X) of each head; `documents` are indices of tokens, whose positions count from 0 in each."""
    out = torch.zeros_like(x)
    for b in range(len(x)):
        for head in range(HEADS):
            rows = slice(head * HEAD_WIDTH, (head + 1) * HEAD_WIDTH)
            for document in documents:
                for i, place in enumerate(document):
                    seen = range(i + 1) if causal else range(len(document))
                    e = torch.stack([score(part, head, x[b, place], i, j) for j in seen]).exp()
                    values = torch.stack([part.v.weight[rows] @ x[b, document[j]] for j in seen])
                    mixed = (e[:, None] * values).sum(0) / e.sum()
                    out[b, place] = out[b, place] + part.o.weight[:, rows] @ mixed
    return out


def agree(part: Synthesizer, x: Tensor, about: Any, wanted: Tensor) -> bool:
    """Output and gradients."""
    out = part(x, about)
    above = drawn(*out.shape, seed=3)
    leaves = [x, *part.parameters()]
    ours, theirs = (torch.autograd.grad((y * above).sum(), leaves) for y in (out, wanted))
    return close(out, wanted) and all(close(a, b) for a, b in zip(ours, theirs, strict=True))


@EVERY
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 7, POSITIONS])
def test_it_is_the_papers_equation(generator: str, causal: bool, length: int) -> None:
    part = synthesizer(generator, causal)
    x = drawn(2, length, WIDTH).requires_grad_()
    assert agree(part, x, tokens(length), literal(part, x, causal, [list(range(length))]))
    with pytest.raises(AssertionError):
        assert close(part(x, tokens(length)), literal(part, x + 0.1, causal, [list(range(length))]))


@EVERY
@pytest.mark.parametrize("causal", [True, False])
def test_a_packed_document_is_as_if_alone(generator: str, causal: bool) -> None:
    part = synthesizer(generator, causal)
    x = drawn(2, 11, WIDTH).requires_grad_()
    about = tokens(11, documents=numbered(4, 7))
    assert agree(part, x, about, literal(part, x, causal, [list(range(4)), list(range(4, 11))]))
    assert close(part(x, about)[:, 4:], part(x[:, 4:], tokens(7)))


def test_a_factorised_matrix_of_full_rank_is_any_matrix() -> None:
    """R = R_1 R_2^T with N columns: R_1 = R and R_2 = I give the Random Synthesizer."""
    full, factorised = synthesizer("random"), synthesizer("factorized_random", factor_columns=POSITIONS)
    with torch.no_grad():
        for name, parameter in factorised.named_parameters():
            if name == "rows":
                parameter.copy_(full.scores)
            elif name == "columns":
                parameter.copy_(torch.eye(POSITIONS).expand_as(parameter))
            else:
                parameter.copy_(full.get_parameter(name))
    x = drawn(2, POSITIONS, WIDTH)
    assert close(factorised(x, tokens(POSITIONS)), full(x, tokens(POSITIONS)))
    with torch.no_grad():
        factorised.rows[:, 3, 1] += 0.1
    assert not close(factorised(x, tokens(POSITIONS)), full(x, tokens(POSITIONS)))


def test_all_pairs_of_the_two_factors_occur() -> None:
    """Also where a and b have a common divisor: N = 12 as 6 x 2 has twelve different scores."""
    around = dims(width=WIDTH, length=12, causal=False)
    config = Synthesizer.Config(generator="factorized_dense", heads=HEADS, hidden=5, factor_width=6)
    part = ready(Synthesizer(config, around))
    scores = part._scores_of_tokens(drawn(1, 12, WIDTH), HEADS, 12, tokens(12))
    assert all(len(row.unique()) == 12 for row in scores[0].flatten(0, 1))


CONFORMANCE = {
    name: (MIXERS.get("synthesizer"), Synthesizer.Config(heads=4, generator=name))  # type: ignore[arg-type]
    for name in GENERATORS
}


@EVERY
def test_it_keeps_its_traits(generator: str) -> None:
    case = CONFORMANCE[generator]
    conformance.the_future_does_not_leak(case)
    conformance.it_looks_both_ways(case)
    conformance.packed_documents_stay_apart(case)
    conformance.gradients_fit_differences(case)


@EVERY
@pytest.mark.parametrize("chunks", [[1] * 12, [5, 1, 1, 5], [70, 1, 2, 1]], ids=str)
def test_decoding_is_parallel(generator: str, chunks: list[int]) -> None:
    conformance.incremental_is_parallel(CONFORMANCE[generator], chunks)


@EVERY
def test_dropout_of_the_weights(generator: str) -> None:
    """In training alone, differently for each sample, and with the mean of none."""
    part, about = synthesizer(generator, dropout=0.25), tokens(POSITIONS, rng_seed=1)
    x = drawn(1, POSITIONS, WIDTH).expand(4000, -1, -1)
    plain = part(x[:1], about)
    with torch.no_grad():
        torch.manual_seed(0)
        dropped = part.train()(x, about)
    assert not torch.allclose(dropped[0], dropped[1])
    assert torch.allclose(dropped.mean(0), plain[0], atol=8 * float(dropped.std(0).max()) / 4000**0.5)
    assert torch.equal(part(x[:1], tokens(POSITIONS)), plain), "no seed, no noise"


def test_fixed_scores_have_no_gradient() -> None:
    for generator, names in (("random", {"scores"}), ("factorized_random", {"rows", "columns"})):
        part = synthesizer(generator, trainable=False)
        assert {name for name, one in part.named_parameters() if not one.requires_grad} == names
        part(drawn(2, 5, WIDTH), tokens(5)).sum().backward()
        assert all((one.grad is None) == (name in names) for name, one in part.named_parameters())


@pytest.mark.parametrize("generator", ["random", "factorized_random"])
def test_scores_begin_with_the_given_spread(generator: str) -> None:
    config = Synthesizer.Config(generator=generator, heads=2, length=300, scores_std=0.5)  # type: ignore[arg-type]
    part = Synthesizer(config, dims(width=WIDTH, length=300))
    materialize(part, 0)
    scores = part._scores_of_positions(0, 300, 300, tokens(300))
    assert scores.std().item() == pytest.approx(0.5, rel=0.05)


def test_a_longer_sequence_is_refused() -> None:
    for generator in GENERATORS:
        part = synthesizer(generator)
        with pytest.raises(ConfigError, match=r"scores for 13 positions.*at most 13 tokens, or train with .*length=14"):
            part(drawn(2, 14, WIDTH), tokens(14))


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"heads": 5}, "m.heads"),
        ({"length": 12}, "m.length"),
        ({"generator": "factorized_dense", "factor_width": 14}, "m.factor_width"),
        ({"factor_columns": 3}, "m.factor_columns"),
        ({"trainable": False}, "m.trainable"),
        ({"generator": "random", "hidden": 3}, "m.hidden"),
        ({"generator": "random", "factor_columns": 3}, "m.factor_columns"),
        ({"generator": "factorized_random", "factor_width": 3}, "m.factor_width"),
        ({"scores_std": 0.1}, "m.scores_std"),
    ],
)
def test_what_does_not_fit_is_refused(config: dict[str, Any], path: str) -> None:
    chosen = decode(Synthesizer.Config, {"heads": HEADS, **config})
    (problem,) = Synthesizer.check(chosen, dims(width=WIDTH, length=POSITIONS), "m")
    assert problem.path == path
    assert problem.advice


@pytest.mark.parametrize("generator", GENERATORS)
def test_multiply_adds_are_those_that_run(generator: str) -> None:
    part, length = synthesizer(generator, causal=False), POSITIONS
    x = drawn(2, length, WIDTH)
    with FlopCounterMode(display=False) as counter:
        part(x, tokens(length))
    counted = counter.get_total_flops() / 2
    # The weights that a token multiplies, and the product of the two narrow matrices, of all samples together.
    axes = parameter_axes(part)
    weights = sum(w.numel() for name, w in part.named_parameters() if not {"tokens"} & {*axes[name]} and w.dim() > 1)
    weights -= sum(w.numel() for name, w in part.named_parameters() if name in ("tiled_bias", "repeated_bias"))
    narrow = HEADS * length * length * 4 if generator == "factorized_random" else 0
    assert counted == 2 * (part.multiply_adds(length, length) + weights * length) + narrow


def test_layouts_that_cannot_be_are_refused() -> None:
    block = {"mixer": {"kind": "synthesizer", "heads": HEADS}}
    config = decode(Decoder.Config, {"width": WIDTH, "position": "learned", "stack": {"depth": 1, "block": block}})
    model = Decoder(config, 40, 23)
    (tp,) = apply.check(model, decode(ParallelConfig, {"mesh": {"tp": 2}}), "parallel")
    assert "tp=2 does not divide heads=3" in str(tp)
    (cp,) = context.check(model, decode(ParallelConfig, {"mesh": {"cp": 2}}), "parallel")
    assert "mixer 'synthesizer' mixes the full sequence" in str(cp)


@EVERY
def test_half_precision_is_near(generator: str) -> None:
    part = synthesizer(generator)
    x = drawn(2, POSITIONS, WIDTH)
    exact = part(x, tokens(POSITIONS))
    half = part.bfloat16()(x.bfloat16(), tokens(POSITIONS))
    assert half.dtype == torch.bfloat16
    assert (half - exact).abs().max() < 0.05 * exact.abs().max()
