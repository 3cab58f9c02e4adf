"""Each corruption of BART against a literal one over lists, and the batches that are made of them."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from tests.train.tiny import recipe
from xscale.nn.model.encoder_decoder import EncoderDecoder
from xscale.objective.denoising import (
    CORRUPTIONS,
    Denoising,
    delete_tokens,
    infill,
    mask_tokens,
    permute_sentences,
    rotate,
    span_lengths,
)
from xscale.objective.objective import SpecialTokens

EOS, MASK, STOP, PAD, VOCABULARY = 2, 4, 9, 0, 40
SPECIALS = SpecialTokens(VOCABULARY, pad=PAD, eos=EOS, mask=MASK, sentinels=range(0), sentence_ends=frozenset({STOP}))
NOTHING = dict.fromkeys(CORRUPTIONS, 0.0)


def text_of(seed: int, length: int) -> Tensor:
    """Ordinary tokens, every fifth or so a full stop."""
    generator = seeded(seed)
    text = torch.randint(10, VOCABULARY, (length,), generator=generator)
    return torch.where(torch.rand(length, generator=generator) < 0.2, STOP, text)


def seeded(seed: int) -> Generator:
    return torch.Generator().manual_seed(seed)


def literal_permutation(text: list[int], fraction: float, generator: Generator) -> list[int]:
    sentences: list[list[int]] = [[]]
    for token, following in zip(text, [*text[1:], None], strict=True):
        sentences[-1].append(token)
        if token == STOP and following is not None and following != STOP:
            sentences.append([])
    drawn = torch.randperm(len(sentences), generator=generator).tolist()
    moved = drawn[: round(fraction * len(sentences))]
    order = list(range(len(sentences)))
    for place, sentence in zip(sorted(moved), moved, strict=True):
        order[place] = sentence
    return [token for place in order for token in sentences[place]]


def literal_masking(text: list[int], fraction: float, generator: Generator) -> list[int]:
    masked = torch.randperm(len(text), generator=generator).tolist()[: round(fraction * len(text))]
    return [MASK if place in masked else token for place, token in enumerate(text)]


def literal_infilling(text: list[int], fraction: float, generator: Generator) -> list[int]:
    lengths: list[int] = []
    total = round(fraction * len(text))
    while sum(lengths) < total:
        drawn = int(torch.poisson(torch.tensor(3.0), generator=generator))
        lengths.append(min(drawn, total - sum(lengths)))
    while len(lengths) > total:
        last = max(place for place, length in enumerate(lengths) if length == 0)
        del lengths[last]
    if not lengths:
        return text
    places = len(text) - sum(lengths) + len(lengths)
    masks = sorted(torch.randperm(places, generator=generator).tolist()[: len(lengths)])
    result: list[int] = []
    unread = list(text)
    for place in range(places):
        if place in masks:
            result.append(MASK)
            unread = unread[lengths[masks.index(place)] :]
        else:
            result.append(unread.pop(0))
    assert not unread
    return result


def literal_deletion(text: list[int], fraction: float, generator: Generator) -> list[int]:
    order = torch.randperm(len(text), generator=generator).tolist()
    deleted = order[: min(round(fraction * len(text)), len(text) - 1)]
    return [token for place, token in enumerate(text) if place not in deleted]


def literal_rotation(text: list[int], probability: float, generator: Generator) -> list[int]:
    if float(torch.rand((), generator=generator)) >= probability:
        return text
    first = int(torch.randint(len(text), (), generator=generator))
    return text[first:] + text[:first]


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., list[int]]]] = {
    "permutation": (lambda text, *draws: permute_sentences(text, frozenset({STOP}), *draws), literal_permutation),
    "masking": (lambda text, *draws: mask_tokens(text, MASK, *draws), literal_masking),
    "infilling": (lambda text, share, generator: infill(text, MASK, share, 3.0, generator), literal_infilling),
    "deletion": (delete_tokens, literal_deletion),
    "rotation": (rotate, literal_rotation),
}


@pytest.mark.parametrize("name", CASES)
def test_a_corruption_is_the_literal_one(name: str) -> None:
    corrupt, literal = CASES[name]
    changed = 0
    for seed, length in enumerate([1, 2, 3, 7, 30, 30, 64, 64, 200]):
        for fraction in (0.15, 0.5, 0.95):
            text = text_of(seed, length)
            result = corrupt(text, fraction, seeded(seed)).tolist()
            assert result == literal(text.tolist(), fraction, seeded(seed))
            changed += result != text.tolist()
    assert changed > 5
    text = text_of(1, 30)
    assert torch.equal(corrupt(text, 0.0, seeded(0)), text)


def test_spans_are_poisson_and_sum_to_the_fraction() -> None:
    lengths = [length for seed in range(200) for length in span_lengths(60, 3.0, seeded(seed))[:-1]]
    assert sum(lengths) / len(lengths) == pytest.approx(3.0, abs=0.15)
    assert lengths.count(0) / len(lengths) == pytest.approx(0.05, abs=0.015)
    for total in range(8):
        for seed in range(30):
            drawn = span_lengths(total, 0.5, seeded(seed))
            assert sum(drawn) == total
            assert len(drawn) <= total


def corrupted(config: dict[str, Any], rows: int = 6, length: int = 48, seed: int = 1) -> tuple[Tensor, Tensor, Any]:
    """Samples of three documents, the last without an end, their documents, and the batch."""
    objective = Denoising(Denoising.Config(**config), SPECIALS, length, seed)
    tokens = torch.stack([text_of(row, length + 1) for row in range(rows)])
    documents = torch.zeros_like(tokens)
    for end in (0, 19):
        tokens[:, end] = EOS
        documents[:, end + 1 :] += 1
    return tokens, documents, objective.batch(tokens, documents, torch.arange(rows))


def test_a_batch_restores_each_document_from_its_own_corruption() -> None:
    config = {"masked_tokens": 0.1, "deleted_tokens": 0.1, "rotated_documents": 0.5}
    tokens, documents, batch = corrupted(config)
    assert torch.equal(batch.targets, tokens[:, :-1])
    assert torch.equal(batch.tokens.ids[:, 1:], tokens[:, :-2])
    assert (batch.tokens.ids[:, 0] == EOS).all()
    assert torch.equal(batch.tokens.documents, documents[:, :-1])
    assert batch.source.ids.shape == (6, 48)
    for ids, numbers, row in zip(batch.source.ids, batch.source.documents, tokens, strict=True):
        assert sorted(set(numbers.tolist())) == [0, 1, 2, 3]
        assert (numbers.diff() >= 0).all()
        assert (ids[numbers == 3] == PAD).all()
        assert ids[numbers == 0].tolist() == [EOS]
        assert ids[numbers == 1].tolist()[-1] == EOS
        for number, (first, stop) in enumerate(pairwise([0, 1, 20, 48])):
            kept = set(ids[numbers == number].tolist()) - {MASK}
            assert kept <= set(row[first:stop].tolist())


def test_padding_does_not_count() -> None:
    """The loss is that of each row by itself, its source cut to its length."""
    block = {"mixer": {"kind": "attention", "heads": 2}, "ffn": {"kind": "dense", "hidden": 16}}
    stack = {"depth": 1, "block": block}
    config = EncoderDecoder.Config.model_validate({"width": 16, "encoder": stack, "decoder": stack})
    model = EncoderDecoder(config, VOCABULARY, 48).double()
    generator = seeded(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.requires_grad_(False), std=0.3, generator=generator)
    _, _, batch = corrupted({})
    total = 0.0
    for row in range(6):
        read = int((batch.source.documents[row] < 3).sum())
        assert read < 48
        alone = [type(batch.tokens).from_ids(batch.tokens.ids[row : row + 1], batch.tokens.documents[row : row + 1])]
        sides = (batch.source.ids, batch.source.documents)
        alone.append(type(batch.tokens).from_ids(*(side[row : row + 1, :read] for side in sides)))
        total += float(model(alone[0], batch.targets[row : row + 1], alone[1]))
    assert float(model(batch.tokens, batch.targets, batch.source)) == pytest.approx(total, rel=1e-12)


def test_what_cannot_be_is_refused() -> None:
    def problems(specials: SpecialTokens | None = SPECIALS, **config: Any) -> str:
        return "\n".join(map(str, Denoising.check(Denoising.Config(**config), specials, 48, "objective")))

    assert problems() == problems(None) == ""
    assert "objective: no text is corrupted, and the model would learn to copy" in problems(None, **NOTHING)
    bare = SpecialTokens(VOCABULARY, pad=PAD, eos=EOS, mask=None, sentinels=range(0))
    refused = problems(bare, masked_tokens=0.1)
    assert "objective.masked_tokens: the tokenizer has no mask token" in refused
    assert "objective.infilled: the tokenizer has no mask token" in refused
    assert "objective.permuted_sentences: the tokenizer has no token that ends in a full stop" in refused
    assert problems(bare, **{**NOTHING, "deleted_tokens": 0.2}) == ""


def test_padding_is_hidden_also_where_documents_are_not(tmp_path: Path) -> None:
    mixer = {"kind": "attention", "heads": 4, "core": "linformer"}
    stack = {"depth": 1, "block": {"mixer": mixer}}
    model = {"kind": "encoder_decoder", "encoder": stack}
    settings: dict[str, Any] = {"model": model, "data": {"cross_documents": True}}
    assert recipe(tmp_path, objective={"kind": "span"}, **settings).check() == []
    (problem,) = recipe(tmp_path, objective={"kind": "denoising"}, **settings).check()
    assert "objective: core 'linformer' cannot mask the padding of a sample" in str(problem)
    assert "Take objective.kind=span, or model.encoder.block.mixer.core.kind=" in str(problem)
