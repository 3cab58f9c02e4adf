"""Conformance of models: order kept, sources read, text written one token at a time as all at once."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conformance.made import VOCABULARY, close, noisy, numbered, ready
from tests.families import each, example
from xscale.core.registry import Entry, Family
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.model.model import MODELS, Model, ModelTraits
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


def later(one: Tensor, cut: int) -> Tensor:
    """Other tokens from `cut` on."""
    return torch.cat((one[:, :cut], (one[:, cut:] + 7) % VOCABULARY), 1)


@each(MODELS)
def test_logits_and_losses_agree(entry: Entry[Any]) -> None:
    model, targets = built(entry), ids(5)
    targets[:, 3] = IGNORE_INDEX
    logits = model(Tokens.from_ids(ids()), source=source(entry))
    assert logits.shape == (2, LENGTH, VOCABULARY)
    loss = model(Tokens.from_ids(ids()), targets, source(entry))
    assert loss.shape == ()
    kept = targets != IGNORE_INDEX
    wanted = F.cross_entropy(logits[kept], targets[kept], reduction="sum")
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)


@each(MODELS)
def test_the_future_is_seen_only_where_declared(entry: Entry[Any]) -> None:
    hidden = []
    for training in (False, True):
        model, seed = built(entry, noise=training), 1 if training else None
        whole = model(Tokens.from_ids(ids(), rng_seed=seed), source=source(entry))
        for cut in (1, 17, LENGTH - 1):
            changed = model(Tokens.from_ids(later(ids(), cut), rng_seed=seed), source=source(entry))
            assert not close(changed[:, cut:], whole[:, cut:])
            hidden.append(close(changed[:, :cut], whole[:, :cut]))
    assert all(hidden) == entry.traits.causal
    assert any(hidden) == entry.traits.causal


@each(MODELS)
def test_a_source_is_read_where_declared(entry: Entry[Any]) -> None:
    model, text = built(entry), Tokens.from_ids(ids())
    one = model(text, source=Tokens.from_ids(ids(1, 23)))
    other = model(text, source=Tokens.from_ids(later(ids(1, 23), 22)))
    assert close(one[:, :1], other[:, :1]) != entry.traits.source, "the first written token reads the last source token"


@each(MODELS)
def test_packed_documents_stay_apart(entry: Entry[Any]) -> None:
    model, numbers = built(entry), numbered(15, 25)
    about = Tokens.from_ids(ids(), numbers)
    packed = model(about, source=source(entry))
    alone = [model(Tokens.from_ids(part), source=source(entry)) for part in (ids()[:, :15], ids()[:, 15:])]
    assert close(packed, torch.cat(alone, 1))


@each(entry for entry in MODELS if entry.traits.decode)
@pytest.mark.parametrize("chunks", [[1] * LENGTH, [20, 1, 1, 18]], ids=len)
def test_written_token_by_token_it_says_the_same(entry: Entry[Any], chunks: list[int]) -> None:
    model, text = built(entry), Tokens.from_ids(ids())
    whole = model(text, source=source(entry))
    cache: dict[str, Any] = {}
    start, logits = 0, []
    for size in chunks:
        here = slice(start, start + size)
        step = replace(
            text.with_forward(cache=cache),
            ids=text.ids[:, here],
            positions=text.positions[:, here],
            shared_values=SharedValues(),
        )
        logits.append(model(step, source=source(entry)))
        start += size
    assert close(torch.cat(logits, 1), whole)


@each(MODELS)
def test_every_weight_takes_part(entry: Entry[Any]) -> None:
    model = built(entry)
    loss = model(Tokens.from_ids(ids()), ids(5), source(entry))
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    idle = [name for name, gradient in zip(names, gradients, strict=True) if gradient is None or not gradient.any()]
    assert idle == []


class Bag(Model):
    """Scores from an embedding alone: causal, since it sees nothing else."""

    def __init__(self, config: Any, vocabulary: int, length: int) -> None:
        super().__init__()
        from xscale.nn.init import Init
        from xscale.nn.linear import Embedding

        self.table = Embedding(vocabulary, config.width, Init())

    def mixed(self, x: Tensor) -> Tensor:
        return x

    def forward(self, tokens: Tokens, targets: Tensor | None = None, source: Tokens | None = None) -> Tensor:
        logits = self.mixed(self.table(tokens.ids)) @ self.table.weight.t()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class Sees(Bag):
    def mixed(self, x: Tensor) -> Tensor:
        return x + 1e-6 * x.roll(-1, 1)


class Remembers(Bag):
    """Depends on what stands before, across documents, and keeps no cache."""

    def mixed(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


def registered(part: type[Model], **changes: Any) -> Entry[Any]:
    family: Family[ModelTraits] = Family("model", ModelTraits)
    traits = {"causal": True, "source": False, "decode": True, **changes}
    family.register("cheat", traits=ModelTraits(**traits))(type("Cheat", (part,), {}))
    return family.get("cheat")


def test_cheats_are_caught() -> None:
    for honest in (
        test_logits_and_losses_agree,
        test_the_future_is_seen_only_where_declared,
        test_a_source_is_read_where_declared,
        test_packed_documents_stay_apart,
        test_every_weight_takes_part,
    ):
        honest(registered(Bag))
    cheats: list[tuple[type[Model], dict[str, Any], Any]] = [
        (Sees, {}, test_the_future_is_seen_only_where_declared),
        (Bag, {"causal": False}, test_the_future_is_seen_only_where_declared),
        (Bag, {"source": True}, test_a_source_is_read_where_declared),
        (Remembers, {}, test_packed_documents_stay_apart),
    ]
    for part, changes, check in cheats:
        with pytest.raises(AssertionError):
            check(registered(part, **changes))
    with pytest.raises(AssertionError):
        test_written_token_by_token_it_says_the_same(registered(Remembers), [1] * LENGTH)
