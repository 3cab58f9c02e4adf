"""DisCo: the subsets that its positions observe, the decoder by its equations, and decoding of all tokens at once."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import Pool
from tests.parallel.against_one import Found, alone, same
from tests.train.test_load_run import call
from tests.train.test_pairs import asked, trained
from xscale.core.errors import EXIT_DONE, ConfigError
from xscale.generate.parallel_decoding import easy_first, mask_predict
from xscale.nn.attention.ops.mask import OBSERVED
from xscale.nn.blocks.block import Block
from xscale.nn.depth.edges import CONTENT
from xscale.nn.head.length_head import LENGTHS
from xscale.nn.model.disentangled import Disentangled
from xscale.nn.tokens import Tokens
from xscale.objective.disco import Disco
from xscale.objective.objective import SpecialTokens

SPECIALS = SpecialTokens(50, pad=0, eos=1, mask=None, sentinels=range(0))
SOURCE, TARGET = 6, 7


def batch_of(count: int, length: int, **fields: Any) -> Any:
    """`count` copies of a pair whose target has `length` tokens of TARGET."""
    tokens = torch.arange(10, 10 + SOURCE + TARGET).expand(count, -1)
    documents = torch.tensor([[0] * 4 + [1] * 2 + [0] * length + [1] * (TARGET - length)]).expand(count, -1)
    return Disco(Disco.Config(), SPECIALS, SOURCE, 3).batch(tokens, documents, torch.arange(count), **fields)


def test_every_position_observes_a_subset_of_the_others() -> None:
    """Its size is uniform from 0 to N - 1, all subsets of a size are equally likely, and padding is in none."""
    count, length = 3000, 4
    batch = batch_of(count, length)
    observed = batch.tokens.get(OBSERVED)
    assert not observed.diagonal(dim1=1, dim2=2).any()
    assert not observed[:, length:].any()
    assert not observed[:, :, length:].any()
    for place in range(length):
        subsets = Counter(tuple(row.nonzero().flatten().tolist()) for row in observed[:, place])
        assert len(subsets) == 2 ** (length - 1)
        for subset, times in subsets.items():
            wanted = 1 / length / math.comb(length - 1, len(subset))
            assert abs(times / count - wanted) < 0.03, (place, subset)
    both = (observed[:, 0].sum(-1) == 0) & (observed[:, 1].sum(-1) == 0)
    assert abs(float(both.float().mean()) - 1 / 16) < 0.02, "positions draw independently"
    assert batch.source.get(LENGTHS).tolist() == [length - 1] * count
    assert batch.targets[0].tolist() == [*batch.tokens.ids[0, :length].tolist(), -100, -100, -100]


def model(**changes: Any) -> Disentangled:
    block = {"mixer": {"kind": "attention", "heads": 2}, "ffn": {"kind": "dense", "hidden": 12}, "norm": "layer"}
    stack = {"depth": 2, "block": {**block, "residual": "post", "dropout": 0.2}}
    config = {"width": 8, "position": "learned", "encoder": stack, "decoder": stack, "length_head": {}, **changes}
    made = Disentangled(Disentangled.Config.model_validate(config), 50, 12).double()
    for number, parameter in enumerate(made.parameters()):
        torch.nn.init.normal_(parameter, std=0.4, generator=torch.Generator().manual_seed(number))
    return made


def attention(mixer: Any, queries: Tensor, keys: Tensor, sees: list[list[int]]) -> Tensor:
    """Multi-head attention of queries [T, D] to the keys [S, D] that each sees, head by head and query by query."""
    heads, width = 2, 4
    q, k, v = (x @ linear.weight.T for x, linear in ((queries, mixer.q), (keys, mixer.k), (keys, mixer.v)))
    out = torch.zeros_like(queries)
    for place, seen in enumerate(sees):
        for head in range(heads if seen else 0):
            part = slice(head * width, (head + 1) * width)
            scores = torch.stack([q[place, part] @ k[m, part] / math.sqrt(width) for m in seen])
            out[place, part] = sum(p * v[m, part] for p, m in zip(scores.exp() / scores.exp().sum(), seen, strict=True))
    return out @ mixer.o.weight.T


def test_the_decoder_is_that_of_the_equations() -> None:
    """Queries begin as positions; the keys of every layer are of embeddings; and the length is that of the mean."""
    made = model().eval()
    batch = batch_of(1, 5)
    observed = batch.tokens.get(OBSERVED)[0]
    read = [place for place in range(SOURCE) if batch.source.documents[0, place] == 0]
    memory = made.encode(batch.source)[0]
    positions = made.target.position.embed(torch.zeros(1, TARGET, 8, dtype=torch.float64), batch.tokens)[0]
    content = made.source.table.weight[batch.tokens.ids[0]] + positions
    h = positions
    for layer in ("0", "1"):
        block: Any = made.decoder.blocks[layer]
        sees = [row.nonzero().flatten().tolist() for row in observed]
        h = block.mixer.norm(h + attention(block.mixer.part, h, content, sees))
        h = block.cross.norm(h + attention(block.cross.part, h, memory, [read] * TARGET))
        ffn = block.ffn.part
        h = block.ffn.norm(h + ffn(h[None], batch.tokens)[0])
    wanted = h @ made.source.table.weight.T
    logits = made(batch.tokens, None, batch.source)[0]
    assert torch.allclose(logits, wanted, rtol=1e-10, atol=1e-10)
    head: Any = made.length
    lengths = head.classifier.weight @ memory[read].mean(0) + head.classifier.bias
    cache: dict[str, Any] = {}
    made(Tokens.from_ids(batch.tokens.ids, cache=cache), None, batch.source)
    assert torch.allclose(cache["lengths"][0], lengths, rtol=1e-10)
    weighed = batch_of(1, 5, aux_loss_weight=0.5)
    bias = head.classifier.bias
    (gradient,) = torch.autograd.grad(made(weighed.tokens, weighed.targets, weighed.source), bias)
    softmax = lengths.softmax(0) - torch.nn.functional.one_hot(torch.tensor(4), 12)
    assert torch.allclose(gradient, 0.1 * 0.5 * softmax, rtol=1e-8)


def leaks(made: Disentangled, observed: Tensor) -> bool:
    """Whether the logits of some position change, in training, with a token that it does not observe."""
    made.train()
    ids = torch.randint(2, 50, (1, TARGET), generator=torch.Generator().manual_seed(1))
    source = Tokens.from_ids(torch.arange(10, 14)[None], rng_seed=7)

    def logits(ids: Tensor) -> Tensor:
        out: Tensor = made(Tokens.from_ids(ids, signals={OBSERVED: observed[None]}, rng_seed=7), None, source)
        return out[0]

    before, leaked, seen = logits(ids), False, False
    for token in range(TARGET):
        other = ids.clone()
        other[0, token] = (ids[0, token] + 1) % 48 + 2
        changed = (logits(other) != before).any(-1)
        seen |= bool((changed & observed[:, token]).any())
        leaked |= bool((changed & ~observed[:, token]).any())
    assert seen, "nothing is observed"
    return leaked


def test_what_is_not_observed_leaks_by_no_detour(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = torch.diag(torch.ones(TARGET - 1), -1).bool()  # each position observes the one before it alone
    assert not leaks(model(), chain)
    assert not leaks(model(), batch_of(1, TARGET).tokens.get(OBSERVED)[0])
    # The control: with keys of hidden states too, as of any decoder, the second layer reads what the first has seen.
    through = Block._through

    def contextual(self: Block, names: Any, x: Tensor, tokens: Tokens, *further: Any) -> Tensor:
        content = None if tokens.get(CONTENT) is None else tokens.get(CONTENT) + x
        return through(self, names, x, tokens.with_signals({CONTENT: content}), *further)

    monkeypatch.setattr(Block, "_through", contextual)
    assert leaks(model(), chain)


def scores_of(ids: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
    """A stand-in for a model: tokens and log-probabilities that depend on what each position observes."""
    seen = [row.nonzero().flatten().tolist() for row in observed]
    sums = torch.tensor([sum((int(ids[m]) + 1) * (m + 2) for m in places) for places in seen])
    place = torch.arange(len(ids))
    return (sums * 7 + place * 5) % 11, -((sums * 3 + place * 17) % 13 + 1).double() / 10


def test_decoding_is_that_of_the_papers() -> None:
    for length in range(1, 9):
        for iterations in (1, 2, 4, 10, 20):
            # Kasai et al. 2020: Y_obs^n are the tokens that were likelier than n at first; all are predicted anew.
            everywhere = range(length)
            hidden = torch.zeros(length, length, dtype=torch.bool)
            y, p = scores_of(torch.zeros(length).long(), hidden)
            order = sorted(everywhere, key=lambda n: -float(p[n]))
            ahead = torch.tensor([[order.index(m) < order.index(n) for m in everywhere] for n in everywhere])
            for _ in range(iterations - 1):
                y, p = scores_of(y, ahead)
            ids, scores = easy_first(scores_of, length, iterations)
            assert ids.tolist() == y.tolist()
            assert scores.tolist() == p.tolist()
            # Ghazvininejad et al. 2019, section 3: n = N (T - t) / T tokens with the lowest p_i are masked.
            first = scores_of(torch.zeros(length).long(), hidden)
            y_list, p_list = (values.tolist() for values in first)
            for t in range(1, iterations):
                masked = sorted(everywhere, key=lambda i: p_list[i])[: length * (iterations - t) // iterations]
                kept = torch.tensor([[m not in masked for m in everywhere] for _ in everywhere])
                new, likely = scores_of(torch.tensor(y_list), kept)
                for i in masked:
                    y_list[i], p_list[i] = int(new[i]), float(likely[i])
            ids, scores = mask_predict(scores_of, length, iterations)
            assert (ids.tolist(), scores.tolist()) == (y_list, p_list)


STACK: dict[str, Any] = {
    "depth": 2,
    "block": {
        "mixer": {"kind": "attention", "heads": 4, "dropout": 0.1},
        "ffn": {"kind": "dense", "hidden": 24},
        "dropout": 0.1,
    },
}
MODEL: dict[str, Any] = {
    "kind": "disentangled",
    "width": 32,
    "position": "learned",
    "embedding_norm": "layer",
    "dropout": 0.1,
    "length_head": {},
    "encoder": STACK,
    "decoder": STACK,
}
SECTIONS: dict[str, Any] = {
    "objective": {"kind": "disco", "label_smoothing": 0.1},
    "data": {"source": {"kind": "stdlib_pairs"}, "max_target_length": 13},
}


@pytest.fixture(scope="module")
def one(pool: Pool) -> Found:
    return alone(pool, MODEL, **SECTIONS)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {"mesh": {"dp_shard": 2}}),
        (2, {"mesh": {"tp": 2}}),
        pytest.param(2, {"zero": {"stage": 3}}, marks=pytest.mark.long),
        pytest.param(1, {"recompute": {"every": 1}}, marks=pytest.mark.long),
        pytest.param(2, {"mesh": {"pp": 2}}, marks=pytest.mark.long),
        pytest.param(4, {"mesh": {"pp": 4}, "zero": {"stage": 3}}, marks=pytest.mark.long),
        pytest.param(3, {"mesh": {"pp": 3}, "pipeline": {"schedule": "zero_bubble"}}, marks=pytest.mark.long),
        pytest.param(4, {"mesh": {"pp": 2, "tp": 2}}, marks=pytest.mark.long),
        pytest.param(2, {"mesh": {"cp": 2}}, marks=pytest.mark.long),
        pytest.param(4, {"mesh": {"cp": 2, "tp": 2}}, marks=pytest.mark.long),
        pytest.param(4, {"mesh": {"cp": 2, "pp": 2}}, marks=pytest.mark.long),
    ],
    ids=["dp", "tp", "zero3", "recompute", "pp2", "pp4_zero3", "pp3", "pp2_tp2", "cp2", "cp2_tp2", "cp2_pp2"],
)
def test_a_layout_has_the_numbers_of_one_process(pool: Pool, one: Found, ranks: int, layout: dict[str, Any]) -> None:
    assert {"length/loss", "length/accuracy"} <= one.statistics.keys()
    same(pool, one, ranks, MODEL, layout, **SECTIONS)


@pytest.mark.long
@pytest.mark.parametrize("decoding", ["easy_first", "mask_predict"])
def test_a_run_writes_all_tokens_at_once(tmp_path: Path, decoding: str) -> None:
    objective = {"kind": "disco", "decoding": decoding, "iterations": 3, "length_candidates": 2}
    train = {"steps": 2, "bleu_pairs": 3}
    assert trained(tmp_path, model=MODEL, objective=objective, train=train) == EXIT_DONE
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "on 3 validation pairs; of copying the source: " in log
    assert len(call("generate", tmp_path / "run", "--prompt", "1,728", "--tokens", 6)) <= 7
    assert '"source_bleu"' in call("eval", tmp_path / "run", "--bleu", "--sequences", 3)
    with pytest.raises(ConfigError, match="--beams: the model writes all tokens at once"):
        call("generate", tmp_path / "run", "--prompt", "1,728", "--beams", 2)


LINEAR = {**STACK, "block": {**STACK["block"], "mixer": {"kind": "attention", "heads": 4, "core": "linear"}}}
WITHOUT_DROPOUT = {**STACK, "block": {**STACK["block"], "mixer": {"kind": "attention", "heads": 4}}}
PLAIN = {"encoder": WITHOUT_DROPOUT, "decoder": WITHOUT_DROPOUT}
PAIR = {**MODEL, "kind": "encoder_decoder"}
del PAIR["length_head"]


@pytest.mark.parametrize(
    ("changes", "objective", "parallel", "words"),
    [
        ({"length_head": None}, {}, {}, "does not predict its length"),
        (PAIR, {}, {}, "'disco' needs a model that reads a source sequence and is bidirectional"),
        ({}, {"kind": "seq2seq"}, {}, "tells no lengths of targets"),
        ({"position": "rope"}, {}, {}, "the first queries are positions alone"),
        ({"decoder": LINEAR}, {}, {}, "the queries of core 'linear' cannot each observe other tokens"),
        ({"decoder": {**STACK, "block": {**STACK["block"], "residual": "reversible"}}}, {}, {}, "residual stream"),
        (PLAIN, {}, {"mesh": {"cp": 2}, "context": {"style": "ring"}}, "each token observes others of its own choice"),
        ({}, {}, {"mesh": {"tp": 2}, "tensor": {"sequence": True}}, "positions of the full sequence"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], objective: dict[str, Any], parallel: dict[str, Any], words: str
) -> None:
    given = {**MODEL, **changes} if "kind" not in changes else changes
    made = asked(tmp_path, model=given, objective={"kind": "disco", **objective}, parallel=parallel)
    problems = made.check(2 if parallel else 1)
    assert any(words in problem.what and problem.advice for problem in problems), problems
