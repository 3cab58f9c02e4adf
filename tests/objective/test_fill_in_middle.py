"""Fill in the middle: the paper's orders, the draws, documents of a sample, tokenizers, layouts, and generation."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import Pool
from tests.train.test_load_run import call
from tests.train.tiny import losses, recipe, run
from xscale.core.config import decode
from xscale.core.errors import EXIT_DONE, ConfigError
from xscale.generate.generate_text import generate_text
from xscale.nn.head.head import IGNORE_INDEX
from xscale.objective.fill_in_middle import FillInMiddle, fim_tokens
from xscale.objective.objective import Causal, SpecialTokens

EOS, PRE, SUF, MID = 2, 5, 6, 7
SPECIALS = SpecialTokens(vocabulary=100, pad=0, eos=EOS, mask=None, sentinels=range(5, 9))
SIZES = (14, 6, 20, 10)
"""Tokens of a sample's documents: the last one is cut by the sample's end, and the second is short."""
DOCUMENTS = torch.repeat_interleave(torch.tensor(SIZES))
LENGTH = len(DOCUMENTS) - 1
BLOCK = {"mixer": {"kind": "attention", "heads": 4, "kv_heads": 2}, "ffn": {"kind": "gated", "hidden": 48}}
MODEL: dict[str, Any] = {"kind": "decoder", "width": 32, "stack": {"depth": 2, "block": BLOCK}}


def objective(seed: int = 1, **config: float) -> FillInMiddle:
    return FillInMiddle(FillInMiddle.Config(**config), SPECIALS, LENGTH, seed)


def packed(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Samples whose every token tells its place, but for the ends of documents."""
    tokens = torch.arange(20, 20 + LENGTH + 1).repeat(rows, 1)
    tokens[:, torch.tensor(SIZES).cumsum(0)[:-1] - 1] = EOS
    return tokens, DOCUMENTS.expand(rows, -1), torch.arange(rows)


def rearranged(of: FillInMiddle, rows: int) -> Tensor:
    """Inputs, and the last target behind them [B, T+1]."""
    tokens, _, index = packed(rows)
    batch = of.batch(tokens, None, index)
    assert batch.tokens.ids[:, 1:].equal(batch.targets[:, :-1])
    return torch.cat((batch.tokens.ids, batch.targets[:, -1:]), 1)


def written_from_the_paper(text: list[int], first: int, second: int, spm: bool) -> list[int]:
    """Sections 3 and 3.1: a document as prefix, suffix and middle (PSM), or by the second variant of SPM, and EOT."""
    prefix, middle, suffix = text[:first], text[first:second], text[second:]
    if spm:
        return [PRE, SUF, *suffix, MID, *prefix, *middle, EOS]
    return [PRE, *prefix, SUF, *suffix, MID, *middle, EOS]


def test_orders_are_those_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = [[0.0, 0.9, 0.75, 0.30], [0.0, 0.0, 0.5, 0.5], [0.49, 0.1, 0.0, 0.999], [0.5, 0.0, 0.2, 0.4]]
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.tensor(draws, dtype=torch.float64))
    (row,) = rearranged(objective(), 1).tolist()
    # Ten tokens are left of the first text, whose cuts are drawn among eleven places: 0.75 * 11 and 0.3 * 11.
    assert row[:14] == [PRE, 20, 21, 22, SUF, 28, 29, MID, 23, 24, 25, 26, 27, EOS]
    assert row[14:20] == [34, 35, 36, 37, 38, EOS], "a short document stays as it is"
    assert row[20:40] == [PRE, SUF, MID, *range(40, 56), EOS], "all is middle, in the order SPM"
    assert row[40:] == list(range(60, 70)), "not drawn"
    draws[3][0] = 0.0
    assert rearranged(objective(), 1)[0, 40:].tolist() == [PRE, SUF, 62, 63, 64, 65, MID, 60, 61, EOS]


def forms(text: list[int], spm: bool) -> dict[tuple[int, ...], tuple[int, int]]:
    """All that a document's text may become, and the cuts; in SPM the first one cannot be told."""
    cuts = [(first, second) for first in range(len(text) + 1) for second in range(first, len(text) + 1)]
    return {tuple(written_from_the_paper(text, *places, spm)): places for places in cuts}


def test_each_document_is_rearranged_within_its_places() -> None:
    tokens, documents, index = packed(3000)
    rows, psm = rearranged(objective(), 3000), rearranged(objective(spm_rate=0), 3000)
    for first, size in zip((0, 14, 20, 40), SIZES, strict=True):
        original = tokens[0, first : first + size].tolist()
        parts, of_psm = ([tuple(part) for part in drawn[:, first : first + size].tolist()] for drawn in (rows, psm))
        untouched = parts.count(tuple(original))
        if size < 7:
            assert untouched == 3000
            continue
        assert untouched == pytest.approx(1500, abs=140)
        text, places = original[: size - 4], size - 3
        possible = {False: forms(text, False), True: forms(text, True)}
        assert set(parts) <= {tuple(original), *possible[False], *possible[True]}
        # Where the prefix is empty, which 2 n - 1 of n * n draws of two places make it, both orders are the same.
        spm = sum(part in possible[True] for part in parts) / (3000 - untouched)
        assert spm == pytest.approx(0.5 + (2 * places - 1) / places**2 / 2, abs=0.06)
        ends = Counter(cut for part in of_psm if part in possible[False] for cut in possible[False][part])
        assert set(ends) == set(range(places)), "all places are drawn"
        assert ends.most_common()[0][1] < 1.4 * ends.total() / places
        assert ends.most_common()[-1][1] > 0.6 * ends.total() / places
    again = objective().batch(tokens[7:8], documents[7:8], index[7:8])
    assert again.tokens.ids.equal(rows[7:8, :-1])
    assert not rearranged(objective(seed=2), 3000).equal(rows)


def test_documents_are_separate_and_all_their_sections_are_predicted() -> None:
    tokens, documents, index = packed(50)
    batch = objective(fim_rate=1).batch(tokens, documents, index)
    plain = Causal.batch(objective(), tokens, documents, index)
    assert batch.tokens.documents is not None
    assert batch.tokens.documents.equal(documents[:, :-1])
    assert batch.tokens.positions.equal(plain.tokens.positions)
    assert (batch.targets == IGNORE_INDEX).equal(plain.targets == IGNORE_INDEX)
    # Documents told by their ends are those that are told apart.
    assert batch.tokens.ids.equal(objective(fim_rate=1).batch(tokens, None, index).tokens.ids)
    for sentinel in (SUF, MID):
        assert (batch.targets == sentinel).sum(1).tolist() == [3] * 50


def test_rates_of_zero_and_one() -> None:
    tokens, documents, index = packed(50)
    none = objective(fim_rate=0).batch(tokens, documents, index)
    plain = Causal.batch(objective(), tokens, documents, index)
    assert none.tokens.ids.equal(plain.tokens.ids)
    assert none.targets.equal(plain.targets)
    psm, spm = rearranged(objective(fim_rate=1, spm_rate=0), 400), rearranged(objective(fim_rate=1, spm_rate=1), 400)
    starts = [0, 20, 40]
    for rows in (psm, spm):
        assert (rows[:, starts] == PRE).all()
        assert (rows[:, [13, 39, 49]] == EOS).all()
    assert (spm[:, [1, 21, 41]] == SUF).all()
    # In PSM the suffix's sentinel is second where the prefix is empty alone, which it is in 2 * 11 - 1 of 121 draws.
    assert (psm[:, 1] == SUF).float().mean().item() == pytest.approx(21 / 121, abs=0.08)


def test_sentinels_are_those_of_the_tokenizer() -> None:
    made_for_it = SpecialTokens(100, 0, EOS, None, range(5, 9), fim=(90, 92, 91))
    lacking = SpecialTokens(100, 0, EOS, None, range(5, 7))
    assert fim_tokens(SPECIALS) == (PRE, SUF, MID)
    assert fim_tokens(made_for_it) == (90, 92, 91)
    assert FillInMiddle.check(FillInMiddle.Config(), SPECIALS, LENGTH, "objective") == []
    (problem,) = FillInMiddle.check(FillInMiddle.Config(), lacking, LENGTH, "objective")
    assert "needs three sentinels, and the tokenizer has 2" in problem.what
    assert "data.tokenizer.sentinels to 3" in problem.advice
    assert "<fim_prefix>" in problem.advice
    other = FillInMiddle(FillInMiddle.Config(), made_for_it, LENGTH, 1)
    assert other.prompt_for_middle([20, 21], [30]) == [90, 20, 21, 92, 30, 91]
    assert objective(spm_rate=0.6).prompt_for_middle([20, 21], [30]) == [PRE, SUF, 30, MID, 20, 21]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    for key in ("fim_rate", "spm_rate"):
        for value in (-0.1, 1.1):
            with pytest.raises(ConfigError, match=key):
                decode(FillInMiddle.Config, {key: value})
    section = {"kind": "fill_in_middle"}
    problems = recipe(tmp_path, objective=section, model={"kind": "encoder", "width": 32}).check()
    assert any(
        "'fill_in_middle' needs a model that reads one sequence and is causal" in problem.what for problem in problems
    ), problems
    few = recipe(tmp_path, model=MODEL, objective=section, data={"tokenizer": {"kind": "byte", "sentinels": 2}})
    with pytest.raises(ConfigError, match="needs three sentinels, and the tokenizer has 2"):
        run(few)


def trained(folder: Path, name: str, parallel: dict[str, Any]) -> int:
    exact = {"compute": "float64", "master": "float64"}
    sections: dict[str, Any] = {"model": MODEL, "objective": {"kind": "fill_in_middle", "fim_rate": 0.9}}
    train = {"steps": 3, "eval_every": 0}
    return run(recipe(folder, name, precision=exact, train=train, parallel=parallel, **sections))


LAYOUTS: dict[str, dict[str, Any]] = {
    "cp": {"mesh": {"cp": 2}},
    "dp": {"mesh": {"dp_replicate": 2}},
    "tp": {"mesh": {"tp": 2}},
    "pp": {"mesh": {"pp": 2}},
    "zero3": {"mesh": {"dp_shard": 2}, "zero": {"stage": 3}},
}


@pytest.mark.parametrize("name", ["cp", *(pytest.param(name, marks=pytest.mark.long) for name in [*LAYOUTS][1:])])
def test_layouts_learn_as_one_process_does(tmp_path: Path, pool: Pool, name: str) -> None:
    assert trained(tmp_path, "one", {}) == EXIT_DONE
    assert pool.run(trained, 2, tmp_path, name, LAYOUTS[name]) == [EXIT_DONE] * 2
    assert losses(tmp_path, name) == pytest.approx(losses(tmp_path, "one"), rel=1e-9)


def test_the_middle_is_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trained(tmp_path, "run", {}) == EXIT_DONE
    prompts: list[list[int]] = []

    def generate(model: object, prompt: Tensor, length: int, **options: Any) -> Tensor:
        prompts.append(prompt.tolist())
        assert (options["window"], options["end"], options["prefix"]) == (32, EOS, False)
        return torch.tensor([105 + ord(letter) for letter in "I!"])

    monkeypatch.setattr("xscale.generate.generate_text.generate", generate)
    assert call("generate", tmp_path / "run", "--prompt", "ab", "--suffix", "c") == "I!\n"
    assert generate_text(tmp_path / "run", "", 4, 0.0, None, 0, suffix="c") == "I!"
    a, b, c = (105 + ord(letter) for letter in "abc")
    assert prompts == [[PRE, a, b, SUF, c, MID], [PRE, SUF, c, MID]]
    with pytest.raises(ConfigError, match="have 32 tokens with their sentinels, and at most 31 leave room"):
        generate_text(tmp_path / "run", "a" * 9, 4, 0.0, None, 0, suffix="b" * 20)


def test_a_suffix_needs_a_run_that_fills_in(tmp_path: Path) -> None:
    assert run(recipe(tmp_path, model=MODEL, train={"steps": 1, "eval_every": 0})) == EXIT_DONE
    with pytest.raises(ConfigError, match=r"--suffix: the objective 'causal' trains no filling in"):
        call("generate", tmp_path / "run", "--prompt", "a", "--suffix", "b")
