"""Pairs of texts with masked tokens: what is composed of a sample, what is corrupted in it, the loss of its class."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.head.pooler import LABELS
from xscale.nn.model.encoder import Encoder
from xscale.nn.tokens import Stats, Tokens
from xscale.objective.masked_sentences import MaskedSentences
from xscale.objective.objective import Batch, SpecialTokens
from xscale.objective.random_spans import draw_spans

VOCABULARY, LENGTH = 200, 43
SPECIALS = SpecialTokens(VOCABULARY, pad=0, eos=2, mask=4, sentinels=range(5, 9), bos=1)
FIRST, SECOND, OTHER = 17, 20, 21


def samples(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Texts of different ids: 10 + place, 60 + place and 110 + place."""
    texts = [offset + torch.arange(size) for offset, size in ((10, FIRST), (60, SECOND), (110, OTHER))]
    documents = torch.cat([torch.full_like(text, number) for number, text in enumerate(texts)])
    used, width = torch.cat(texts), 2 * (LENGTH - 3)
    tokens, numbers = torch.full((count, width), 150), torch.full((count, width), 3)
    tokens[:, : len(used)], numbers[:, : len(used)] = used, documents
    return tokens, numbers, torch.arange(count)


def objective(seed: int = 1, **config: Any) -> MaskedSentences:
    return MaskedSentences(MaskedSentences.Config(**config), SPECIALS, LENGTH, seed)


def batch_of(count: int = 60, **config: Any) -> Batch:
    return objective(**config).batch(*samples(count))


def pair(second: int, size: int, first: int = 10, first_size: int = FIRST) -> list[int]:
    return [1, *range(first, first + first_size), 2, *range(second, second + size), 2]


IN_ORDER, RANDOM = pair(60, SECOND), pair(110, OTHER)
SWAPPED = pair(10, FIRST, 60, SECOND)
CLASSES = {"next": [IN_ORDER, RANDOM], "order": [IN_ORDER, SWAPPED], "three_way": [IN_ORDER, SWAPPED, RANDOM]}


@pytest.mark.parametrize("task", ["next", "order", "three_way"])
def test_a_pair_is_composed_by_its_class(task: Any) -> None:
    batch = batch_of(300, task=task)
    labels = batch.tokens.get(LABELS)
    assert labels is not None
    types_of_batch, documents_of_batch = batch.tokens.types, batch.tokens.documents
    assert types_of_batch is not None
    assert documents_of_batch is not None
    classes = CLASSES[task]
    assert objective(task=task).classes(objective(task=task).config) == len(classes)
    shares = [(labels == label).double().mean().item() for label in range(len(classes))]
    assert all(abs(share - 1 / len(classes)) < 0.08 for share in shares)
    tokens = batch.tokens
    rows = zip(tokens.ids, batch.targets, types_of_batch, documents_of_batch, tokens.positions, labels, strict=True)
    for ids, targets, types, documents, positions, label in rows:
        wanted = classes[int(label)]
        restored = torch.where(targets == IGNORE_INDEX, ids, targets).tolist()
        padding = LENGTH - len(wanted)
        assert restored == wanted + [0] * padding
        middle = wanted.index(2) + 1
        assert types.tolist() == [0] * middle + [1] * (len(wanted) - middle) + [0] * padding
        assert documents.tolist() == [0] * len(wanted) + [1] * padding
        assert positions[: len(wanted)].tolist() == list(range(len(wanted)))


def test_tokens_are_masked_as_in_bert() -> None:
    """15 % of the tokens with the special ones; of these 80 % masked, 10 % random, 10 % kept; never a special one."""
    batch = batch_of(600)
    predicted = batch.targets != IGNORE_INDEX
    labels = batch.tokens.get(LABELS)
    assert labels is not None
    sizes = [len(CLASSES["next"][label]) for label in labels.tolist()]
    assert predicted.sum(1).tolist() == [round(0.15 * size) for size in sizes]
    assert batch.targets[predicted].min() >= 10
    inputs, targets = batch.tokens.ids[predicted], batch.targets[predicted]
    masked, kept = (inputs == 4).double().mean().item(), (inputs == targets).double().mean().item()
    assert abs(masked - 0.8) < 0.02
    assert abs(kept - 0.1) < 0.02
    places = predicted.double().mean(0)
    assert places[1 : FIRST + 1].min() > 0.09
    assert places[0] == places[FIRST + 1] == 0


def test_ngrams_have_lengths_of_inverse_probability() -> None:
    """ALBERT: p(n) = (1/n) / (1 + 1/2 + 1/3)."""
    free, lengths = torch.ones(100, dtype=torch.bool), Counter[int]()
    free[::9] = False
    for seed in range(1500):
        spans = draw_spans(free, 30, [1.0, 1 / 2, 1 / 3], torch.Generator().manual_seed(seed))
        places = [place for start, end in spans for place in range(start, end)]
        assert len(places) == len(set(places)) == 30
        assert all(free[place] for place in places)
        start, end = spans[0]
        if all(free[start : start + 3]) and start < 97:
            lengths[end - start] += 1
    shares = {size: count / lengths.total() for size, count in lengths.items()}
    assert set(shares) == {1, 2, 3}
    assert all(abs(share - (1 / size) / (11 / 6)) < 0.05 for size, share in shares.items())
    batch = batch_of(200, ngrams=3, mask_fraction=1.0, random_fraction=0.0)
    masked = batch.tokens.ids == 4
    touching = [int((rows[:, 1:] & rows[:, :-1]).sum()) for rows in (masked, batch_of(200).targets != IGNORE_INDEX)]
    assert touching[0] > 1.5 * touching[1]


def test_trigrams_are_shuffled_and_restored() -> None:
    batch = batch_of(300, shuffled_trigrams=0.15, mask_fraction=1.0, random_fraction=0.0)
    orders: Counter[tuple[int, ...]] = Counter()
    for ids, targets in zip(batch.tokens.ids, batch.targets, strict=True):
        shuffled = ((targets != IGNORE_INDEX) & (ids != 4)).nonzero().flatten().tolist()
        assert len(shuffled) == 6
        for trigram in (shuffled[:3], shuffled[3:]):
            assert trigram == list(range(trigram[0], trigram[0] + 3))
            written, wanted = ids[trigram].tolist(), targets[trigram].tolist()
            assert sorted(written) == wanted
            orders[tuple(wanted.index(token) for token in written)] += 1
    assert len(orders) == math.factorial(3)
    assert min(orders.values()) > sum(orders.values()) / 6 * 0.6
    plain = batch_of(300)
    assert (plain.targets != IGNORE_INDEX).sum() + 300 * 6 == (batch.targets != IGNORE_INDEX).sum()


def test_draws_are_fixed_by_seed_and_number() -> None:
    tokens, documents, index = samples(6)
    whole = objective(task="three_way", shuffled_trigrams=0.1).batch(tokens, documents, index)
    for row in range(6):
        alone = objective(task="three_way", shuffled_trigrams=0.1).batch(
            tokens[row : row + 1], documents[row : row + 1], index[row : row + 1]
        )
        assert torch.equal(alone.tokens.ids, whole.tokens.ids[row : row + 1])
        assert torch.equal(alone.targets, whole.targets[row : row + 1])
    # These are the draws of this version: a run that resumes has those that it began with.
    labels = whole.tokens.get(LABELS)
    assert labels is not None
    assert labels.tolist() == PINNED_LABELS
    assert (whole.targets[0] != IGNORE_INDEX).nonzero().flatten().tolist() == PINNED_PLACES


PINNED_LABELS = [1, 2, 2, 1, 1, 0]
PINNED_PLACES = [9, 10, 11, 25, 26, 28, 29, 33, 35]


def test_padding_and_what_it_holds_count_for_nothing() -> None:
    tokens, documents, index = samples(8)
    noise = torch.where(documents == 3, torch.randint_like(tokens, VOCABULARY), tokens)
    first, second = (objective().batch(given, documents, index) for given in (tokens, noise))
    assert torch.equal(first.tokens.ids, second.tokens.ids)
    model = Encoder(Encoder.Config(width=16, token_types=2), VOCABULARY, LENGTH).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(1))
    padding = first.tokens.documents
    assert padding is not None
    padded = torch.where(padding == 1, 77, first.tokens.ids)
    other = Batch(
        first.tokens.map_tensors(lambda tensor: padded if tensor is first.tokens.ids else tensor), first.targets
    )
    assert torch.equal(objective().loss(model, first), objective().loss(model, other))


def test_the_loss_of_the_class_is_the_mean_over_sequences() -> None:
    """BERT: softmax(W tanh(W_p h_CLS + b_p) + b), its gradient beside that of the masked tokens."""
    config = Encoder.Config.model_validate(
        {"width": 16, "token_types": 2, "sentence_head": {"classes": 3}, "stack": {"depth": 1}}
    )
    model = Encoder(config, VOCABULARY, LENGTH).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    stats = Stats()
    sample = samples(5)
    batch = objective(task="three_way").batch(*sample, aux_loss_weight=0.25, stats=stats)
    parameters = dict(model.named_parameters())
    tokens_loss = objective().loss(model, batch)
    gradients = torch.autograd.grad(tokens_loss / 7, list(parameters.values()))
    head = model.head.sentence
    assert head is not None
    states = model.stack(model.embed(batch.tokens), batch.tokens)
    labels = batch.tokens.get(LABELS)
    assert labels is not None
    total, right = torch.zeros((), dtype=torch.float64), 0
    for row, label in zip(states, labels.tolist(), strict=True):
        dense: Any = head.pooler.dense
        classifier: Any = head.classifier
        pooled = [
            torch.tanh(sum(w * h for w, h in zip(weights, row[0], strict=True)) + bias)
            for weights, bias in zip(dense.weight, dense.bias, strict=True)
        ]
        logits = [
            sum(w * p for w, p in zip(weights, pooled, strict=True)) + bias
            for weights, bias in zip(classifier.weight, classifier.bias, strict=True)
        ]
        total = total - logits[label] + sum(logit.exp() for logit in logits).log()
        right += max(range(3), key=lambda place: logits[place].item()) == label
    means = stats.means()
    assert means["head.sentence/loss"].item() == pytest.approx(total.item() / 5, rel=1e-12)
    assert means["head.sentence/accuracy"].item() == right / 5
    plain = objective(task="three_way").batch(*sample)
    both = objective().loss(model, plain) / 7 + 0.25 * total / 5
    wanted = torch.autograd.grad(both, list(parameters.values()))
    for name, one, two in zip(parameters, gradients, wanted, strict=True):
        assert torch.allclose(one, two, rtol=1e-9, atol=1e-12), name
    assert tokens_loss.item() == pytest.approx(objective().loss(model, plain).item(), rel=1e-12)


def test_types_choose_the_row_that_is_added() -> None:
    model = Encoder(Encoder.Config(width=16, token_types=3), VOCABULARY, LENGTH).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids, types = torch.arange(6)[None], torch.tensor([[0, 2, 1, 1, 0, 2]])
    plain = model.embed(Tokens.from_ids(ids))
    typed = model.embed(Tokens.from_ids(ids, types=types))
    for place, kind in enumerate(types[0].tolist()):
        assert torch.allclose(typed[0, place], plain[0, place] - model.embed.types[0] + model.embed.types[kind])
    prefixed = Tokens.from_ids(ids, types=types, signals={LABELS: torch.tensor([1])}).with_global_tokens(2)
    assert prefixed.types is not None
    assert prefixed.types.tolist() == [[0, 0, *types[0].tolist()]]
    assert prefixed.get(LABELS) is not None


def test_what_the_tokenizer_lacks_is_named() -> None:
    lacking = SpecialTokens(VOCABULARY, pad=0, eos=2, mask=None, sentinels=range(0))
    config = MaskedSentences.Config(shuffled_trigrams=0.9)
    problems = MaskedSentences.check(config, lacking, LENGTH, "objective")
    assert [problem.what[:22] for problem in problems] == [
        "the tokenizer has no m",
        "the tokenizer has no t",
        "mask_probability 0.15 ",
    ]
    assert "data.tokenizer.bos" in problems[1].advice
