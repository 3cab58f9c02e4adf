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
        return [0] * len(ids)

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
    ours = objective.batch(ids, None, index)
    predicted, fate, random = objective._draw(index, LENGTH)
    coins = iter((predicted, fate < mask, fate < mask + replace))
    probabilities: list[float] = []

    def bernoulli(probability: Tensor, generator: object) -> Tensor:
        probabilities.append(float(probability.unique()))
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
