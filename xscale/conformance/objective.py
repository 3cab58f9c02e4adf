"""Conformance of objectives: a model it can train, nothing to copy from, and the same batch however it is cut."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.conformance.check import check, is_near
from xscale.conformance.families import family_named
from xscale.conformance.small_parts import VOCABULARY, example, ready
from xscale.core.registry import Entry
from xscale.nn.attention.ops.mask import OBSERVED
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.model.model import Model
from xscale.nn.tokens import Tokens
from xscale.objective.objective import OBJECTIVES, Batch, Objective, Samples, SpecialTokens
from xscale.settings.settings import put_class_head

LENGTH, SAMPLES = 64, 6
FIRST = 15
"""Ids below are special."""
SPECIALS = SpecialTokens(
    vocabulary=VOCABULARY,
    pad=0,
    eos=2,
    mask=4,
    sentinels=range(5, FIRST),
    bos=1,
    sentence_ends=frozenset({20}),
)


def built(entry: Entry[Any], seed: int = 1) -> Objective:
    config = example(entry)
    assert entry.part.check(config, SPECIALS, LENGTH, "objective") == []
    part: Objective = entry.part(config, SPECIALS, LENGTH, seed)
    return part


def samples(kind: Samples = "packed") -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [B, T+1], the documents they are from, and the samples' numbers; pairs [B, S+T] have padding, and so have
    sentences [B, 2 (T-3)], which fill what the objective makes of them in some samples alone."""
    pairs = kind == "pairs"
    if kind == "sentences":
        return sentence_samples()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        FIRST, VOCABULARY, (SAMPLES, 2 * LENGTH if pairs else LENGTH + 1), generator=generator
    )
    documents = (torch.arange(LENGTH + 1) >= 40).long().expand(SAMPLES, -1).contiguous()
    if pairs:
        used = torch.randint(1, LENGTH + 1, (SAMPLES, 2, 1), generator=generator)
        documents = (torch.arange(LENGTH) >= used).long().flatten(1)  # [B, S + T]
    if kind == "labels":
        used = torch.randint(1, LENGTH + 1, (SAMPLES, 1), generator=generator)
        return tokens[:, :-1], (torch.arange(LENGTH) >= used).long(), torch.arange(SAMPLES)
    return tokens, documents, torch.arange(SAMPLES)


def sentence_samples() -> tuple[Tensor, Tensor, Tensor]:
    generator, most = torch.Generator().manual_seed(0), LENGTH - 3
    tokens = torch.randint(FIRST, VOCABULARY, (SAMPLES, 2 * most), generator=generator)
    documents = torch.full_like(tokens, 3)
    for row in range(SAMPLES):
        first = int(torch.randint(3, most - 3, (), generator=generator))
        second, other = (most - first if row % 2 else 2 for _ in range(2))
        documents[row, : first + second + other] = 2
        documents[row, : first + second] = 1
        documents[row, :first] = 0
    return tokens, documents, torch.arange(SAMPLES)


def labels_of(objective: Objective, rows: slice = slice(None)) -> dict[str, Tensor]:
    """The labels of the samples, for an objective on labelled examples."""
    kind = objective.config.kind
    traits = OBJECTIVES.get(kind).traits if kind in OBJECTIVES else None
    if traits is None or traits.labels is None:
        return {}
    generator = torch.Generator().manual_seed(2)
    if traits.labels == "score":
        return {"labels": torch.rand(SAMPLES, 1, generator=generator, dtype=torch.float64)[rows]}
    if traits.labels == "class":
        return {"labels": torch.randint(2, (SAMPLES, 1), generator=generator)[rows]}
    tags = torch.randint(2, (SAMPLES, LENGTH), generator=generator)
    return {"labels": torch.where(samples("labels")[1] == 0, tags, IGNORE_INDEX)[rows]}


def samples_of(objective: Objective) -> Samples:
    kind = objective.config.kind
    return OBJECTIVES.get(kind).traits.samples if kind in OBJECTIVES else "packed"


def batches(objective: Objective, rows: slice = slice(None), documents: bool = False) -> Batch:
    """Padding is told from text by its document, so that samples other than packed ones have their documents always."""
    kind = samples_of(objective)
    tokens, numbers, index = samples(kind)
    text_documents = numbers[rows] if documents or kind != "packed" else None
    return objective.batch(tokens[rows], text_documents, index[rows], **labels_of(objective, rows))


def model_for(entry: Entry[Any]) -> Model:
    """Any model with the traits that the objective needs."""
    traits = entry.traits
    able = [
        model
        for model in family_named("model")
        if traits.causal in (None, model.traits.causal) and model.traits.source == traits.source
    ]
    assert able, f"no model has what '{entry.name}' needs"
    config = able[0].part.Config(width=16)
    part: Model = able[0].part(config, VOCABULARY, 2 * LENGTH)
    if (head := entry.part.head_sizes(example(entry))) is not None:
        put_class_head(part, config, head)
    return ready(part)


def tensors(batch: Batch) -> list[Tensor]:
    outcome = [batch.tokens.ids, batch.tokens.positions, batch.targets]
    if (observed := batch.tokens.get(OBSERVED)) is not None:
        outcome.append(observed)
    return outcome + ([batch.source.ids, batch.source.positions] if batch.source else [])


@check("objective", at_start=True)
def a_model_with_the_needed_traits_learns(entry: Entry[Any]) -> None:
    objective, model = built(entry), model_for(entry)
    batch = batches(objective)
    assert (batch.source is not None) == entry.traits.source
    assert (batch.tokens.prefix is not None) == entry.traits.prefix
    assert batch.tokens.ids.shape == batch.targets.shape
    assert batch.targets.shape[0] == SAMPLES
    assert (
        (batch.targets == IGNORE_INDEX) | ((batch.targets >= 0) & (batch.targets < VOCABULARY))
    ).all()
    if entry.traits.labels is not None:
        assert (batch.targets != IGNORE_INDEX).any(1).all()
    loss = objective.loss(model, batch)
    assert loss.shape == ()
    assert loss.item() > 0
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)


@check("objective", values={"one document": (False,), "documents": (True,)})
def micro_batches_make_the_batch(entry: Entry[Any], documents: bool) -> None:
    objective, model = built(entry), model_for(entry)
    full = batches(objective, documents=documents)
    parts = [batches(objective, slice(at, at + 2), documents) for at in range(0, SAMPLES, 2)]
    for first, pieces in zip(tensors(full), zip(*map(tensors, parts), strict=True), strict=True):
        assert torch.equal(first, torch.cat(pieces))
    assert full.weight == sum(part.weight for part in parts)
    total = sum(objective.loss(model, part).item() for part in parts)
    assert is_near(objective.loss(model, full).item(), total, 1e-6)


@check("objective")
def ignored_tokens_weigh_nothing(entry: Entry[Any]) -> None:
    objective, model = built(entry), model_for(entry)
    batch = batches(objective)
    where = (batch.targets != IGNORE_INDEX).nonzero()[0].tolist()
    targets = batch.targets.clone()
    targets[where[0], where[1]] = IGNORE_INDEX
    fewer = Batch(batch.tokens, targets, batch.source)
    assert fewer.weight == batch.weight - 1
    logits = model(batch.tokens, source=batch.source)[where[0], where[1]]
    target = batch.targets[where[0], where[1]]
    scored = entry.traits.labels == "score"
    of_token = (logits[0] - target).square() if scored else F.cross_entropy(logits, target)
    difference = objective.loss(model, batch) - objective.loss(model, fewer)
    assert is_near(difference.item(), of_token.item(), 1e-3)


@check("objective")
def what_is_asked_for_stands_behind_only_where_declared(entry: Entry[Any]) -> None:
    """A causal model is asked for what it has not read: other targets, and what is read up to there is the same."""
    if entry.traits.causal is None:
        # Labels are no tokens that a model could read.
        return
    objective = built(entry)
    tokens, documents, index = samples(entry.traits.samples)
    text_documents = documents if entry.traits.samples != "packed" else None
    first = objective.batch(tokens, text_documents, index)
    copied = 0
    for column in range(tokens.shape[1]):
        other = tokens.clone()
        other[:, column] = FIRST + (other[:, column] - FIRST + 1) % (VOCABULARY - FIRST)
        second = objective.batch(other, text_documents, index)
        for row in range(SAMPLES):
            changed = (first.targets[row] != second.targets[row]).nonzero().flatten().tolist()
            if (
                changed
                and (first.tokens.ids[row] != second.tokens.ids[row])[: changed[0] + 1].any()
            ):
                copied += 1
    assert (copied == 0) == entry.traits.causal


@check("objective")
def draws_depend_on_the_sample_alone(entry: Entry[Any]) -> None:
    tokens, documents, index = samples(entry.traits.samples)
    same = tokens[:1].expand(SAMPLES, -1)
    text_documents = documents[:1].expand(SAMPLES, -1) if entry.traits.samples != "packed" else None
    labels = {key: value[:1].expand(SAMPLES, -1) for key, value in labels_of(built(entry)).items()}
    torch.manual_seed(3)
    first = built(entry).batch(same, text_documents, index, **labels)
    torch.manual_seed(4)
    again = built(entry).batch(same, text_documents, index, **labels)
    assert all(
        torch.equal(tensor, twin)
        for tensor, twin in zip(tensors(first), tensors(again), strict=True)
    )
    by_number = any((tensor[:1] != tensor).any() for tensor in tensors(first))
    other = built(entry, seed=2).batch(same, text_documents, index, **labels)
    by_seed = any(
        not torch.equal(tensor, twin)
        for tensor, twin in zip(tensors(first), tensors(other), strict=True)
    )
    assert by_number == by_seed == entry.traits.random


@check("objective")
def text_documents_are_told_to_the_model(entry: Entry[Any]) -> None:
    objective = built(entry)
    if entry.traits.samples != "packed":
        return
    apart, together = batches(objective, documents=True), batches(objective)
    padded = entry.traits.padded
    assert padded or together.tokens.documents is None
    for first in filter(None, (apart.tokens, apart.source)):
        assert first.documents is not None
        assert first.documents.shape == first.ids.shape
        assert set(first.documents.flatten().tolist()) - ({2} if padded else set()) == {0, 1}
        assert torch.equal(first.positions, Tokens.from_ids(first.ids, first.documents).positions)


@check("objective")
def padding_weighs_nothing(entry: Entry[Any]) -> None:
    """Other ids, more of it or none: the loss and its gradients are those of the pair by itself."""
    if entry.traits.samples != "pairs":
        return
    objective, model = built(entry), model_for(entry).double()
    tokens, documents, index = samples("pairs")
    loss, gradients = of_model(objective, model, tokens, documents, index)
    noise = torch.randint_like(tokens, VOCABULARY)
    other, gradients_of_other = of_model(
        objective, model, torch.where(documents == 1, noise, tokens), documents, index
    )
    assert torch.equal(loss, other)
    assert all(
        torch.equal(first, two) for first, two in zip(gradients, gradients_of_other, strict=True)
    )
    total, summed = (
        torch.zeros((), dtype=torch.float64),
        [torch.zeros_like(gradient) for gradient in gradients],
    )
    for row in range(SAMPLES):
        kept = documents[row : row + 1] == 0
        read = int(kept[:, :LENGTH].sum())
        text = tokens[row : row + 1][kept][None]
        alone = of_length(objective, read).batch(text, torch.zeros_like(text), index[row : row + 1])
        first = objective.loss(model, alone)
        total += first.detach()
        for sums, part in zip(
            summed, torch.autograd.grad(first, list(model.parameters())), strict=True
        ):
            sums += part
    assert torch.allclose(loss, total, rtol=1e-12)
    for first, two in zip(gradients, summed, strict=True):
        assert torch.allclose(first, two, rtol=1e-9, atol=1e-12)


@check("objective")
def padding_of_examples_weighs_nothing(entry: Entry[Any]) -> None:
    """Other ids in the padding leave the loss and its gradients, and no target is there."""
    if entry.traits.samples != "labels":
        return
    objective, model = built(entry), model_for(entry).double()
    tokens, documents, index = samples("labels")
    noise = torch.where(documents == 1, torch.randint_like(tokens, VOCABULARY), tokens)
    assert not torch.equal(noise, tokens)
    batch, other = (
        objective.batch(ids, documents, index, **labels_of(objective)) for ids in (tokens, noise)
    )
    assert (batch.targets[documents == 1] == IGNORE_INDEX).all()
    results = [objective.loss(model, first) for first in (batch, other)]
    assert torch.equal(results[0], results[1])
    parameters = list(model.parameters())
    for first, two in zip(
        *(torch.autograd.grad(loss, parameters) for loss in results), strict=True
    ):
        assert torch.equal(first, two)


def of_length(objective: Objective, length: int) -> Objective:
    """The objective on sources of another length."""
    part: Objective = type(objective)(objective.config, objective.specials, length, objective.seed)
    return part


def of_model(
    objective: Objective, model: Model, tokens: Tensor, documents: Tensor, index: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The loss and its gradients."""
    loss = objective.loss(model, objective.batch(tokens, documents, index))
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


@check("objective")
def label_smoothing_is_told_to_the_model(entry: Entry[Any]) -> None:
    objective = built(entry)
    if entry.traits.labels == "score":
        return
    tokens, documents, index = samples(entry.traits.samples)
    text_documents = documents if entry.traits.samples != "packed" else None
    batch = objective.batch(
        tokens, text_documents, index, label_smoothing=0.25, **labels_of(objective)
    )
    assert batch.tokens.forward.label_smoothing == 0.25
    model = model_for(entry).double()
    logits = model(batch.tokens, None, batch.source)
    wanted = F.cross_entropy(
        logits.flatten(0, 1),
        batch.targets.flatten(),
        ignore_index=-100,
        reduction="sum",
        label_smoothing=0.25,
    )
    assert is_near(objective.loss(model, batch).item(), wanted.item(), 1e-9)
