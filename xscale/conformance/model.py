"""Conformance of models: order kept, sources read, text written one token at a time as all at once."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.conformance.check import check, is_near
from xscale.conformance.small_parts import VOCABULARY, close, example, noisy, numbered, ready
from xscale.core.registry import Entry
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.model.model import Model
from xscale.nn.tokens import SharedValues, Tokens

LENGTH, WIDTH = 40, 32


def built(entry: Entry[Any], noise: bool = False) -> Model:
    """The model in evaluation; with `noise` in training, with its dropout on."""
    config = example(entry).model_copy(update={"width": WIDTH})
    config = noisy(config) if noise else config
    assert entry.part.check(config, (VOCABULARY, LENGTH), "model") == []
    part: Model = ready(entry.part(config, VOCABULARY, LENGTH))
    return part.train(noise)


def ids(seed: int = 0, length: int = LENGTH) -> Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))


def source(entry: Entry[Any], seed: int = 1) -> Tokens | None:
    return Tokens.from_ids(ids(seed, 23)) if entry.traits.source else None


def later(first: Tensor, cut: int) -> Tensor:
    """Other tokens from `cut` on."""
    return torch.cat((first[:, :cut], (first[:, cut:] + 7) % VOCABULARY), 1)


@check("model", at_start=True)
def logits_and_losses_agree(entry: Entry[Any]) -> None:
    model, targets = built(entry), ids(5)
    targets[:, 3] = IGNORE_INDEX
    logits = model(Tokens.from_ids(ids()), source=source(entry))
    assert logits.shape == (2, LENGTH, VOCABULARY)
    loss = model(Tokens.from_ids(ids()), targets, source(entry))
    assert loss.shape == ()
    kept = targets != IGNORE_INDEX
    wanted = F.cross_entropy(logits[kept], targets[kept], reduction="sum")
    assert is_near(loss.item(), wanted.item(), 1e-6)


@check("model", at_start=True)
def the_future_is_seen_only_where_declared(entry: Entry[Any]) -> None:
    hidden = []
    for training in (False, True):
        model, seed = built(entry, noise=training), 1 if training else None
        full = model(Tokens.from_ids(ids(), rng_seed=seed), source=source(entry))
        for cut in (1, 17, LENGTH - 1):
            changed = model(Tokens.from_ids(later(ids(), cut), rng_seed=seed), source=source(entry))
            assert not close(changed[:, cut:], full[:, cut:])
            hidden.append(close(changed[:, :cut], full[:, :cut]))
    assert all(hidden) == entry.traits.causal
    assert any(hidden) == entry.traits.causal


@check("model")
def a_source_is_read_where_declared(entry: Entry[Any]) -> None:
    model, text = built(entry), Tokens.from_ids(ids())
    first = model(text, source=Tokens.from_ids(ids(1, 23)))
    other = model(text, source=Tokens.from_ids(later(ids(1, 23), 22)))
    assert close(first[:, :1], other[:, :1]) != entry.traits.source, (
        "the first written token reads the last source token"
    )


@check("model", at_start=True)
def packed_documents_stay_apart(entry: Entry[Any]) -> None:
    model, numbers = built(entry), numbered(15, 25)
    about = Tokens.from_ids(ids(), numbers)
    packed = model(about, source=source(entry))
    alone = [
        model(Tokens.from_ids(part), source=source(entry))
        for part in (ids()[:, :15], ids()[:, 15:])
    ]
    assert close(packed, torch.cat(alone, 1))


@check(
    "model",
    lambda entry: entry.traits.decode,
    values={"token by token": ([1] * LENGTH,), "chunks": ([20, 1, 1, 18],)},
)
def written_token_by_token_it_says_the_same(entry: Entry[Any], chunks: list[int]) -> None:
    model, text = built(entry), Tokens.from_ids(ids())
    full = model(text, source=source(entry))
    cache: dict[str, Any] = {}
    start, logits = 0, []
    for size in chunks:
        now = slice(start, start + size)
        step = replace(
            text.with_forward(cache=cache),
            ids=text.ids[:, now],
            positions=text.positions[:, now],
            shared_values=SharedValues(),
        )
        logits.append(model(step, source=source(entry)))
        start += size
    assert close(torch.cat(logits, 1), full)


@check("model")
def every_weight_takes_part(entry: Entry[Any]) -> None:
    model = built(entry)
    loss = model(Tokens.from_ids(ids()), ids(5), source(entry))
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    idle = [
        name
        for name, gradient in zip(names, gradients, strict=True)
        if gradient is None or not gradient.any()
    ]
    assert idle == []
