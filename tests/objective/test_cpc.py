"""Contrastive predictive coding of sentences: its draws, its loss against loops, negatives over ranks, and refusals."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import Pool
from tests.parallel.against_one import Found, alone, same
from tests.train.tiny import losses, metrics, recipe, run
from xscale.core.errors import EXIT_DONE
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.head.sentence_contrast import SENTENCE_GLOBALS, SENTENCE_WEIGHT, SENTENCES
from xscale.nn.materialize import materialize
from xscale.nn.model.encoder import Encoder
from xscale.nn.tokens import Stats, Tokens
from xscale.objective.cpc import Cpc
from xscale.objective.objective import SpecialTokens
from xscale.recipe import Recipe

CORE = {"kind": "etc", "global_tokens": 4, "radius": 7, "labels": "structure", "segment_length": 8}
MIXER = {"kind": "etc", "heads": 4, "core": CORE}
MODEL: dict[str, Any] = {
    "kind": "encoder",
    "width": 32,
    "position": "none",
    "global_tokens": 4,
    "stack": {"depth": 2, "block": {"mixer": MIXER, "ffn": {"kind": "dense", "hidden": 48}}},
}
OBJECTIVE = {"kind": "cpc", "sentence_length": 8}


def asked(folder: Path, name: str = "run", **sections: Any) -> Recipe:
    usual = {"model": MODEL, "objective": OBJECTIVE, "precision": {"compute": "float64", "master": "float64"}}
    return recipe(folder, name, data={"cross_documents": True}, **{**usual, **sections})


def test_sentences_are_masked_whole() -> None:
    specials = SpecialTokens(vocabulary=300, pad=0, eos=2, mask=4, sentinels=range(0))
    objective = Cpc(Cpc.Config(sentence_length=8, sentence_fraction=0.5), specials, 34, 1)
    tokens = torch.randint(5, 300, (30, 35), generator=torch.Generator().manual_seed(0))
    batch = objective.batch(tokens, None, torch.arange(30))
    assert batch.tokens.get(SENTENCES) is not None
    assert batch.tokens.get(SENTENCE_GLOBALS) is not None
    drawn = set()
    for row in range(30):
        chosen = batch.tokens.get(SENTENCE_GLOBALS)[row].tolist()
        assert len(set(chosen)) == 2
        drawn.update(chosen)
        for place, sentence in zip(chosen, batch.tokens.get(SENTENCES)[row], strict=True):
            at = slice(8 * place, 8 * place + 8)
            assert torch.equal(sentence, tokens[row, at])
            assert batch.tokens.ids[row, at].eq(4).all()
            assert batch.targets[row, at].eq(IGNORE_INDEX).all()
    assert drawn == {0, 1, 2, 3}
    assert (batch.targets != IGNORE_INDEX).any()
    again = objective.batch(tokens[5:6], None, torch.tensor([5]))
    assert torch.equal(again.tokens.ids, batch.tokens.ids[5:6])


def test_the_loss_is_that_of_the_paper(tmp_path: Path) -> None:
    """Van den Oord et al. 2018, equation 4, by loops; its gradient is what is added to that of the tokens."""
    config = asked(tmp_path).model
    model = Encoder(config, 60, 32)  # type: ignore[arg-type]
    materialize(model, 1, dtype=torch.float64)
    ids = torch.randint(60, (3, 32), generator=torch.Generator().manual_seed(0))
    places = torch.tensor([[0, 3], [1, 2], [2, 3]])
    sentences = torch.stack([ids[row].view(4, 8)[places[row]] for row in range(3)])
    plain, targets = Tokens.from_ids(ids), ids.masked_fill(ids % 3 > 0, IGNORE_INDEX)
    x = model.stack(model.embed(plain), plain.with_global_tokens(4))
    summaries, alone = [], []
    for row in range(3):
        for at in range(2):
            summaries.append(x[row, int(places[row, at])])
            one = Tokens.from_ids(sentences[row, at][None])
            alone.append(model.stack(model.embed(one), one.with_global_tokens(4))[0, 0])
    wanted = torch.zeros((), dtype=torch.float64)
    for i, g in enumerate(summaries):
        scores = [(g * c).sum() / math.sqrt(32) for c in alone]
        wanted = wanted - (scores[i] - torch.logsumexp(torch.stack(scores), 0)) / len(summaries)
    both = model(plain, targets) + 0.5 * 0.25 * wanted
    gradients = torch.autograd.grad(both, list(model.parameters()))
    stats, signals = Stats(), {SENTENCES: sentences, SENTENCE_GLOBALS: places, SENTENCE_WEIGHT: 0.25}
    tokens = Tokens.from_ids(ids, stats=stats, aux_loss_weight=0.5, signals=signals)
    model(tokens, targets).backward()
    assert float(stats.means()["contrast/loss"]) == pytest.approx(wanted.item(), rel=1e-12)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def trained(folder: Path, name: str, micro_batch_size: int, parallel: dict[str, Any] | None = None) -> int:
    parallel = parallel or {}
    train = {"steps": 4, "eval_every": 0, "micro_batch_size": micro_batch_size}
    return run(asked(folder, name, train=train, parallel=parallel, optimizer={"kind": "adamw", "lr": 0.01}))


@pytest.mark.long
def test_negatives_over_ranks_are_those_of_one_process(tmp_path: Path, pool: Pool) -> None:
    """Two ranks with micro-batches of 2 equal one process with 4, which differs from one with 2."""
    assert trained(tmp_path, "one", 4) == EXIT_DONE
    assert trained(tmp_path, "fewer", 2) == EXIT_DONE
    layouts: dict[str, tuple[int, dict[str, Any]]] = {
        "zero1": (2, {"mesh": {"dp_shard": 2}, "zero": {"stage": 1}}),
        "zero3": (2, {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}}),
        "tp": (4, {"mesh": {"dp_shard": 2, "tp": 2}, "zero": {"stage": 3}, "tensor": {"sequence": True}}),
        "pp": (4, {"mesh": {"pp": 2, "dp_shard": 2}}),
        "cp": (4, {"mesh": {"dp_shard": 2, "cp": 2}, "zero": {"stage": 3}, "context": {"gather": True}}),
    }
    for name, (ranks, parallel) in layouts.items():
        assert pool.run(trained, ranks, tmp_path, name, 2, parallel) == [EXIT_DONE] * ranks
        assert losses(tmp_path, name) == pytest.approx(losses(tmp_path, "one"), rel=1e-10)
        for mine, of_one in zip(metrics(tmp_path, name), metrics(tmp_path, "one"), strict=True):
            assert mine.get("contrast/loss") == pytest.approx(of_one.get("contrast/loss"), rel=1e-10)
    contrast = {name: [line["contrast/loss"] for line in metrics(tmp_path, name)] for name in ("one", "fewer")}
    assert sum(contrast["fewer"]) < 0.8 * sum(contrast["one"])


SECTIONS: dict[str, Any] = {
    "data": {"cross_documents": True},
    "objective": {**OBJECTIVE, "sentence_length": 5, "sentence_fraction": 0.5},
}
GATHER = {"context": {"gather": True}}
DROPPING: dict[str, Any] = {
    **MODEL,
    "dropout": 0.1,
    "stack": {**MODEL["stack"], "block": {**MODEL["stack"]["block"], "dropout": 0.1}},
}


@pytest.fixture(scope="module")
def one(pool: Pool) -> Found:
    return alone(pool, DROPPING, **SECTIONS)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        {"mesh": {"tp": 2}},
        {"mesh": {"tp": 2}, "tensor": {"sequence": True}},
        {"mesh": {"tp": 2}, "tensor": {"sequence": True}, "recompute": {"every": 1}},
        {"mesh": {"cp": 2}, **GATHER},
        {"mesh": {"cp": 2, "tp": 2}, **GATHER},
        {"mesh": {"pp": 2}},
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "zero_bubble"}},
        {"mesh": {"pp": 2, "tp": 2}, "tensor": {"sequence": True}, "zero": {"stage": 3}},
        {"mesh": {"pp": 2, "cp": 2}, **GATHER},
    ],
    ids=["tp", "sp", "sp, recomputed", "cp", "cp, tp", "pp", "zero bubble", "pp, sp", "pp, cp"],
)
def test_a_layout_has_the_numbers_of_one_process(pool: Pool, one: Found, layout: dict[str, Any]) -> None:
    assert {"contrast/loss", "contrast/accuracy"} <= one.statistics.keys()
    same(pool, one, math.prod(layout["mesh"].values()), DROPPING, layout, **SECTIONS)


SOFTMAX = {**DROPPING, "stack": {"depth": 2, "block": {"mixer": {"kind": "attention", "heads": 4}, "dropout": 0.1}}}


@pytest.fixture(scope="module")
def softmax(pool: Pool) -> Found:
    return alone(pool, SOFTMAX, **SECTIONS)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        {"mesh": {"cp": 2, "tp": 2}, "tensor": {"sequence": True}},
        {"mesh": {"cp": 2}, "context": {"style": "ring"}, "recompute": {"every": 1}},
    ],
    ids=["cp, sp", "ring, recomputed"],
)
def test_softmax_has_the_numbers_of_one_process(pool: Pool, softmax: Found, layout: dict[str, Any]) -> None:
    """Attention that has a style of context parallelism sees the sentences by themselves in full."""
    same(pool, softmax, math.prod(layout["mesh"].values()), SOFTMAX, layout, **SECTIONS)


def test_what_has_no_global_tokens_for_its_sentences_is_refused(tmp_path: Path) -> None:
    def problems(world: int = 1, **sections: Any) -> list[tuple[str, str]]:
        return [(problem.path, problem.what) for problem in asked(tmp_path, **sections).check(world)]

    assert problems() == []
    [(path, what)] = problems(objective={**OBJECTIVE, "sentence_length": 4})
    assert path == "model.global_tokens"
    assert "each of 8 sentences, and the model has 4" in what
    assert problems(objective={**OBJECTIVE, "sentence_length": 20})[0][0] == "objective.sentence_length"
    assert problems(2, parallel={"mesh": {"tp": 2}}) == []
    assert problems(2, parallel={"mesh": {"pp": 2}}) == []
    block = {**MODEL["stack"]["block"], "residual": "reversible"}
    reversible = {**MODEL, "stack": {"depth": 2, "block": block}}
    [(path, what)] = problems(2, parallel={"mesh": {"pp": 2}}, model=reversible)
    assert path == "parallel.mesh.pp"
    assert what.startswith("with model.stack.block.residual=reversible stages send more than hidden states")
    [problem] = asked(tmp_path, parallel={"mesh": {"cp": 2}}).check(2)
    assert "mixer 'etc' mixes the full sequence" in problem.what
    assert "parallel.context.gather=true" in problem.advice
    assert problems(2, parallel={"mesh": {"cp": 2}, **GATHER}) == [], "the advice works"
