"""Every row of the catalogue with every objective on padded samples: it trains, or is refused with a reason.

Where it trains, a padded sample has the loss and the gradients that it has alone, auxiliary losses included.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands.test_catalogue import RECIPES, recipe_of
from tests.conformance.made import drawn
from tests.nn.moe.mixture import set_equal_counts
from xscale.core.config import decode, encode
from xscale.core.errors import ConfigError, Problem
from xscale.nn.materialize import materialize
from xscale.nn.model.model import MODELS
from xscale.objective.objective import OBJECTIVES, Batch, Objective, SpecialTokens
from xscale.recipe import Recipe
from xscale.settings.settings import build_on_meta

VOCABULARY, LENGTH, TEXT = 64, 96, 37
SPECIALS = SpecialTokens(VOCABULARY, pad=0, eos=1, mask=2, sentinels=range(4, 6), bos=3)
PADDED = {name: OBJECTIVES.get(name) for name in ("classify", "tag", "regress", "seq2seq")}
REASONS = (
    # An encoder or a decoder alone has no source; an encoder-decoder has no one sequence to label.
    "needs a model that reads",
    # What the row trains beside its model's head has no targets in these samples.
    "the heads of exits predict tokens",
    "would not be trained",
    # An exit's policy of entropies: a score has none.
    "reads a distribution or votes",
    # A memory is of the text before, in its order.
    "reads no packed text, of which streams are segments",
    # The student learns from the states and logits of all tokens of its teacher's samples.
    "states and logits of all tokens are compared",
    "predicts at its targets alone",
)
"""Words of the problems that are reasons: what the mathematics or the samples lack."""


def variant(recipe: Recipe, name: str) -> Recipe:
    """The row with that objective; ConfigError where a section does not fit."""
    sections = encode(recipe)
    sections["objective"] = {"kind": name}
    if name in ("classify", "regress") and MODELS.of(recipe.model).traits.causal:
        sections["objective"]["pool"] = "last"
    source: dict[str, Any] = {"kind": "pairs", "paths": ["x"]}
    if (labels := PADDED[name].traits.labels) is not None:
        source = {"kind": "labelled", "paths": ["x"], "labels": labels}
    sections["data"] |= {"source": source, "cross_documents": False, "folder": "x"}
    sections["data"] |= {"split_sentences": False, "dupe_factor": None}
    sections["data"] |= {"max_source_length": None, "max_target_length": None}
    return decode(Recipe, sections)


def problems_of(recipe: Recipe, name: str) -> list[Problem]:
    try:
        return variant(recipe, name).check()
    except ConfigError as error:
        return list(error.problems)


@pytest.mark.long
@pytest.mark.sampled(36)
@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_row_trains_on_padded_samples_or_says_why_not(file: Path) -> None:
    recipe = recipe_of(file)
    for name in PADDED:
        problems = problems_of(recipe, name)
        reasons = [problem for problem in problems if any(words in problem.what for words in REASONS)]
        assert problems == [] or reasons, [str(problem) for problem in problems]
        if not problems:
            a_padded_sample_is_as_it_is_alone(variant(recipe, name), name)


def a_padded_sample_is_as_it_is_alone(recipe: Recipe, name: str) -> None:
    """The loss and all gradients of one sample, in training, with and without padding."""
    objective: Objective = OBJECTIVES.build(recipe.objective, SPECIALS, LENGTH, 0)
    results = []
    for length in (LENGTH, TEXT):
        model = build_on_meta(recipe, VOCABULARY)
        materialize(model, 0, dtype=torch.float64)
        with torch.no_grad():
            for at, parameter in enumerate(model.parameters()):
                if parameter.requires_grad:
                    parameter.add_(drawn(*parameter.shape, seed=at), alpha=0.02)
        set_equal_counts(model, VOCABULARY)
        torch.manual_seed(0)
        objective.length = length
        batch = padded_batch(objective, name, length)
        loss = objective.loss(model.train(), batch)
        loss.backward()
        gradients = {path: value.grad for path, value in model.named_parameters() if value.grad is not None}
        results.append((loss.detach(), gradients))
    (loss, gradients), (alone, wanted) = results
    torch.testing.assert_close(loss, alone, rtol=1e-8, atol=1e-10)
    for path, gradient in wanted.items():
        torch.testing.assert_close(gradients.get(path, torch.zeros_like(gradient)), gradient, rtol=1e-6, atol=1e-9)


def padded_batch(objective: Objective, name: str, length: int) -> Batch:
    """One sample of TEXT tokens, padded to `length`; of pairs, both texts."""
    generator = torch.Generator().manual_seed(4)
    text = torch.randint(8, VOCABULARY, (1, 2, TEXT), generator=generator)
    text[..., 0], text[..., -1] = SPECIALS.bos, SPECIALS.eos
    ids = torch.nn.functional.pad(text, (0, length - TEXT), value=SPECIALS.pad)
    documents = (torch.arange(length) >= TEXT).long().expand_as(ids)
    fields: dict[str, Any] = {"aux_loss_weight": 1.0, "target_weight": 1.0}
    index = torch.zeros(1, dtype=torch.long)
    if name == "seq2seq":
        return objective.batch(ids.flatten(1), documents.flatten(1), index, **fields)
    labels = torch.ones(1, 1, dtype=torch.double if name == "regress" else torch.long)
    if name == "tag":
        labels = torch.where(documents[:, 0] == 0, ids[:, 0] % 2, -100)
    return objective.batch(ids[:, 0], documents[:, 0], index, labels=labels, **fields)
