"""The diversity of exits (Sun et al. 2021), against its equation written out."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conformance.made import close
from tests.nn.depth.test_exits import LENGTH, VOCABULARY, built, config, ids, predicted, states, targets
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.model.encoder import Encoder
from xscale.nn.tokens import Tokens


@pytest.mark.parametrize("head", ["own", "shared"])
def test_the_diversity_of_the_predictions_is_subtracted(head: str) -> None:
    made, alpha = built(Encoder, diversity=0.3, head=head, blocks=[0, 2, 3]), 0.3
    about = Tokens.from_ids(ids(), aux_loss_weight=0.5, target_weight=0.1)
    after = states(made, about)
    loss = made(about, targets())
    wanted, p = torch.zeros((), dtype=torch.float64), list[Tensor]()
    for layer in (0, 2, 3, 4):
        logits = predicted(made, layer, after[layer])
        wanted = wanted + F.cross_entropy(logits.flatten(0, 1), targets().flatten(), reduction="sum")
        p.append(logits.softmax(-1))
        between = [
            -(p[earlier] * p[-1].log()).sum(-1)[targets() != IGNORE_INDEX].sum() for earlier in range(len(p) - 1)
        ]
        if between:
            wanted = wanted - alpha * sum(between) / len(between)
    parameters = dict(made.named_parameters())
    expected = torch.autograd.grad(0.1 * wanted, list(parameters.values()))
    for name, right, gradient in zip(
        parameters, expected, torch.autograd.grad(0.1 * loss, list(parameters.values())), strict=True
    ):
        assert close(gradient, right), name
    (problem,) = Encoder.check(config(Encoder, diversity=0.3, stop="by_depth"), (VOCABULARY, LENGTH), "model")
    assert "trained together" in str(problem)
