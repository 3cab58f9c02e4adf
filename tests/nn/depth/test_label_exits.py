"""Exits of an objective on labels: an example leaves as a whole, against the papers' rules written out by example."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conformance.made import close, ready
from xscale.core.config import decode
from xscale.evaluate.exit_curve import exit_curve
from xscale.nn.depth.early_exit import EARLY_EXIT, EarlyExit, ExitPolicyConfig
from xscale.nn.depth.exits_config import ExitsConfig
from xscale.nn.head.class_head import ClassHead
from xscale.nn.head.head import IGNORE_INDEX
from xscale.nn.model.encoder import Encoder
from xscale.nn.tokens import Tokens
from xscale.objective.objective import Batch, HeadSizes
from xscale.settings.settings import put_class_head

VOCABULARY, ROWS, LENGTH, DEPTH, CLASSES = 17, 12, 7, 5, 3
BLOCK: dict[str, Any] = {"mixer": {"kind": "attention", "heads": 2}, "ffn": {"kind": "dense", "hidden": 20}}
POLICIES: dict[str, dict[str, Any]] = {
    "entropy": {"criterion": "entropy", "threshold": 0.8},
    "patience": {"criterion": "patience", "threshold": 2},
    "uncertainty": {"criterion": "uncertainty", "threshold": 0.8, "window": 0},
    "vote": {"criterion": "vote", "threshold": 1.2, "power": 0.5},
    "scores": {"criterion": "patience", "threshold": 1, "tolerance": 0.6},
}


def built(*, scores: bool = False, per_example: bool = True, **exits: Any) -> Any:
    stack = {"depth": DEPTH, "block": BLOCK, "exits": exits}
    config = decode(Encoder.Config, {"width": 12, "position": "learned", "stack": stack})
    assert Encoder.check(config, (VOCABULARY, LENGTH), "model") == []
    with torch.device("meta"):
        made = Encoder(config, VOCABULARY, LENGTH)
        put_class_head(made, config, HeadSizes(1 if scores else CLASSES, scores=scores, per_example=per_example))
    made = ready(made.to_empty(device="cpu"))
    for number, module in enumerate(part for part in made.modules() if isinstance(part, ClassHead)):
        # Heads that agree now and then.
        drawn = torch.randn(module.classes.weight.shape, generator=torch.Generator().manual_seed(number))
        module.classes.weight.data.copy_(0.3 * drawn.double())
    return made


def ids() -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))


def targets(*, scores: bool = False) -> Tensor:
    """The first token of each row predicts, of the last row the fourth."""
    values = torch.arange(ROWS) % CLASSES
    found = torch.full((ROWS, LENGTH), IGNORE_INDEX, dtype=torch.float64 if scores else torch.long)
    found[:-1, 0], found[-1, 3] = values[:-1].to(found.dtype), values[-1].to(found.dtype)
    return found


def outputs(made: Any) -> list[Tensor]:
    """The outputs [B, C] of the pooled tokens after each block; no token is ever replaced."""
    x, found = made.embed(Tokens.from_ids(ids())), []
    pooled = targets() != IGNORE_INDEX
    for layer, block in enumerate(made.stack.blocks.values()):
        for sublayer in block.sublayers().values():
            x = sublayer(x, Tokens.from_ids(ids()))
        part = made.stack.exits.at[str(layer)] if layer + 1 < DEPTH else None
        norm, head = (made.stack.norm, made.head) if part is None else (part.norm, part.head)
        found.append((norm(x) @ head.classes.weight.mT + head.classes.bias)[pooled])
    return found


def leaves(policy: dict[str, Any], history: list[Tensor]) -> bool:
    """Whether an example leaves, by its outputs [C] at the exits so far."""
    kind, threshold = policy["criterion"], policy["threshold"]
    p = history[-1].softmax(-1)
    entropy = float(-(p * p.log()).sum())
    if kind == "entropy":
        return bool(entropy < threshold)
    if kind == "uncertainty":
        return bool(entropy / math.log(CLASSES) < threshold)
    if kind == "vote":
        labels = [int(output.argmax()) for output in history]
        return bool(max(labels.count(label) for label in labels) / len(labels) ** policy["power"] >= threshold)
    count = 0
    for one, other in itertools.pairwise(history):
        if "tolerance" in policy:
            agrees = abs(float(other) - float(one)) < policy["tolerance"]
        else:
            agrees = int(one.argmax()) == int(other.argmax())
        count = count + 1 if agrees else 0
    return bool(count >= threshold)


@pytest.mark.parametrize("name", POLICIES)
@torch.no_grad()
def test_an_example_leaves_as_a_whole_by_its_pooled_token(name: str) -> None:
    """All tokens of an example leave together, so that the outputs are those of a model of as many blocks."""
    policy, scores = POLICIES[name], name == "scores"
    made = built(scores=scores, policy=policy)
    after = outputs(made)
    wanted, predicted = [], []
    for row in range(ROWS):
        history = [output[row] for output in after]
        at = next((layer for layer in range(DEPTH - 1) if leaves(policy, history[: layer + 1])), DEPTH - 1)
        wanted.append(at + 1)
        if name == "vote":
            labels = [int(output.argmax()) for output in history[: at + 1]]
            most = max(labels.count(label) for label in labels)
            leader = [label for label in labels if labels.count(label) == most][-1]
            voters = [output for output, label in zip(history, labels, strict=False) if label == leader]
            predicted.append(torch.stack(voters).mean(0))
        else:
            predicted.append(history[at])
    assert len(set(wanted)) > 2, "examples leave at different exits"
    given = targets(scores=scores)
    early = EarlyExit(decode(ExitPolicyConfig, policy), made.stack.exits.pooled(given))
    logits = made(Tokens.from_ids(ids(), signals={EARLY_EXIT: early}))
    assert early.blocks is not None
    assert early.blocks.tolist() == [[blocks] * LENGTH for blocks in wanted]
    assert close(logits[given != IGNORE_INDEX], torch.stack(predicted))


@torch.no_grad()
def test_words_leave_one_by_one() -> None:
    made = built(per_example=False, policy=POLICIES["entropy"])
    assert made.stack.exits.pooled(targets()) is None
    early = EarlyExit(decode(ExitPolicyConfig, POLICIES["entropy"]))
    made(Tokens.from_ids(ids(), signals={EARLY_EXIT: early}))
    assert early.blocks is not None
    assert any(len(set(row)) > 1 for row in early.blocks.tolist())


@pytest.mark.parametrize("scores", [False, True], ids=["classes", "scores"])
def test_the_gradient_is_that_of_the_weighted_losses(scores: bool) -> None:
    made = built(scores=scores, weights="linear")
    values = targets(scores=scores)
    wanted = values[values != IGNORE_INDEX]
    losses = [
        (output[:, 0] - wanted).square().sum() if scores else F.cross_entropy(output, wanted, reduction="sum")
        for output in outputs(made)
    ]
    total = torch.stack([0.1 * (layer + 1) / 15 * loss for layer, loss in enumerate(losses)]).sum()
    parameters = [value for name, value in made.named_parameters() if value.requires_grad]
    expected = torch.autograd.grad(total, parameters, allow_unused=True)
    loss = made(Tokens.from_ids(ids(), target_weight=0.1, aux_loss_weight=1.0), values)
    assert close(loss, losses[-1])
    for right, gradient in zip(expected, torch.autograd.grad(0.1 * loss, parameters, allow_unused=True), strict=True):
        assert (right is None) == (gradient is None)
        assert right is None or close(gradient, right)


def test_self_sampling_leaves_as_a_whole() -> None:
    made = built(policy=POLICIES["entropy"], self_sampling=0.5)
    early = EarlyExit(decode(ExitPolicyConfig, POLICIES["entropy"]), made.stack.exits.pooled(targets()))
    with torch.no_grad():
        made(Tokens.from_ids(ids(), signals={EARLY_EXIT: early}))
    assert early.blocks is not None
    after = [output.detach() for output in outputs(made)]
    # A row that has left has the states of its last block, and so its heads' loss, in all later blocks.
    x, states = made.embed(Tokens.from_ids(ids())), []
    for layer, block in enumerate(made.stack.blocks.values()):
        y = x
        for sublayer in block.sublayers().values():
            y = sublayer(y, Tokens.from_ids(ids()))
        x = torch.where((early.blocks > layer)[..., None], y, x)
        states.append(x)
    last = made.head(made.stack.norm(states[-1]), targets())
    loss = made(Tokens.from_ids(ids(), target_weight=1.0, progress=0.5), targets())
    assert close(loss, last)
    assert not close(loss, F.cross_entropy(after[-1], targets()[targets() != IGNORE_INDEX], reduction="sum"))


REFUSED: dict[str, tuple[dict[str, Any], bool, bool, str]] = {
    "entropy of scores": ({"policy": POLICIES["entropy"]}, True, True, "'entropy' reads a distribution or votes"),
    "patience without a distance": ({"policy": POLICIES["patience"]}, True, True, "how close these are. Take 0.1"),
    "a distance of classes": ({"policy": POLICIES["scores"]}, False, True, "the exits predict tokens or classes"),
    "diversity of scores": ({"diversity": 0.1}, True, True, "scores have no distribution"),
    "neighbours of an example": (
        {"policy": {**POLICIES["uncertainty"], "window": 1}},
        False,
        True,
        "has no neighbours",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_labels_cannot_have_is_refused(name: str) -> None:
    exits, scores, per_example, message = REFUSED[name]
    (problem,) = decode(ExitsConfig, exits).check_outputs("exits", scores=scores, per_example=per_example)
    assert message in str(problem)


def test_a_distance_is_for_patience() -> None:
    policy = decode(ExitPolicyConfig, {"criterion": "entropy", "threshold": 1, "tolerance": 0.5})
    (problem,) = policy.check(4, "policy")
    assert "policy.tolerance: is not used by 'entropy'" in str(problem)


class Sums:
    """Stands for the scores of an evaluation: keeps what it is told of the blocks."""

    def __init__(self) -> None:
        self.blocks: list[tuple[float, float]] = []

    def add(self, batch: Batch, logits: Tensor, computed: float, units: float) -> None:
        self.blocks.append((computed, units))

    def means(self, device: torch.device) -> tuple[float, float, dict[str, float]]:
        ((computed, units),) = self.blocks
        return computed / units, 0.0, {}


@pytest.mark.parametrize("per_example", [True, False], ids=["examples", "words"])
@torch.no_grad()
def test_a_curve_counts_the_blocks_of_predictions(per_example: bool) -> None:
    policy = decode(ExitPolicyConfig, POLICIES["entropy"])
    made = built(per_example=per_example, policy=POLICIES["entropy"])
    given = targets()
    early = EarlyExit(policy, made.stack.exits.pooled(given))
    made(Tokens.from_ids(ids(), signals={EARLY_EXIT: early}))
    assert early.blocks is not None
    wanted = sum(int(early.blocks[row, at]) for row, at in (given != IGNORE_INDEX).nonzero().tolist()) / (ROWS * DEPTH)
    batches: Any = lambda: [(Batch(Tokens.from_ids(ids()), given), True)]  # noqa: E731
    new_scores: Any = Sums
    found, plain = exit_curve(made, batches, policy, [policy.threshold, None], new_scores)
    assert found.blocks == pytest.approx(wanted)
    assert plain.blocks == 1.0
    of_all = float(early.blocks.double().mean()) / DEPTH
    assert per_example or found.blocks != pytest.approx(of_all), "not of the tokens that predict nothing"


@pytest.mark.parametrize("exits", range(2, 9))
@pytest.mark.parametrize("power", [0.0, 0.3, 0.5, 1.0])
def test_the_usual_thresholds_of_a_vote_are_accepted(exits: int, power: float) -> None:
    policy = decode(ExitPolicyConfig, {"criterion": "vote", "threshold": 1.0, "power": power})
    refused = [
        value
        for value in policy.thresholds(exits, CLASSES)
        if policy.model_copy(update={"threshold": value}).check_threshold(exits, "")
    ]
    assert refused == []
