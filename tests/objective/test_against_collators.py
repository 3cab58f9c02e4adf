"""Objectives against the data collators of transformers, which get the same draws."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, T5Config, T5ForConditionalGeneration

from xscale.core.config import decode
from xscale.objective.masked import Masked
from xscale.objective.objective import SpecialTokens
from xscale.objective.seq2seq import Seq2Seq

SPECIALS = SpecialTokens(vocabulary=100, pad=0, eos=1, mask=2, sentinels=())
LENGTH = 24


class Vocabulary:
    """A tokenizer as far as the collators ask."""

    mask_token, pad_token_id, padding_side = "[MASK]", SPECIALS.pad, "right"

    def __len__(self) -> int:
        return SPECIALS.vocabulary

    def get_special_tokens_mask(self, ids: list[int], already_has_special_tokens: bool) -> list[int]:
        return [int(token < 3) for token in ids]

    def convert_tokens_to_ids(self, token: str) -> int:
        assert token == self.mask_token
        assert SPECIALS.mask is not None
        return SPECIALS.mask

    def pad(self, features: list[dict[str, list[int]]], **_: Any) -> dict[str, Tensor]:
        longest = max(len(feature["input_ids"]) for feature in features)
        rows = [feature["input_ids"] + [SPECIALS.pad] * (longest - len(feature["input_ids"])) for feature in features]
        return {"input_ids": torch.tensor(rows)}


@pytest.mark.parametrize("fractions", [(0.8, 0.1), (0.5, 0.3), (0.6, 0.4), (1.0, 0.0)])
def test_masked_tokens(fractions: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The collator draws coins: which tokens are predicted, which of these are masked, which of the others replaced."""
    mask, replace = fractions
    config = {"mask_probability": 0.4, "mask_fraction": mask, "random_fraction": replace}
    objective = Masked(decode(Masked.Config, config), SPECIALS, LENGTH, seed=3)
    ids, index = torch.randint(3, SPECIALS.vocabulary, (8, LENGTH + 1)), torch.arange(8)
    ids[:, 5::7] = SPECIALS.eos
    ours = objective.batch(ids, None, index)
    predicted, fate, random = objective._draw(ids[:, :-1], index)
    assert not predicted[ids[:, :-1] == SPECIALS.eos].any()
    coins = iter((predicted, fate < mask, fate < mask + replace))
    probabilities: list[float] = []

    def bernoulli(probability: Tensor, generator: object) -> Tensor:
        # That of a special token is 0 in the first draw.
        probabilities.append(float(probability[probability > 0].unique()))
        assert torch.equal(probability == 0, (ids[:, :-1] < 3) & (len(probabilities) == 1))
        return next(coins).float()

    monkeypatch.setattr(torch, "bernoulli", bernoulli)
    monkeypatch.setattr(torch, "randint", lambda *_, **__: random)
    collator: Any = DataCollatorForLanguageModeling(
        Vocabulary(), mlm_probability=0.4, mask_replace_prob=mask, random_replace_prob=replace
    )
    batch = collator([row.tolist() for row in ids[:, :-1]])
    assert torch.equal(ours.tokens.ids, batch["input_ids"])
    assert torch.equal(ours.targets, batch["labels"])
    assert probabilities == pytest.approx([0.4, mask, replace / (1 - mask)] if mask < 1 else [0.4, 1.0])


def binomial_bounds(trials: int, probability: float) -> tuple[float, float]:
    """Bounds that a binomial count leaves with a probability of 2e-9: six standard deviations."""
    deviation = (trials * probability * (1 - probability)) ** 0.5
    return trials * probability - 6 * deviation, trials * probability + 6 * deviation


def test_the_rate_and_the_split_of_masked_tokens() -> None:
    """Devlin et al. 2019, section 3.1: 15 % are predicted; of these 80 % become [MASK], 10 % random, 10 % stay."""
    length, samples = 200, 300
    objective = Masked(Masked.Config(), SPECIALS, length, seed=5)
    ids = torch.randint(3, SPECIALS.vocabulary, (samples, length + 1), generator=torch.Generator().manual_seed(0))
    ids[:, 20::40] = SPECIALS.eos
    batch = objective.batch(ids, None, torch.arange(samples))
    text, inputs, predicted = ids[:, :-1], batch.tokens.ids, batch.targets != -100
    assert torch.equal(batch.targets[predicted], text[predicted])
    assert torch.equal(inputs[~predicted], text[~predicted])
    assert (predicted.sum(1) == 30).all(), "15 % of 200 tokens of each sample"
    # A special token is never predicted, masked or replaced, and each other one is as likely as the next.
    assert not predicted[text == SPECIALS.eos].any()
    ordinary = int((text[0] != SPECIALS.eos).sum())
    assert ordinary == 195
    low, high = binomial_bounds(samples, 30 / ordinary)
    counts = predicted.sum(0)[text[0] != SPECIALS.eos]
    assert low < counts.min(), counts.min()
    assert counts.max() < high, counts.max()
    became, was = inputs[predicted], text[predicted]
    total = len(was)
    # A random token is the same one, or the mask, once in 100 times each.
    expected = {"mask": 0.8 + 0.1 / 100, "same": 0.1 + 0.1 / 100, "other": 0.1 * 98 / 100}
    masked, same = became == SPECIALS.mask, became == was
    for name, is_so in (("mask", masked), ("same", same), ("other", ~masked & ~same)):
        low, high = binomial_bounds(total, expected[name])
        assert low < int(is_so.sum()) < high, name


def test_targets_of_pairs() -> None:
    """Also what the decoder reads, which transformers makes of the labels."""
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=100, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    lengths = [(5, 3), (12, 12), (1, 7)]
    pairs = [[torch.randint(3, 100, (length,)).tolist() for length in pair] for pair in lengths]
    collator: Any = DataCollatorForSeq2Seq(Vocabulary(), model=model)
    theirs = collator([{"input_ids": source, "labels": target} for source, target in pairs])
    sample = torch.full((3, 24), SPECIALS.pad)
    documents = torch.ones(3, 24, dtype=torch.long)
    for row, pair in enumerate(pairs):
        for at, ids in zip((0, 12), pair, strict=True):
            sample[row, at : at + len(ids)], documents[row, at : at + len(ids)] = torch.tensor(ids), 0
    ours = Seq2Seq(decode(Seq2Seq.Config, {}), SPECIALS, 12, seed=0).batch(sample, documents, torch.arange(3))
    assert ours.source is not None
    assert torch.equal(ours.source.ids, theirs["input_ids"])
    assert torch.equal(ours.targets, theirs["labels"])
    seen = theirs["labels"] != -100
    assert torch.equal(ours.tokens.ids[seen], theirs["decoder_input_ids"][seen])
