"""Padding behind packed documents: costs of halting and gates are means over the text, as without it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance.made import drawn, ready
from xscale.core.config import decode
from xscale.nn.model.decoder import Decoder
from xscale.nn.model.encoder_decoder import EncoderDecoder
from xscale.nn.signals import KEYS, TARGETS, TOKENS
from xscale.nn.tokens import PACKED_PADDING, SharedValues, Stats, Tokens
from xscale.objective.objective import OBJECTIVES, Batch, Objective, SpecialTokens

VOCABULARY, LENGTH = 64, 32
SPECIALS = SpecialTokens(VOCABULARY, pad=0, eos=1, mask=2, sentinels=range(4, 16), sentence_ends=frozenset({3}))
OBJECTIVE: dict[str, dict[str, Any]] = {
    "denoising": {"deleted_tokens": 0.3},
    "ul2": {"denoisers": [{"mode": "R", "noise_density": 0.25, "mean_length": 4}, {"mode": "S", "noise_density": 0.5}]},
    "ul2_decoder": {"denoisers": [{"mode": "X", "noise_density": 0.5, "mean_length": 4}]},
}
BLOCK: dict[str, Any] = {"mixer": {"kind": "attention", "heads": 2}, "ffn": {"kind": "dense", "hidden": 20}}
PARTS: dict[str, dict[str, Any]] = {
    "halting": {"depth": 3, "share": "all", "block": BLOCK, "halting": {"ponder_weight": 0.3, "bias": -0.5}},
    "gates": {"depth": 2, "block": {**BLOCK, "gates": {"budgets": [0.5], "noise": 0.0}}},
}


def objective_of(name: str) -> Objective:
    built: Objective = OBJECTIVES.build(decode(OBJECTIVES.get(name).part.Config, OBJECTIVE[name]), SPECIALS, LENGTH, 0)
    return built


def batch_of(objective: Objective) -> Batch:
    """One sample of two documents."""
    ids = torch.randint(16, VOCABULARY, (1, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    documents = (torch.arange(LENGTH + 1) >= 20).long()[None]
    index = torch.zeros(1, dtype=torch.long)
    return objective.batch(ids, documents, index, aux_loss_weight=1.0, target_weight=1.0)


def text_of(tokens: Tokens | None) -> int | None:
    """Tokens of the sample's text, None: it has no padding."""
    padding = None if tokens is None else tokens.get(PACKED_PADDING)
    return None if padding is None else int((~padding).sum())


def cut(tokens: Tokens | None) -> Tokens | None:
    """The tokens without their padding."""
    if tokens is None or (count := text_of(tokens)) is None:
        return tokens
    text = tokens.map_fields(
        lambda value, about: about.select(value, (TOKENS, KEYS, TARGETS), slice(count)), shared_values=SharedValues()
    )
    return text.with_signals({PACKED_PADDING: None})


def without_padding(batch: Batch) -> Batch:
    tokens = cut(batch.tokens)
    assert tokens is not None
    return replace(batch, tokens=tokens, source=cut(batch.source), targets=batch.targets[:, : tokens.ids.shape[1]])


def outcome(objective: Objective, part: str, batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
    """The statistics of the part, and all gradients, auxiliary losses among them."""
    kind = EncoderDecoder if OBJECTIVES.of(objective.config).traits.source else Decoder
    stacks = {"encoder": PARTS[part], "decoder": PARTS[part]} if kind is EncoderDecoder else {"stack": PARTS[part]}
    model = ready(kind(decode(kind.Config, {"width": 12, **stacks}), VOCABULARY, 2 * LENGTH)).train()
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            parameter.add_(drawn(*parameter.shape, seed=at), alpha=0.02)
    stats = Stats()
    source = None if batch.source is None else batch.source.with_forward(stats=stats)
    objective.loss(model, replace(batch, tokens=batch.tokens.with_forward(stats=stats), source=source)).backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return stats.means(), gradients


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", OBJECTIVE)
def test_padding_behind_packed_documents_weighs_nothing(name: str, part: str) -> None:
    objective = objective_of(name)
    batch = batch_of(objective)
    padded = [tokens for tokens in (batch.tokens, batch.source) if (text_of(tokens) or LENGTH) < LENGTH]
    assert padded, "the sample has padding"
    means, gradients = outcome(objective, part, batch)
    wanted_means, wanted = outcome(objective, part, without_padding(batch))
    assert any(name.endswith(("/steps", "/computed")) for name in means)
    torch.testing.assert_close(means, wanted_means)
    for path, gradient in wanted.items():
        torch.testing.assert_close(gradients[path], gradient, rtol=1e-8, atol=1e-11, msg=path)
